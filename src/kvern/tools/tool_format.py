"""How a family of models writes calls of tools: the protocol behind which each format is one file."""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvern.tools.pieces import Piece

LONGEST_NAME = 128
"""Characters, as many as OpenAI's; one of a namespace carries the name of that, too."""
NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}")
"""Names that tools may have."""


@dataclass(frozen=True)
class CallableTool:
    """A tool as a grammar needs it; `arguments` stands for a value of its schema, `schema` is that schema."""

    name: str
    arguments: str
    schema: Any


WriteLiteral = Callable[[str], str]
"""A text as a grammar's expression: special tokens in it become tokens."""


class ToolParser(Protocol):
    """Reads one answer. What it returns adds up to the same however the text is cut."""

    def feed(self, text: str) -> list[Piece]:
        """The next characters."""
        ...

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back."""
        ...


class ToolFormat(Protocol):
    """One format. A call begins with `trigger` wherever it stands; None: calls are the whole answer."""

    @property
    def name(self) -> str:
        """What --tool-parser calls it."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens after which the model waits for a tool's answer."""
        ...

    @property
    def trigger(self) -> str | None:
        """What a call begins with; without one, `opening` is the answer's first character."""
        ...

    @property
    def opening(self) -> str:
        """The first character of a call."""
        ...

    def matches(self, template: str) -> bool:
        """A chat template's text speaks this format."""
        ...

    def parser(self, names: frozenset[str]) -> ToolParser:
        """For an answer to a request with these tools."""
        ...

    def calls(self, tools: Sequence[CallableTool], several: bool, literal: WriteLiteral) -> str:
        """A grammar's expression (Lark) for one call of one of the tools, or one or more, after `trigger`."""
        ...


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
