"""The base class of tool-call formats, and what writes their grammars; each format is one file."""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvern.request.pieces import Piece
from kvern.request.sampling_params import StructuredOutput

LONGEST_NAME = 128
"""Characters, as many as OpenAI's; one of a namespace carries the name of that, too."""
NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}")
"""Names that tools may have."""


ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the tools' arguments, by tool name."""


class GrammarPieces:
    """Writes the elements of a grammar's expressions (Lark).

    `literal` writes a literal text, in which special tokens become tokens. Grammars and schemas of their own are
    collected in `parts`.
    """

    def __init__(self, literal: Callable[[str], str], parts: dict[str, StructuredOutput]) -> None:
        self.literal = literal
        self._parts = parts
        self._names: dict[str, str] = {}

    def part(self, form: StructuredOutput) -> str:
        """Returns a reference to a grammar or schema of its own, for `form`; equal ones share one name.

        A free text must not match the literal that follows it: either it excludes the literal's first character, or
        the literal is the end of `form`.
        """
        name = self._names.setdefault(form.grammar or json.dumps(form.json), f"call_{len(self._names)}")
        self._parts[name] = form
        return f"@{name}"

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """The reference to JSON that matches a schema."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return self.part(StructuredOutput(json=dict(schema)))

    def call(self, tools: ToolSchemas, head: Callable[[str], str]) -> str:
        """The expression for a call with JSON arguments; `head` writes what is before those of the tool it is given."""
        return f"({' | '.join(f'{head(name)} {self.json(schema)}' for name, schema in tools.items())})"


IDENTITY = "\x00"
"""Stands in a form where the template writes a call's id of nine characters."""
NUMBER = "\x01"
"""Stands where it writes a call's number."""
ANY_IDENTITY = "\x02"
"""Stands where it writes an id of any length."""
WILD = {IDENTITY: "/[a-zA-Z0-9]{9}/", NUMBER: "/[0-9]{1,4}/", ANY_IDENTITY: "/[a-zA-Z0-9]{4,16}/"}


def literal(text: str, write: GrammarPieces) -> str:
    """A grammar's expression for a text with ids and numbers in it.

    Line breaks are separate literals, because a lexer waits for the longer of two literals with a common beginning.
    """
    pieces = re.split(f"([{''.join(WILD)}]|\\n+)", text)
    return " ".join(WILD.get(piece) or write.literal(piece) for piece in pieces if piece)


class ToolParser(Protocol):
    """Reads one answer. The joined results do not depend on how the text is cut."""

    def feed(self, text: str) -> list[Piece]:
        """Reads the next characters."""

    def finish(self) -> list[Piece]:
        """Ends the text and returns what was held back."""


class ToolFormat(ABC):
    """One format. A call begins with `trigger` anywhere in an answer; None: calls are the whole answer."""

    name: str
    """The value for --tool-parser."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        return ()

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens after which the model waits for a tool's answer."""
        return ()

    @property
    def trigger(self) -> str | None:
        """The beginning of a call; None: `opening` is the answer's first character."""
        return None

    @property
    def opening(self) -> str:
        """The first character of a call."""
        return (self.trigger or "")[:1]

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Returns True if the text of a template mentions this format. It is asked if rendering shows no calls.

        It also chooses among instances with one name. Rendered calls are recognised by `parser`.
        """

    @abstractmethod
    def parser(self, tools: ToolSchemas) -> ToolParser:
        """A parser of an answer to a request with these tools."""

    @abstractmethod
    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """A grammar's expression (Lark) for one call of one of the tools, or one or more, after `trigger`."""

    def headed(self, tools: ToolSchemas, write: GrammarPieces) -> str:
        """A grammar's expression for the header of a message that calls one of the tools; empty: there are none."""
        return ""

    def as_written(self, texts: Sequence[str], names: Sequence[str]) -> "ToolFormat":
        """The format with what it learns from a template's rendering of calls to these functions, such as blanks."""
        return self


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
