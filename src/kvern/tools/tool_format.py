"""The protocol of tool-call formats; each format is one file."""

import re
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from kvern.request.pieces import Piece
from kvern.request.sampling_params import StructuredOutput

LONGEST_NAME = 128
"""Characters, as many as OpenAI's; one of a namespace carries the name of that, too."""
NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}")
"""Names that tools may have."""


ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the tools' arguments, by tool name."""


class GrammarPieces(Protocol):
    """Writes the elements of a grammar's expressions (Lark)."""

    def literal(self, text: str) -> str:
        """A literal text; special tokens in it become tokens."""
        ...

    def part(self, form: StructuredOutput) -> str:
        """Returns a reference to a grammar or schema of its own, for `form`.

        A free text must not match the literal that follows it: it excludes a character that begins the literal, or has
        the literal in its own form.
        """
        ...

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """The reference to JSON that matches a schema."""
        ...


IDENTITY, NUMBER = "\x00", "\x01"
"""Stand in a form where the template writes a call's id, or its number."""
WILD = {IDENTITY: "/[a-zA-Z0-9]{9}/", NUMBER: "/[0-9]{1,4}/"}


def literal(text: str, write: GrammarPieces) -> str:
    """A grammar's expression for a text with ids and numbers in it.

    Line breaks are separate literals, because a lexer waits for the longer of two literals with a common beginning.
    """
    pieces = re.split(f"([{IDENTITY}{NUMBER}]|\\n+)", text)
    return " ".join(WILD.get(piece) or write.literal(piece) for piece in pieces if piece)


class ToolParser(Protocol):
    """Reads one answer. The joined results do not depend on how the text is cut."""

    def feed(self, text: str) -> list[Piece]:
        """Reads the next characters."""
        ...

    def finish(self) -> list[Piece]:
        """Ends the text and returns what was held back."""
        ...


class ToolFormat(Protocol):
    """One format. A call begins with `trigger` anywhere in an answer; None: calls are the whole answer."""

    @property
    def name(self) -> str:
        """The value for --tool-parser."""
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
        """The beginning of a call; None: `opening` is the answer's first character."""
        ...

    @property
    def opening(self) -> str:
        """The first character of a call."""
        ...

    def matches(self, template: str) -> bool:
        """Returns True if the text of a template describes this format: asked of templates that render no calls.

        It also chooses among instances with one name. Rendered calls are recognised by `parser`.
        """
        ...

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """A parser of an answer to a request with these tools."""
        ...

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """A grammar's expression (Lark) for one call of one of the tools, or one or more, after `trigger`."""
        ...


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
