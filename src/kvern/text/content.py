"""The content of a message: a text, or a list of texts and of parts that are no text.

    API readers -> content_of -> str, or a list where some part is no text -> readable -> what the chat template takes

Readers of all APIs make the same parts. `readable` is the one place that refuses parts which a model does not read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from kvern.errors import InvalidRequest

Kind = Literal["image", "audio", "video", "file"]
KINDS: dict[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
}
"""The kinds of content by the types of parts in all APIs."""


class MediaPart(msgspec.Struct, frozen=True):
    """A part that is no text, as a client sent it. `refusal` is the error for a model that does not read its kind."""

    kind: Kind
    sent: Any
    refusal: str
    note: str | None = None
    """The text that takes its place instead of the error, in the result of a tool: an agent cannot take that back."""


MessageContent = str | list[str | MediaPart]


def kind_of(part: object) -> Kind | None:
    """Returns the kind of a part that is no text; None for texts and for unknown types."""
    name = part.get("type") if isinstance(part, dict) else None
    return KINDS.get(name) if isinstance(name, str) else None


def content_of(
    parts: Sequence[object],
    text_of: Callable[[Any], str | None],
    refusal: Callable[[Any], str],
    note: Callable[[Any], str | None] = lambda part: None,
) -> MessageContent:
    """Returns a message's content: the texts joined by line breaks, or a list if some part is no text.

    `text_of` returns the text of a part, None if it is no text. `refusal` and `note` return those of a `MediaPart`.
    Content that was read already stays as it is. Raises InvalidRequest for a part of an unknown type.
    """
    if has_media(parts):
        return cast("MessageContent", parts)
    content: list[str | MediaPart] = []
    for part in parts:
        text = text_of(part)
        kind = kind_of(part)
        if text is not None:
            content.append(text)
        elif kind is not None:
            content.append(MediaPart(kind, part, refusal(part), note(part)))
        else:
            raise InvalidRequest(refusal(part))
    return joined(content)


def restored(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages that were kept as JSON, which knows objects alone, with the parts that they had."""
    return [
        {**message, "content": [_restored(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _restored(part: object) -> object:
    is_media = isinstance(part, dict) and part.keys() == set(MediaPart.__struct_fields__)
    return msgspec.convert(part, MediaPart) if is_media else part


def joined(content: Sequence[str | MediaPart]) -> MessageContent:
    """Returns one text if all parts are texts, else the parts."""
    texts = [part for part in content if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(content) else list(content)


def readable(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns messages as the chat template of a model for text takes them. Raises InvalidRequest for other parts.

    Content in the template's own form, a list of objects, stays as it is unless one of them holds a file.
    """
    for number, message in enumerate(messages):
        content = _content(message)
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and len(part) > 1 and (kind := kind_of(part)) is not None:
                raise InvalidRequest(
                    f"messages[{number}].content[{place}] is of kind {kind}: this model reads text only"
                )
    return (
        [_readable(message) for message in messages]
        if any(has_media(_content(message)) for message in messages)
        else messages
    )


def has_media(content: object) -> bool:
    """Returns True for content with a part that is no text."""
    return isinstance(content, list) and any(isinstance(part, MediaPart) for part in content)


def _content(message: object) -> object:
    return message.get("content") if isinstance(message, Mapping) else None


def _readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not has_media(_content(message)):
        return message
    return {**message, "content": "\n".join(map(part_text, message["content"]))}


def part_text(part: str | MediaPart) -> str:
    """Returns the text of a part, or that which takes its place. Raises InvalidRequest for a part without any."""
    if isinstance(part, str):
        return part
    if part.note is None:
        raise InvalidRequest(part.refusal)
    return part.note
