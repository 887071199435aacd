"""System messages for chat templates that do not take them everywhere.

Some templates raise an error for a second system message, or for one that is not first; some leave it out silently,
move it to the front, or know no system messages. Which of these is found by rendering a few conversations.

A system message that a template does not take is merged with its neighbour: the user's message or tool's result before
it, else the one after it; else it becomes a user's message. At its place the prompt before it stays unchanged, so that
cached prefixes of the conversation stay valid; at the front it would change all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def _shows(render: Render, roles: str) -> bool:
    """True if the messages of these roles are rendered once each, in order."""
    marks = [f"probe-{number}-{role}" for number, role in enumerate(roles.split())]
    try:
        text = render([{"role": mark.rpartition("-")[2], "content": mark} for mark in marks])
    except InvalidRequest:
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
