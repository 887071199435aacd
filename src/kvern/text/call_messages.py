"""Tool calls in a conversation, in the form that a chat template takes.

Most templates take arguments as an object, empty content with calls, several calls a message, any ids, and results
without the name of their tool. Some take arguments as text (DeepSeek V3, R1 and V3.1), write calls only where content
is null (the oldest of these), write or take one call a message (Llama 3, gpt-oss, GigaChat 3), refuse ids that are not
nine letters and digits (Mistral), or write the name of a result's tool (FunctionGemma). The form is found by rendering
small conversations.
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
from typing import Any

import msgspec

from kvern.errors import InvalidRequest

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

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
        try:
            return render(self.fit(probe))
        except InvalidRequest:
            return None

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
