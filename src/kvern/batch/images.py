"""Images that the rows of a job name by paths below one folder."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvern.errors import BatchFileError, InvalidRequest
from kvern.images.limits import LARGEST_FILE
from kvern.images.parts import ADDRESS, detail_of, held_by
from kvern.io.files import open_regular, read_at, reason
from kvern.text.content import MediaPart, kind_of

Message = Mapping[str, Any]


class ImageFolder:
    """The folder, after symbolic links. Raises BatchFileError if it is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if not self._folder.is_dir():
            raise BatchFileError(f"media_dir {folder} is no folder: give the one that the paths of images begin in")

    def read(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages with the files that they name: relative paths, or file: addresses. Raises InvalidRequest."""
        return [self._message(message, f"messages[{number}]") for number, message in enumerate(messages)]

    def _message(self, message: Message, place: str) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._part(part, f"{place}.content[{n}]") for n, part in enumerate(content)]}

    def _part(self, part: Any, place: str) -> Any:
        kind, sent = (part.kind, part.sent) if isinstance(part, MediaPart) else (kind_of(part), part)
        held = held_by(sent) if kind == "image" and isinstance(sent, Mapping) else None
        if not isinstance(held, str) or held.startswith("data:"):
            return part
        address = urlsplit(held) if ADDRESS.match(held) else None
        if address is not None and (address.scheme.lower() != "file" or address.netloc not in ("", "localhost")):
            return part  # no address of the network is opened
        data = self._content(held if address is None else unquote(address.path), place)
        return {"type": "image", "image": data, "detail": detail_of(sent, place)}

    def _content(self, name: str, place: str) -> bytes:
        said = f"{place}: the image {name:.200}"
        try:
            path = (self._folder / name).resolve()
            if not path.is_relative_to(self._folder):
                raise InvalidRequest(f"{said} lies outside of {self._folder}: put the file itself there")
            with open_regular(path, LARGEST_FILE, below=self._folder) as stream:
                return bytes(read_at(stream, 0, os.fstat(stream.fileno()).st_size))
        except InvalidRequest:  # a ValueError
            raise
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{said} cannot be read: {reason(error)}") from None
