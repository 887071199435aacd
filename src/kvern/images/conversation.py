"""The images of a conversation, for the chat template and for the prompt.

Templates write a placeholder for each image. A client may write the same text: it is cut in two for the template and
encoded in two pieces, so that it stays text.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvern.errors import InvalidRequest
from kvern.images.file import ImageFile
from kvern.images.prompt import ImageReader
from kvern.request.request import PromptInput
from kvern.text.content import MediaPart, kind_of

Message = Mapping[str, Any]


def concerns_images(messages: Sequence[Message], marks: Sequence[str]) -> bool:
    """Returns whether a part of some message is an image, or a text has a placeholder, one of `marks`."""
    parts = [part for message in messages for part in _parts(message)]
    return any(_is_image(part) or any(mark in _text(part) for mark in marks) for part in parts)


class Pictures:
    """The images of a conversation. `messages` are as the template takes them. Raises InvalidRequest.

    `in_text`: the template takes texts alone, in which marks stand for images.
    """

    def __init__(self, messages: Sequence[Message], reader: ImageReader, *, in_text: bool = False) -> None:
        self._reader = reader
        self._in_text = in_text
        self._cut = uuid.uuid4().hex
        self._files: list[ImageFile] = []
        self.messages = [self._shown(message, f"messages[{number}]") for number, message in enumerate(messages)]

    def _shown(self, message: Message, place: str) -> Message:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            return {**message, "content": self._plain(content)}
        if not isinstance(content, list):
            return message
        parts = [self._part(part, f"{place}.content[{n}]") for n, part in enumerate(content)]
        if self._in_text:
            mark = f"{self._reader.mark}\n"
            return {**message, "content": "".join(part.get("text", mark) for part in parts)}
        return {**message, "content": parts}

    def _part(self, part: object, place: str) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": self._plain(part)}
        if _is_image(part):
            sent: Any = part.sent if isinstance(part, MediaPart) else part
            held = sent if isinstance(sent, Mapping) else {"image": sent}
            self._files.append(self._reader.read(held, place))
            return {"type": "image"}
        kind = part.kind if isinstance(part, MediaPart) else kind_of(part)
        if isinstance(part, MediaPart) and part.note is not None:
            return {"type": "text", "text": part.note}
        if kind is not None:
            raise InvalidRequest(f"{place} is of kind {kind}: this model reads texts and images; leave it out")
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self._plain(part["text"])}
        raise InvalidRequest(f"{place} is of a type that this model does not read: send texts and images")

    def _plain(self, text: str) -> str:
        for mark in self._reader.marks:
            text = text.replace(mark, f"{mark[:1]}{self._cut}{mark[1:]}")
        return text

    def encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Returns the token ids of what the template wrote."""
        return [token for piece in self._reader.placed(text).split(self._cut) for token in encode(piece)]

    @property
    def tokens(self) -> int:
        """The number of tokens that have a row of an image."""
        return sum(map(self._reader.settings.count, self._files))

    def prompt(self, token_ids: Sequence[int]) -> PromptInput:
        """Returns the prompt with the tokens of the images at their placeholders. Raises InvalidRequest."""
        return self._reader.prompt(token_ids, self._files)


def _parts(message: Message) -> Sequence[object]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else [content]


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _is_image(part: object) -> bool:
    return part.kind == "image" if isinstance(part, MediaPart) else kind_of(part) == "image"
