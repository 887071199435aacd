"""gpt-oss: an answer is a turn of several messages, each with a channel that names its kind, and maybe a recipient.

    <|channel|>analysis<|message|>The weather in Oslo, then.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

    header -> body -> header
           -> call -> arguments -> body

(OpenAI, "Harmony response format".) The recipient may precede the channel. Anything that is no header is text of the
current message. Analysis is reasoning; other messages without a tool are content, and so is text after a call's
arguments, where the format allows none.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kvern.request.pieces import Content, Reasoning
from kvern.text.chat_template import check_messages
from kvern.tools.buffered import BLANKS, BufferedParser, first_mark
from kvern.tools.json_call import JsonArguments
from kvern.tools.thinking import HARMONY, REASONING
from kvern.tools.tool_format import NAME, GrammarPieces, ToolFormat, ToolParser, ToolSchemas

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
BODY_ENDS = (*ENDS, START, CHANNEL)
HEADER_BEGINS = (START, CHANNEL, CONSTRAIN, MESSAGE, "assistant", "to=")
LONGEST_HEADER = 512
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w*)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."
TO = r"\x20to=[a-zA-Z0-9_.-]{1,140}"
"""A recipient in a grammar."""
BEGUN_HEADER = re.compile(
    r"(?:<\|start\|>\w*|<\|channel\|>)\s*(?:to=\S*)?\s*(?:<\|channel\|>)?\s*\w*\s*(?:to=\S*)?\s*(?:<\|constrain\|>\w*)?"
)
"""An incomplete header, which is no text if the turn ends there."""

Kind = Literal["content", "reasoning", "call"]


class Harmony(ToolFormat):
    """The format; see ToolFormat. It reads thinking as well."""

    name = HARMONY.name
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
    stops = (CALL, RETURN)
    opening = "<"

    def matches(self, template: str) -> bool:
        """The template writes messages with these tokens."""
        return all(token in template for token in HARMONY.tokens)

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The parser; a recipient is always a call, also of an unknown tool, if there are tools at all."""
        return HarmonyParser(tools)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """One message, with which the turn ends: its header as the template writes it, or as OpenAI's documents do."""
        one = []
        for name, schema in tools.items():
            before = write.literal(f" to={FUNCTIONS}{name}{CHANNEL}commentary json{MESSAGE}")
            behind = write.literal(f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}")
            one.append(f"({before} | {behind}) {write.json(schema)}")
        return f"({' | '.join(one)})"


def free_messages(literal: Callable[[str], str]) -> str:
    """A grammar's expression for any messages but analysis, and its rules; `literal` writes a text with its tokens."""
    channel, constrain, message, further = map(literal, (CHANNEL, CONSTRAIN, MESSAGE, f"{END}{HARMONY.between}"))
    return "\n".join(
        (
            f"message ({further} message)*",
            f"message: RECIPIENT? {channel} CHANNEL ({constrain} TYPE)? {message} TEXT",
            rf"RECIPIENT: /{TO}/",
            rf"CHANNEL: /(final|commentary)({TO})?(\x20[a-z]{{0,16}})?/",
            "TYPE: /[a-z]{1,16}/",
            "TEXT: /(?s:.*)/",
        )
    )


class HarmonyParser(BufferedParser):
    """A parser of a turn, message by message."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__()
        self._tools = tools
        self._kind: Kind = "content"
        self._written: set[Kind] = set()
        self._separator = ""
        self.state = self.marked_state

    def marked_state(self) -> bool:
        """A header, or text in its place."""
        window = self.buffer[:LONGEST_HEADER]
        text = window.lstrip(BLANKS)
        if text.startswith(ENDS):
            self.drop(next(end for end in ENDS if text.startswith(end)))
            self._next_message("content")
            return True
        places = [place for mark in (MESSAGE, *ENDS) if (place := window.find(mark)) >= 0]
        if text.startswith(HEADER_BEGINS):
            if places and window.startswith(MESSAGE, min(places)):
                self._open(self.take(min(places) + len(MESSAGE)))
                return True
            certain = bool(places) or self.ended or len(self.buffer) >= LONGEST_HEADER
        else:
            may_begin = any(mark.startswith(text) for mark in (*HEADER_BEGINS, *ENDS))
            certain = self.ended or not may_begin or len(self.buffer) >= LONGEST_HEADER
        return certain and self._no_header(text)

    def _no_header(self, text: str) -> bool:
        if not self.buffer:
            return False
        if self.ended and (BEGUN_HEADER.fullmatch(text) or (not text and self._written)):
            self.buffer = ""
            return False
        blanks = len(self.buffer) - len(self.buffer.lstrip(BLANKS))
        mark = next((mark for mark in (START, CHANNEL) if text.startswith(mark)), "")
        self._write(self.take(blanks + len(mark)))
        self.state = self.content_state
        return True

    def _open(self, header: str) -> None:
        channel, recipient = ([None, *pattern.findall(header)][-1] for pattern in (CHANNEL_NAME, RECIPIENT))
        name = (recipient or "").removeprefix(FUNCTIONS)
        calls = self._tools and NAME.fullmatch(name) and (name != recipient or name in self._tools)
        self._next_message("call" if calls else "reasoning" if channel == "analysis" else "content")
        if calls:
            self.begin(name)
        self.state = self._call_state if calls else self.content_state

    def _next_message(self, kind: Kind) -> None:
        self._kind = kind
        self._separator = "\n\n" if kind in self._written else ""

    def _call_state(self) -> bool:
        """Arguments begin. Marks in the strings of JSON are a part of it."""
        self.buffer = text = self.buffer.lstrip(BLANKS)
        if text.startswith("{"):
            self.state = JsonArguments(self, self._end_arguments).state
            return True
        if not self.ended and any(mark.startswith(text) for mark in BODY_ENDS if mark != text):
            return False
        if not text or text.startswith(BODY_ENDS):
            self.arguments("{}")
            self._next_message("content")
        self.state = self.content_state
        return True

    def _end_arguments(self) -> None:
        self._next_message("content")
        self.state = self._behind_state

    def _behind_state(self) -> bool:
        """Drops blanks after arguments, which belong to the call."""
        self.buffer = self.buffer.lstrip(BLANKS)
        if not self.buffer:
            return False
        self.state = self.content_state
        return True

    def content_state(self) -> bool:
        """The text of a message, up to a mark."""
        place, mark = first_mark(self.buffer, BODY_ENDS, self.ended)
        self._write(self.take(place))
        if mark in ENDS:
            self.take(len(mark))
            self._next_message("content")
        if mark:
            self.state = self.marked_state
        return bool(mark)

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self.arguments(text)
        else:
            shown, self._separator = self._separator + text, ""
            self._pieces.append(Reasoning(shown) if self._kind == "reasoning" else Content(shown))
            self._written.add(self._kind)


def joined_thinking(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Converts messages for gpt-oss's template.

    The template renders the thinking or the text of a message with a call as analysis and refuses both together, so
    they are joined. Raises InvalidRequest.
    """
    check_messages(messages)
    return [_joined(message) if message.get("tool_calls") else message for message in messages]


def _joined(message: Mapping[str, Any]) -> dict[str, Any]:
    thoughts = {name: message[name] for name in REASONING if isinstance(message.get(name), str) and message[name]}
    said = message.get("content")
    if not thoughts or not isinstance(said, str) or not said:
        return dict(message)
    return {**message, "content": "", **{name: f"{thought}\n\n{said}" for name, thought in thoughts.items()}}
