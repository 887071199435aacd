"""Thinking of a chat template: the marks between which models think before they answer, and the switches for it.

Marks are learnt from the template's rendering of an assistant's message with thinking, or else found in its text:

    ...<|open|>think<|sep|>THOUGHT<|close|>think<|sep|><|open|>response<|sep|>SAID<|close|>response<|sep|>...
       begin                      end                  opens an answer            closes it

An end mark is recognized as the partner of its begin mark, as `</a>` is that of `<a>`.

Requests have `enable_thinking` (or `thinking`) and `reasoning_effort`; a template may read any of the names below.
Names that it compares with texts (`thinking_mode == "disabled"`) get the text with the same meaning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jinja2
import jinja2.meta
from jinja2 import nodes

from kvern.errors import InvalidRequest
from kvern.request.sampling_params import StopScope
from kvern.text.chat_template import ChatTemplate, environment
from kvern.tools.buffered import BLANKS

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


@dataclass(frozen=True)
class Thought:
    """The thinking before an answer. `budget` is in tokens; None: unlimited."""

    form: ThinkingFormat
    beginning: Beginning
    budget: int | None = None


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


PLAIN = ("enable_thinking", "thinking")
"""The names of the switch in requests."""
TYPE = "thinking_type"
"""The name of a finer choice in requests: "adaptive" with the switch on."""
SWITCHES = (
    *PLAIN, "think", "thinking_mode", TYPE, "thinking_option", "think_mode", "thinking_enabled",
    "use_thinking", "is_thinking", "reasoning", "reasoning_mode", "enable_reasoning", "force_reasoning",
    "force_thinking",
)  # fmt: skip
REVERSED = ("no_think", "nothink", "no_thinking", "disable_thinking", "disable_reasoning", "no_reasoning")
EFFORT = "reasoning_effort"
EFFORTS = (EFFORT, "thinking_effort", "reasoning_strength", "reasoning_level", "effort")
BUDGETS = ("thinking_budget", "thinking_token_budget", "reasoning_budget")
ON = ("enabled", "enable", "on", "think", "thinking", "true", "yes", "always")
OFF = ("disabled", "disable", "off", "none", "no", "false", "no_think", "nothink", "non_thinking", "chat", "never")
ADAPTIVE = ("adaptive", "auto", "dynamic", "hybrid")
"""The value for a choice by the model; templates without such a text let the model think."""
RANKS = {
    **dict.fromkeys(OFF, 0),
    **{word: rank for rank, word in enumerate(("minimal", "low", "medium", "high", "xhigh", "max"), 1)},
}


class Switches:
    """The switches of one template. `read` are the names that it reads, each with the texts it is compared with."""

    def __init__(self, template: str) -> None:
        try:
            tree = environment().parse(template)
            undeclared = jinja2.meta.find_undeclared_variables(tree)
        except (jinja2.TemplateError, RecursionError):
            tree, undeclared = nodes.Template([]), set()
        self.read = {name: _texts(tree, name) for name in undeclared & {*SWITCHES, *REVERSED, *EFFORTS, *BUDGETS}}

    @property
    def turns_off(self) -> bool:
        """True if one of the names can turn thinking off."""
        efforts = [self._effort(name, "none") for name in EFFORTS if name in self.read]
        return any(name in self.read for name in (*SWITCHES, *REVERSED, *BUDGETS)) or any(efforts)

    @property
    def has_efforts(self) -> bool:
        """True if the template reads an effort of thinking."""
        return any(name in self.read for name in EFFORTS)

    def variables(
        self, given: Mapping[str, Any], budget: int | None, takes: Callable[[Mapping[str, Any]], bool]
    ) -> dict[str, Any]:
        """`given`, and the same under the other names. `takes`: the template renders with these."""
        enabled, effort = enabled_of(given), given.get(EFFORT)
        adaptive = given.get(TYPE) in ADAPTIVE
        words = OFF if enabled is False else ADAPTIVE + ON if adaptive else ON + ADAPTIVE
        found: dict[str, Any] = {}
        if enabled is not None:
            found |= {name: self._switch(name, words, enabled) for name in SWITCHES if name in self.read}
            found |= {name: not enabled for name in REVERSED if name in self.read}
        amount = 0 if enabled is False else budget
        if amount is not None:
            found |= {name: amount for name in BUDGETS if name in self.read}
        for name in EFFORTS:
            if name in self.read and (wanted := self._wanted_effort(name, enabled, effort)) is not None:
                found[name] = wanted
        general = {
            EFFORT,
            *(name for name in PLAIN if isinstance(given.get(name), bool)),
            *([TYPE] if adaptive else []),
        }
        all_names = {**given, **found, **{name: value for name, value in given.items() if name not in general}}
        for name in EFFORTS:
            if isinstance(all_names.get(name), str) and self.read.get(name) and not takes(all_names):
                all_names[name] = _nearest(all_names[name], self.read[name])
        return all_names

    def _switch(self, name: str, words: Sequence[str], enabled: bool) -> bool | str:
        ranked = [(words.index(_word(text)), text) for text in self.read[name] if _word(text) in words]
        return min(ranked)[1] if ranked else enabled

    def _wanted_effort(self, name: str, enabled: bool | None, effort: Any) -> Any:
        """The requested effort; None: the template's default."""
        if enabled is False:
            return self._effort(name, "none") or effort
        is_only_switch = enabled and not any(each in self.read for each in (*SWITCHES, *REVERSED))
        if effort is None and is_only_switch and any(_word(text) in OFF for text in self.read[name]):
            return _nearest("high", self.read[name])
        return effort

    def _effort(self, name: str, effort: str) -> str | None:
        """The text for no effort, or the least one that counts as none."""
        texts = self.read[name]
        least = [text for words in (OFF, ("minimal",)) for text in texts if _word(text) in words]
        return least[0] if least else None


@functools.lru_cache(maxsize=64)
def switches_of(template: str) -> Switches:
    """The switches that a template reads."""
    return Switches(template)


def enabled_of(given: Mapping[str, Any]) -> bool | None:
    """The request's choice whether the model thinks; None: it makes none."""
    said = (given.get(name) for name in PLAIN)
    return next((value for value in said if isinstance(value, bool)), None)


def _texts(tree: nodes.Template, name: str) -> tuple[str, ...]:
    """Texts that a template compares a variable with, in the order of their places."""
    found: list[str] = []
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_is_name(side, name) for side in sides):
            found += [text for side in sides for text in _constants(side)]
    return tuple(dict.fromkeys(found))


def _is_name(node: nodes.Node | None, name: str) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    return isinstance(node, nodes.Name) and node.name == name


def _constants(node: nodes.Node) -> list[str]:
    """Texts of a constant, or of a list of constants, which Jinja may have made one constant."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return [text for item in node.items for text in _constants(item)]
    value = node.value if isinstance(node, nodes.Const) else None
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, str)]


def _word(text: str) -> str:
    return re.sub("[^a-z_]", "", text.lower().replace("-", "_"))


def _nearest(effort: str, texts: Collection[str]) -> str:
    """The effort of `texts` that is nearest to `effort`, the greater of two; `effort` itself if it is unknown."""
    ranked = [(RANKS[_word(text)], text) for text in texts if _word(text) in RANKS]
    rank = RANKS.get(_word(effort))
    if rank is None or not ranked:
        return effort
    thinking = [each for each in ranked if each[0] > 0] if rank else ranked
    return min(thinking or ranked, key=lambda each: (abs(each[0] - rank), -each[0]))[1]
