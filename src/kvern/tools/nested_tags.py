"""MiniMax-M3: a parameter's tags bear its name, and objects and lists in it are tags within tags.

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvern.tools.tool_format import ToolParser, ToolSchemas
from kvern.tools.xml_call import XmlParser
from kvern.tools.xml_form import KEY_IN_TAG, Gaps, XmlForm
from kvern.tools.xml_values import ParameterSchema, written_value

SPACE = "]<]minimax[>["
"""The token before every tag."""
TAG = re.compile(rf"{re.escape(SPACE)}<(/?)({KEY_IN_TAG})>")
ITEM = "item"
DEEPEST = 100


class NestedTags(XmlForm):
    """The format; see ToolFormat."""

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The tags leave no doubt, so that calls of unknown tools are calls, too."""
        return NestedTagsParser(self, tools)


MINIMAX_M3 = NestedTags(
    "minimax_m3",
    (f"{SPACE}<tool_call>", f"{SPACE}</tool_call>"),
    (f'{SPACE}<invoke name="', '">', f"{SPACE}</invoke>"),
    (f"{SPACE}<", ">", f"{SPACE}</{{}}>"),
    several_inside=True,
    forgiving=False,
    gaps=Gaps(head="", parameter=""),
    special=(SPACE,),
)


class NestedTagsParser(XmlParser):
    """Reads tags within a parameter when it has ended."""

    brackets = ""
    """The bracket with which tags begin."""

    def value(self, text: str, parameter: ParameterSchema, types: frozenset[str]) -> str:
        """A value as JSON; without tags its type follows the schema."""
        if not text.lstrip().startswith(SPACE):
            return written_value(text, types)
        try:
            return msgspec.json.encode(_Tree(text).value(parameter, 0)).decode()
        except ValueError:
            return msgspec.json.encode(text).decode()


class _Tree:
    """Reads nested tags; raises ValueError where they are not nested."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def value(self, parameter: ParameterSchema, depth: int) -> Any:
        """Reads up to the closing tag, which is kept, or to the end."""
        opened = TAG.search(self._text, self._place)
        if depth > DEEPEST:
            raise ValueError("too deep")
        if opened is None or opened[1]:
            end = len(self._text) if opened is None else opened.start()
            leaf, self._place = self._text[self._place : end], end
            return msgspec.json.decode(written_value(leaf, parameter.types()))
        found: list[tuple[str, Any]] = []
        while (opened := TAG.search(self._text, self._place)) is not None and not opened[1]:
            self._place = opened.end()
            found.append((opened[2], self.value(parameter.inside(opened[2]), depth + 1)))
            closed = TAG.match(self._text, self._place)
            if closed is None or closed[2] != opened[2] or not closed[1]:
                raise ValueError("not closed")
            self._place = closed.end()
        if all(name == ITEM for name, _ in found) and "array" in parameter.types():
            return [value for _, value in found]
        fields: Mapping[str, Any] = dict(found)
        return fields
