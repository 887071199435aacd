"""The switches of a chat template for thinking.

Requests have `enable_thinking` (or `thinking`) and `reasoning_effort`; a template may read any of the names below.
Names that it compares with texts (`thinking_mode == "disabled"`) get the text with the same meaning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from kvern.text.chat_template import environment

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
        efforts = [self._no_effort(name) for name in EFFORTS if name in self.read]
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
            return self._no_effort(name) or effort
        is_only_switch = enabled and not any(each in self.read for each in (*SWITCHES, *REVERSED))
        if effort is None and is_only_switch and any(_word(text) in OFF for text in self.read[name]):
            return _nearest("high", self.read[name])
        return effort

    def _no_effort(self, name: str) -> str | None:
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
