"""Requests whose image is decoded before a step may take them: few at a time, since pixels are larger than files.

add --> files --begin, while fewer than MOST have pixels--> decoding --finished--> decoded, until a step took them
"""

from collections import deque
from dataclasses import dataclass, replace

from kvern.cache.images import Decoder
from kvern.errors import UnreadableContent
from kvern.images.file import read_file
from kvern.request.request import RequestSpec
from kvern.runner.pictures import Picture

MOST = 64
"""Images that are being decoded or have pixels."""


@dataclass(frozen=True, eq=False)
class Text:
    """A request that waits: since when, by the monotonic clock, and since which step. `picture`: its decoded image."""

    name: str
    spec: RequestSpec
    arrived_at: float
    arrived_in: int
    picture: Picture | None = None


class PictureQueue:
    """The images of requests that wait, by what decodes them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._files: deque[Text] = deque()
        self._decoding: dict[int, Text] = {}
        self._decoded: set[str] = set()
        self._count = 0
        self.decoded = 0
        """The number of images that were decoded."""

    def __len__(self) -> int:
        return len(self._files) + len(self._decoding)

    def add(self, text: Text) -> None:
        """Decode the image of a request."""
        self._files.append(text)
        self._begin()

    def remove(self, name: str) -> bool:
        """Forget a request, whose step has begun or that has ended; whether its image was not decoded."""
        was_here = False
        for number, text in list(self._decoding.items()):
            if text.name == name:
                self._decoder.cancel(number)
                del self._decoding[number]
                was_here = True
        if not was_here:
            waiting = [text for text in self._files if text.name != name]
            was_here = len(waiting) < len(self._files)
            self._files = deque(waiting)
        self._decoded.discard(name)
        self._begin()
        return was_here

    def taken(self, names: list[str]) -> None:
        """The pixels of these requests are on their way through a step."""
        self._decoded.difference_update(names)
        self._begin()

    def finished(self) -> tuple[list[Text], list[tuple[Text, str]]]:
        """Returns the requests whose image was decoded since the last call, and those that have none, and why."""
        ready: list[Text] = []
        failed: list[tuple[Text, str]] = []
        for number, found in self._decoder.finished():
            text = self._decoding.pop(number, None)
            if text is None:
                continue
            if isinstance(found, str):
                failed.append((text, f"{UnreadableContent.MARK}{found}"))
                continue
            file = read_file(text.spec.prompt.attachments[0], "the image")
            ready.append(replace(text, picture=Picture(file.width, file.height, found)))
            self._decoded.add(text.name)
            self.decoded += 1
        self._begin()
        return ready, failed

    def _begin(self) -> None:
        while self._files and len(self._decoding) + len(self._decoded) < MOST:
            self._count += 1
            text = self._decoding[self._count] = self._files.popleft()
            self._decoder.begin(self._count, text.spec.prompt.attachments[0])
