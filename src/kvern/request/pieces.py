"""Pieces of an answer, and the message that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of a tool; calls are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next characters of a call's arguments, which are JSON."""

    index: int
    text: str


Piece = Content | Reasoning | CallBegins | Arguments


@dataclass
class ToolCall:
    """A call of a tool; `arguments` is JSON, as far as the model has written it."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """An answer in parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Adds pieces to the message."""
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegins(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case Arguments(index, text):
                    self.tool_calls[index].arguments += text
