"""The marks of a chat template between which models think before they answer.

Marks are learnt from the template's rendering of an assistant's message with thinking, or else found in its text:

    ...<|open|>think<|sep|>THOUGHT<|close|>think<|sep|><|open|>response<|sep|>SAID<|close|>response<|sep|>...
       begin                      end                  opens an answer            closes it

An end mark is recognized as the partner of its begin mark, as `</a>` is that of `<a>`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvern.errors import InvalidRequest
from kvern.text.chat_template import ChatTemplate

ASKED = "kvern-asked"
THOUGHT = "kvern-thought"
SAID = "kvern-said"
SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
PARTNERS = (("START", "END"), ("start", "end"), ("BEGIN", "END"), ("begin", "end"), ("open", "close"), ("pre", "suf"))
OPENED = re.compile(r"<(?!\|)[^<>/]*(?:think|reason|thought)[^<>/]*>\Z", re.IGNORECASE)
"""A mark at the end of a prompt that opens the thinking."""


def written_marks(template: str, names: Sequence[str]) -> ThinkingFormat | None:
    """The marks around thinking; `names` are the fields of a message for it. None: the template renders no thinking."""
    said = {"role": "assistant", "content": SAID, **dict.fromkeys(names, THOUGHT)}
    before, thought, rest = _behind_question(template, [said], False).partition(THOUGHT)
    middle, answered, after = rest.partition(SAID)
    if not thought or not answered:
        return None
    before = before.rstrip()
    middle = middle.strip()
    after = after.strip()
    for start in reversed([match.start() for match in MARK.finditer(before)]):
        begin = before[start:]
        for end in _partners(begin):
            if middle.startswith(end):
                answer = middle[len(end) :].strip()
                closes = [closed for closed in _partners(answer) if after.startswith(closed)]
                return ThinkingFormat("learnt", begin, end, answer=answer, wraps=(answer, *closes) if answer else ())
    return None


def opened_marks(template: str) -> ThinkingFormat | None:
    """The mark at the end of prompts, if its name says that it opens thinking, and its partner."""
    opened = OPENED.search(_behind_question(template, [], True).rstrip())
    partners = [] if opened is None else [ThinkingFormat("learnt", opened[0], end) for end in _partners(opened[0])]
    return next(iter(partners), None)


def _partners(mark: str) -> list[str]:
    """The possible partners of a mark."""
    closed = [f"{mark[:place]}/{mark[place:]}" for place in (1, 2) if mark[:1] in ("<", "[")]
    return closed + [mark.replace(one, other) for one, other in PARTNERS if one in mark]


def _behind_question(template: str, answers: Sequence[Mapping[str, Any]], prompt: bool) -> str:
    """The text after a user's message; empty if the template refuses."""
    try:
        asked = {"role": "user", "content": ASKED}
        text = ChatTemplate({"default": template}).render([asked, *answers], None, prompt, SPECIAL_TOKENS)
    except InvalidRequest:
        return ""
    return text.rpartition(ASKED)[2]


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


@functools.lru_cache(maxsize=64)
def thinking_of(template: str, wanted: str) -> ThinkingFormat | None:
    """The marks named `wanted`; "auto": those that the template renders, or else contains; None: none."""
    if wanted != "auto":
        return next((form for form in THINKING if form.name == wanted), None)
    learnt = written_marks(template, REASONING)
    known = [form for form in THINKING if all(mark in template for mark in (form.end, *form.tokens))]
    if learnt is None and not known:
        learnt = opened_marks(template)
    if learnt is not None:
        known = [form for form in THINKING if (form.begin, form.end) == (learnt.begin, learnt.end)] or [learnt]
    if not known:
        return None
    wraps = [mark for known_by, marks in WRAPS.items() if known_by in template for mark in marks]
    return replace(known[0], wraps=(*known[0].wraps, *wraps)) if wraps else known[0]
