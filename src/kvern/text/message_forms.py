"""The form of messages that a chat template takes, found by rendering a few small conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from kvern.errors import InvalidRequest
from kvern.text.call_messages import CallForm
from kvern.text.system_messages import SystemPlaces

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

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
        """When definitions of tools are rendered: FunctionGemma's template does so only with a system message."""
        user, system = ({"role": role, "content": "probe"} for role in ("user", "system"))
        without, with_it = (_rendered(self._fitted, messages) for messages in ([user], [system, user]))
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
    text = _rendered(render, _in_parts(conversation, parts))
    return None if text is None else TEXT in text


def _rendered(render: Render, messages: Sequence[Message]) -> str | None:
    try:
        return render(messages)
    except InvalidRequest:
        return None
