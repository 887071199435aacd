"""Output items of /v1/responses while they grow, with their events."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvern.api.custom_tools import InputReader
from kvern.api.response_items import packed_reasoning
from kvern.api.response_tools import FIXED, OfferedTool, read_tool_list
from kvern.request.pieces import Arguments, CallBegins, Content, Piece, Reasoning

Event = tuple[str, dict[str, Any]]
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "tool_search_call": "tsc",
}
ITEM_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})_\d{1,6}")


class LocalShellAction(msgspec.Struct):
    """The action of a local_shell_call."""

    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None
    type: Literal["exec"] = "exec"


class ShellAction(msgspec.Struct):
    """The action of a shell_call."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class FileOperation(msgspec.Struct):
    """The operation of an apply_patch_call."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str


ACTIONS: dict[str, Any] = {
    "local_shell_call": LocalShellAction,
    "shell_call": ShellAction,
    "apply_patch_call": FileOperation,
    "tool_search_call": dict[str, Any],
}


def response_of(item_id: str) -> str | None:
    """Returns the response that an item belongs to; None for ids that kvern did not make."""
    found = ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


class OutputItems:
    """The output of a response; one item grows at a time."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.items: list[dict[str, Any]] = []
        self._stem = response["id"].removeprefix("resp_")
        self._tools = read_tool_list(response["tools"]).by_function()
        self._hides_thinking = response["reasoning"].get("exclude", False)
        self._summary = response["reasoning"]["summary"] is not None
        self._packed = "reasoning.encrypted_content" in response["include"]
        self._open: _Item | None = None
        self._logprobs: list[msgspec.Raw] = []

    def add(self, pieces: Sequence[Piece], logprobs: Sequence[msgspec.Raw] = ()) -> list[Event]:
        """Adds pieces to the output. `logprobs` belong to the tokens since the last pieces; those of messages are
        sent."""
        events: list[Event] = []
        self._logprobs += logprobs
        for piece in pieces:
            match piece:
                case Content(text):
                    if not isinstance(self._open, _Message):
                        events += self._begin(_Message())
                    assert isinstance(self._open, _Message)
                    self._open.news, self._logprobs = self._logprobs, []
                case Reasoning() if self._hides_thinking:
                    continue
                case Reasoning(text):
                    if not isinstance(self._open, _Thinking):
                        events += self._begin(_Thinking(self._summary, self._packed))
                case CallBegins(_, call_id, name):
                    events += self._begin(_call(self._tools.get(name), call_id, name))
                    continue
                case Arguments(_, text):
                    pass
            assert self._open is not None
            if text:
                events += self._open.add(text)
        if pieces:
            self._logprobs = []
        return events

    def end(self, status: str) -> list[Event]:
        """Returns the last events. An answer without content is an empty message."""
        events = [] if self.items else self._begin(_Message())
        return events + self.close(status)

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the growing item, if there is one."""
        item, self._open = self._open, None
        return [] if item is None else item.end(status)

    def _begin(self, item: "_Item") -> list[Event]:
        events = self.close()
        item.id = f"{PREFIXES[item.fields['type']]}_{self._stem}_{len(self.items)}"
        item.index = len(self.items)
        item.fields = {"id": item.id, "status": "in_progress", **item.fields}
        self.items.append(item.fields)
        self._open = item
        return events + item.begin()


class _Item:
    """An item that grows. `fields` are the item as the API shows it, complete once it has ended."""

    id: str
    index: int

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.fields = {"type": kind, **fields}
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        item = {name: list(value) if isinstance(value, list) else value for name, value in self.fields.items()}
        return [("response.output_item.added", {"output_index": self.index, "item": item})]

    def add(self, text: str) -> list[Event]:
        self._texts.append(text)
        return []

    def end(self, status: str) -> list[Event]:
        self.fields["status"] = status
        return [("response.output_item.done", {"output_index": self.index, "item": self.fields})]

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def tell(self, kind: str, **fields: Any) -> Event:
        """Returns an event of this item; it gets its number when it is sent."""
        return f"response.{kind}", {"item_id": self.id, "output_index": self.index, **fields}


class _Message(_Item):
    """A message. `news` are the log-probabilities that go with the next text."""

    def __init__(self) -> None:
        super().__init__("message", {"role": "assistant", "content": []})
        self.news: list[msgspec.Raw] = []
        self._logprobs: list[msgspec.Raw] = []

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def begin(self) -> list[Event]:
        return [
            *super().begin(),
            self.tell("content_part.added", content_index=0, part={**self._part(), "logprobs": []}),
        ]

    def add(self, text: str) -> list[Event]:
        super().add(text)
        self._logprobs += self.news
        return [self.tell("output_text.delta", content_index=0, delta=text, logprobs=self.news)]

    def end(self, status: str) -> list[Event]:
        part = self._part()
        self.fields["content"] = [part]
        return [
            self.tell("output_text.done", content_index=0, text=part["text"], logprobs=self._logprobs),
            self.tell("content_part.done", content_index=0, part=part),
            *super().end(status),
        ]


class _Thinking(_Item):
    """Reasoning. A summary, if the request wants one, is the whole reasoning."""

    def __init__(self, summary: bool, packed: bool) -> None:
        super().__init__("reasoning", {"summary": [], "content": []})
        self._summary, self._packed = summary, packed

    def begin(self) -> list[Event]:
        part = {"type": "reasoning_text", "text": ""}
        events = [*super().begin(), self.tell("content_part.added", content_index=0, part=part)]
        if self._summary:
            summary = {"type": "summary_text", "text": ""}
            events.append(self.tell("reasoning_summary_part.added", summary_index=0, part=summary))
        return events

    def add(self, text: str) -> list[Event]:
        super().add(text)
        events = [self.tell("reasoning_text.delta", content_index=0, delta=text)]
        if self._summary:
            events.append(self.tell("reasoning_summary_text.delta", summary_index=0, delta=text))
        return events

    def end(self, status: str) -> list[Event]:
        text = self.text
        part = {"type": "reasoning_text", "text": text}
        self.fields["content"] = [part]
        events = [
            self.tell("reasoning_text.done", content_index=0, text=text),
            self.tell("content_part.done", content_index=0, part=part),
        ]
        if self._summary:
            summary = {"type": "summary_text", "text": text}
            self.fields["summary"] = [summary]
            events.append(self.tell("reasoning_summary_text.done", summary_index=0, text=text))
            events.append(self.tell("reasoning_summary_part.done", summary_index=0, part=summary))
        if self._packed:
            self.fields["encrypted_content"] = packed_reasoning(text)
        return events + super().end(status)


def _call(tool: OfferedTool | None, call_id: str, name: str) -> _Item:
    """Returns the item of a call. A call of a tool that is not offered is a function call."""
    if tool is None:
        return _FunctionCall("function_call", {"call_id": call_id, "name": name, "arguments": ""})
    fields = {"call_id": call_id, **tool.fields}
    if tool.item in FIXED:
        return _FixedCall(tool.item, fields)
    if tool.item == "custom_tool_call":
        return _CustomCall(tool.item, {**fields, "input": ""})
    return _FunctionCall("function_call", {**fields, "arguments": ""})


class _FunctionCall(_Item):
    def add(self, text: str) -> list[Event]:
        super().add(text)
        return [self.tell("function_call_arguments.delta", delta=text)]

    def end(self, status: str) -> list[Event]:
        self.fields["arguments"] = self.text
        done = self.tell("function_call_arguments.done", name=self.fields["name"], arguments=self.text)
        return [done, *super().end(status)]


class _CustomCall(_Item):
    """A call with one text."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__init__(kind, fields)
        self._reader = InputReader()

    def add(self, text: str) -> list[Event]:
        return self._told(self._reader.add(text))

    def end(self, status: str) -> list[Event]:
        events = self._told(self._reader.end())
        self.fields["input"] = self.text
        return [*events, self.tell("custom_tool_call_input.done", input=self.text), *super().end(status)]

    def _told(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self.tell("custom_tool_call_input.delta", delta=text)] if text else []


class _FixedCall(_Item):
    """A call with a type of its own. It is sent when it has ended; if it was cut off, as a function call."""

    def begin(self) -> list[Event]:
        if self.fields["type"] == "local_shell_call":
            self.fields["call_id"] = self.id  # its output may use this id
        return []

    def end(self, status: str) -> list[Event]:
        kind = self.fields["type"]
        name, holder = FIXED[kind]
        try:
            action = msgspec.to_builtins(msgspec.json.decode(self.text, type=ACTIONS[kind]))
        except (msgspec.DecodeError, RecursionError):
            action = None
        if action is None or status != "completed":
            self.fields |= {"type": "function_call", "name": name, "arguments": self.text}
        else:
            if action.get("type") == "delete_file":
                del action["diff"]
            self.fields[holder] = action
        return [*super().begin(), *super().end(status)]
