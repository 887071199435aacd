"""The marks between which models think before they answer, and which of them a chat template has."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from kvern.request.sampling_params import StopScope
from kvern.tools.buffered import BLANKS
from kvern.tools.learnt_thinking import opened_marks, written_marks

TAG = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True)
class ThinkingFormat:
    """The marks of one family. `name` is its value for --reasoning-parser; `tokens` are the tokens of the marks.

    between    separates thinking from the answer if they are messages of one turn; the parser of calls reads such a
    turn
    answer     opens the answer
    wraps      marks around an answer, which are removed
    also_ends  marks that end the thinking too, and stay in the text
    always     the model thinks without a begin mark, too
    """

    name: str
    begin: str
    end: str
    tokens: tuple[str, ...] = ()
    between: str = ""
    answer: str = ""
    wraps: tuple[str, ...] = ()
    also_ends: tuple[str, ...] = ()
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        texts = (self.begin, self.end, self.answer, *self.wraps)
        return self.tokens or tuple(
            dict.fromkeys(mark for text in texts for mark in (text, *TAG.findall(text)) if mark)
        )

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end the thinking."""
        return (self.end, *self.also_ends)

    @property
    def in_turns(self) -> bool:
        """True if thinking is a separate message; an answer may have several."""
        return bool(self.between)


HARMONY = ThinkingFormat(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    between="<|start|>assistant",
    answer="<|channel|>final<|message|>",
)
MESSAGE_BEGINS = ("<|start|>", "<|channel|>")
ANSWER_HEADER = r"<\|channel\|>(?!\s*analysis\b)[^<]{0,200}(?:<\|constrain\|>[^<]{0,200})?<\|message\|>"
"""The header of HARMONY's messages that are not thinking."""
THINKING = (
    ThinkingFormat("think", "<think>", "</think>"),
    ThinkingFormat("mistral", "[THINK]", "[/THINK]"),
    ThinkingFormat("seed", "<seed:think>", "</seed:think>"),
    ThinkingFormat("gemma4", "<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    ThinkingFormat("minimax_m3", "<mm:think>", "</mm:think>"),
    ThinkingFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        wraps=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ThinkingFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer="<|open|>response<|sep|>",
        wraps=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ThinkingFormat(
        "solar",
        "<|think|>",
        "<|end|>",
        ("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
        answer="<|content|>",
        wraps=("<|begin|>assistant", "<|content|>"),
    ),
    ThinkingFormat(
        "muse",
        "to=self<|message|>",
        "<|eom|>",
        ("<|start|>", "<|message|>", "<|eom|>"),
        answer="to=user<|message|>",
        wraps=("<|start|>assistant", "to=user<|message|>"),
    ),
    ThinkingFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkingFormat(
        "apriel",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        wraps=("[END FINAL RESPONSE]",),
        also_ends=("<tool_calls>",),
        always=True,
    ),
    HARMONY,
)
"""DeepSeek R1, Qwen3, QwQ, SmolLM3, GLM and many others; then formats of single families."""
WRAPS = {"<response></response>": ("<response>", "</response>"), "<|extra_0|>": ("<answer>", "</answer>")}
"""Marks around an answer after thinking, by a text in the template: Granite 3, Hunyuan."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant message's thinking, as clients and chat templates use them."""

Beginning = Literal["possible", "inside", "over"]
"""The end of a prompt: before thinking, in the middle of it (the template opened it), or after it (it is off)."""


def thinking_of(template: str, wanted: str) -> ThinkingFormat | None:
    """The marks named `wanted`; "auto": those that the template renders, or else contains; None: none."""
    if wanted != "auto":
        return next((form for form in THINKING if form.name == wanted), None)
    learnt = written_marks(template, REASONING)
    known = [form for form in THINKING if all(mark in template for mark in (form.end, *form.tokens))]
    if learnt is None and not known:
        learnt = opened_marks(template)
    if learnt is not None:
        same = [form for form in THINKING if (form.begin, form.end) == (learnt.begin, learnt.end)]
        known = same or [ThinkingFormat("learnt", learnt.begin, learnt.end, answer=learnt.answer, wraps=learnt.wraps)]
    if not known:
        return None
    wraps = [mark for known_by, marks in WRAPS.items() if known_by in template for mark in marks]
    return replace(known[0], wraps=(*known[0].wraps, *wraps)) if wraps else known[0]


def stop_scope(form: ThinkingFormat, beginning: Beginning, exact: bool = False) -> StopScope | None:
    """The part of an answer in which stop strings count; None: all of it. `exact`: see ThinkingSplitter."""
    if form.in_turns:
        return StopScope((form.end, *MESSAGE_BEGINS), ANSWER_HEADER, (), beginning, again=True, quotable=False)
    if beginning == "over" and exact:
        return None
    skipped = (*BLANKS, *filter(None, (form.answer, *form.wraps)))
    return StopScope((form.begin,), "|".join(map(re.escape, form.ends)), skipped, beginning, not exact, quotable=True)


def beginning_of(prompt_end: str, form: ThinkingFormat) -> Beginning:
    """The state of thinking at the end of a prompt, from its last characters."""
    text = prompt_end.rstrip(BLANKS)
    if text.endswith(form.begin):
        return "inside"
    if text.endswith(form.answer or form.end) or (not form.in_turns and text.endswith(form.end)):
        return "over"
    return "inside" if form.always else "possible"
