"""The form of messages that a chat template takes, found by rendering a few small conversations.

System messages: some templates raise an error for a second one, or for one that is not first; some leave it out
silently, move it to the front, or know none. A system message that a template does not take is merged with its
neighbour: the user's message or tool's result before it, else the one after it; else it becomes a user's message. At
its place the prompt before it stays unchanged, so that cached prefixes of the conversation stay valid.

Calls: most templates take arguments as an object, empty content with calls, several calls a message, any ids, and
results without the name of their tool. Some take arguments as text (DeepSeek V3, R1 and V3.1), write calls only where
content is null (the oldest of these), write or take one call a message (Llama 3, gpt-oss, GigaChat 3), refuse ids that
are not nine letters and digits (Mistral), or write the name of a result's tool (FunctionGemma).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

from kvern.errors import InvalidRequest

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

TAKES_CONTENT = ("user", "tool")
"""Roles of messages into which system messages are merged."""


@dataclass(frozen=True)
class SystemPlaces:
    """The places where a template renders system messages: at the beginning, several in a row, or later."""

    first: bool
    several: bool
    later: bool

    @classmethod
    def of(cls, render: Render) -> SystemPlaces:
        """Finds the places by rendering. A template that refuses the simplest conversation is assumed to take all."""
        if not _shows(render, "user"):
            return cls(True, True, True)
        return cls(
            first=_shows(render, "system user"),
            several=_shows(render, "system system user"),
            later=_shows(render, "system user system assistant user")
            and _shows(render, "user assistant system user")
            and _shows(render, "system user assistant user system"),
        )

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the conversation in the template's form. Contents are texts, or lists of parts."""
        if self.first and self.several and self.later:
            return messages
        placed: list[Message] = []
        waiting: object = None
        runs = itertools.groupby(messages, key=lambda message: message.get("role") == "system")
        for number, (is_system, run) in enumerate(runs):
            group = list(run)
            if is_system and (self.first if number == 0 else self.later):
                placed += group if self.several else [{**group[0], "content": _joined(*_contents(group))}]
            elif is_system and placed and placed[-1].get("role") in TAKES_CONTENT:
                placed[-1] = _with_content(placed[-1], placed[-1].get("content"), *_contents(group))
            elif is_system:
                waiting = _joined(*_contents(group))
            else:
                if waiting and group[0].get("role") in TAKES_CONTENT:
                    group[0] = _with_content(group[0], waiting, group[0].get("content"))
                elif waiting:
                    placed.append({"role": "user", "content": waiting})
                waiting = None
                placed += group
        return [*placed, {"role": "user", "content": waiting}] if waiting or not placed else placed


def rendered(render: Render, messages: Sequence[Message]) -> str | None:
    """Returns the prompt; None if the template refuses the messages."""
    try:
        return render(messages)
    except InvalidRequest:
        return None


def _shows(render: Render, roles: str) -> bool:
    """True if the messages of these roles are rendered once each, in order."""
    marks = [f"probe-{number}-{role}" for number, role in enumerate(roles.split())]
    text = rendered(render, [{"role": mark.rpartition("-")[2], "content": mark} for mark in marks])
    if text is None:
        return False
    if roles == "system user":
        return marks[0] in text
    places = [text.find(mark) for mark in marks]
    return places[0] >= 0 and places == sorted(places)


def _contents(messages: Sequence[Message]) -> list[object]:
    return [message.get("content") for message in messages]


def _with_content(message: Message, *contents: object) -> Message:
    return {**message, "content": _joined(*contents)}


def _joined(*contents: object) -> str | list[Any]:
    """Returns texts joined by an empty line; if one comes in parts, the parts of all."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(map(str, given))
    parts = [content if isinstance(content, list) else [{"type": "text", "text": content}] for content in given]
    return list(itertools.chain(*parts))


NAME = "probe_name"
KEY = "probe_key"
VALUE = "probe_value"
RESULT = "probe_result"
SAID = "probe_said"
BESIDE = {"tool_calls": NAME, "content_beside_tool_calls": SAID}
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
LONG_ID = re.compile(".{9,}", re.DOTALL)
OTHER_IDS = {"x": LONG_ID, "call_0123456789abcdef": SHORT_ID}
"""Ids that templates may refuse, each with a pattern of the ids that such a template takes."""
UNPARSED = "unparsed_arguments"
"""The name under which a template sees arguments that are no JSON object, as a model may write them."""


def _probe(*names: str, identity: str = "probe1234", named: bool = True) -> list[Message]:
    """Returns a conversation with calls of these names in one message, and a result of each."""
    ids = [identity[:-1] + str(number) if number else identity for number in range(len(names))]
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": {KEY: name.replace(NAME, VALUE)}}}
        for each, name in zip(ids, names, strict=True)
    ]
    results = [
        {"role": "tool", "content": RESULT, "tool_call_id": each, **({"name": name} if named else {})}
        for each, name in zip(ids, names, strict=True)
    ]
    return [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


@dataclass(frozen=True)
class CallForm:
    """The form of calls that a template takes.

    `texts`: arguments as JSON texts. `null`: null instead of empty content. `single`: one call a message. `ids`: a
    pattern of the ids that it takes, None for all. `named`: results with their tool's name. `written`: calls are
    rendered at all; `results`: results are. `beside`: which of text and calls in one message are not rendered.
    """

    texts: bool = False
    null: bool = False
    single: bool = False
    ids: re.Pattern[str] | None = None
    named: bool = False
    written: bool = True
    results: bool = True
    beside: tuple[str, ...] = ()

    @classmethod
    def of(cls, render: Render) -> CallForm:
        """Finds the form by rendering. A template that renders calls in no form is assumed to take the usual one."""
        forms = [cls(texts, null) for null in (False, True) for texts in (False, True)]
        form = next((form for form in forms if form._writes(render, _probe(NAME))), None)
        if form is None:
            return cls(written=False, results=RESULT in (cls()._rendered(render, _probe(NAME)) or ""))
        single = dataclasses.replace(form, single=True)
        two = _probe(NAME, f"{NAME}_2")
        if not form._writes(render, two) and single._writes(render, two):
            form = single
        refused = [ids for other, ids in OTHER_IDS.items() if not form._writes(render, _probe(NAME, identity=other))]
        asked, answer, *_ = _probe(NAME)
        beside = form._rendered(render, [asked, {**answer, "content": SAID}])
        lost = () if beside is None else (part for part, text in BESIDE.items() if text not in beside)
        with_names, without = (form._rendered(render, _probe(NAME, named=named)) for named in (True, False))
        return dataclasses.replace(
            form,
            ids=refused[-1] if refused else None,
            named=with_names != without,
            results=RESULT in (with_names or ""),
            beside=tuple(lost),
        )

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the conversation in this form."""
        names = _names_of_calls(messages) if self.named else {}
        written = one_call_each(messages) if self.single else messages
        return [self._fit(message, names) for message in written]

    def _fit(self, message: Message, names: Mapping[str, str]) -> Message:
        calls = message.get("tool_calls")
        if message["role"] == "tool":
            identity = message.get("tool_call_id")
            name = names.get(str(identity))
            return {
                **({"name": name} if name is not None else {}),
                **message,
                **({"tool_call_id": self._fit_id(identity)} if isinstance(identity, str) else {}),
                "content": "" if message.get("content") is None else message["content"],
            }
        if not isinstance(calls, list) or not calls:
            return message
        said = message.get("content") or (None if self.null else "")
        return {**message, "content": said, "tool_calls": [self._fit_call(call) for call in calls]}

    def _fit_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if self.texts and isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.texts and isinstance(arguments, str | None):
            arguments = arguments_of(arguments)
        identity = call.get("id")
        fitted = {"id": self._fit_id(identity)} if isinstance(identity, str) else {}
        return {**call, **fitted, "function": {**function, "arguments": arguments}}

    def _fit_id(self, identity: str) -> str:
        """Returns an id that the template takes, the same for the same id."""
        if self.ids is None or self.ids.fullmatch(identity):
            return identity
        return hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:9]

    def _rendered(self, render: Render, probe: Sequence[Message]) -> str | None:
        return rendered(render, self.fit(probe))

    def _writes(self, render: Render, probe: Sequence[Message]) -> bool:
        """True if names and arguments are rendered, and not in Python's notation."""
        text = self._rendered(render, probe)
        if text is None or f"'{KEY}'" in text:
            return False
        names = [call["function"]["name"] for call in probe[1]["tool_calls"]]
        return all(part in text for name in names for part in (name, KEY, name.replace(NAME, VALUE)))


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Splits messages with several calls into messages with one call, each followed by its result."""
    written: list[Message] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            written.append(message)
            continue
        results: dict[str, list[Message]] = {}
        while left and left[0]["role"] == "tool":
            results.setdefault(str(left[0].get("tool_call_id")), []).append(left.popleft())
        for number, call in enumerate(calls):
            said = message if number == 0 else {"role": message["role"], "content": ""}
            own = results.pop(str(call.get("id")), []) if isinstance(call, Mapping) else []
            written += [{**said, "tool_calls": [call]}, *own]
        written += itertools.chain.from_iterable(results.values())
    return written


def arguments_of(written: str | None) -> dict[str, Any]:
    """Returns the arguments of a call as an object; a client may send back what a model wrote even if it is no JSON."""
    try:
        parsed = msgspec.json.decode(written) if written and written.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        parsed = written
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else {UNPARSED: written}


def _names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = {str(call.get("id")): call.get("function") for call in calls}
    return {
        identity: function["name"]
        for identity, function in functions.items()
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }


TEXT = "probe-text"
PROBED_NAME = "probe-tool"
PROBED_TOOL = {
    "type": "function",
    "function": {"name": PROBED_NAME, "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
}
"""The definition that stands for a request's tools while a template is tried."""
SPEAKERS = {"user": ("user",), "assistant": ("user", "assistant", "user"), "system": ("system", "user")}
"""Roles whose content a template may want as a list of parts, each with a conversation that has the role."""


class MessageForms:
    """The forms of one template, each found when a conversation first needs it. `render` makes a prompt of messages."""

    def __init__(self, render: Render) -> None:
        self._render = render

    @cached_property
    def parts(self) -> frozenset[str]:
        """Roles whose content the template renders only as a list of parts."""
        parts: frozenset[str] = frozenset()
        for role, roles in SPEAKERS.items():
            written = _writes(self._render, role, roles, parts)
            if written is None and not parts:
                break  # it may refuse anything
            wanted = parts | {role}
            if not written and _writes(self._render, role, roles, wanted):
                parts = wanted
        return parts

    @cached_property
    def systems(self) -> SystemPlaces:
        """The places where the template takes system messages."""
        return SystemPlaces.of(self._fitted)

    @cached_property
    def calls(self) -> CallForm:
        """The form of calls and their results."""
        return CallForm.of(self._fitted)

    @cached_property
    def definitions(self) -> Literal["written", "with a system message", "never"]:
        """The condition under which the template renders tools; FunctionGemma's does so only with a system message."""
        user, system = ({"role": role, "content": "probe"} for role in ("user", "system"))
        without, with_it = (rendered(self._fitted, messages) for messages in ([user], [system, user]))
        if without is None or PROBED_NAME in without:
            return "written"
        return "with a system message" if PROBED_NAME in (with_it or "") else "never"

    def lost(self, messages: Sequence[Message], tools: bool) -> list[str]:
        """Returns the names of what the template leaves out of a conversation in any form."""
        found = {"tools": tools and self.definitions == "never"}
        calling = [message for message in messages if message.get("tool_calls")]
        found["tool_calls"] = bool(calling) and not self.calls.written
        if any(message.get("content") for message in calling):
            found |= dict.fromkeys(self.calls.beside, True)
        found["tool_results"] = any(message["role"] == "tool" for message in messages) and not self.calls.results
        return [name for name, is_lost in found.items() if is_lost]

    def fit(self, messages: Sequence[Message], tools: bool = False) -> Sequence[Message]:
        """Returns the conversation in the template's form; `tools` says that there are definitions."""
        if tools and messages[0]["role"] != "system" and self.definitions == "with a system message":
            messages = [{"role": "system", "content": ""}, *messages]
        if any(message["role"] == "system" for message in messages):
            messages = self.systems.fit(messages)
        if any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            messages = self.calls.fit(messages)
        return _in_parts(messages, self.parts)

    def _fitted(self, messages: Sequence[Message]) -> str:
        return self._render(_in_parts(messages, self.parts))


def _in_parts(messages: Sequence[Message], roles: frozenset[str]) -> Sequence[Message]:
    """Returns the messages with texts of these roles as lists of one part."""
    if not roles:
        return messages
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in roles and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _writes(render: Render, role: str, roles: Sequence[str], parts: frozenset[str]) -> bool | None:
    """True if a text of this role is rendered; None if the template refuses the conversation."""
    conversation = [{"role": each, "content": TEXT if each == role else "probe"} for each in roles]
    text = rendered(render, _in_parts(conversation, parts))
    return None if text is None else TEXT in text
