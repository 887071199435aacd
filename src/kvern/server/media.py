"""Images that conversations name by an address or by a file of the server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvern.api.errors import HttpError
from kvern.errors import InvalidRequest, shown
from kvern.images.limits import LARGEST_FILE, MOST_IMAGES
from kvern.images.parts import ADDRESS, detail_of, file_id_of, held_by
from kvern.plugins import imported
from kvern.server.bodies import Lane
from kvern.server.config import LARGEST_IMAGES, ServerConfig
from kvern.server.keys import ApiKey, KeyRing
from kvern.text.content import MediaPart

if TYPE_CHECKING:
    from kvern.images.addresses import Fetcher
    from kvern.server.stores.files import Store

FETCHED_BYTES = 4 * LARGEST_IMAGES
"""The limit of images that are being fetched or put into prompts at the same time; other requests wait."""
Messages = list[dict[str, Any]]
PLACE = "messages[{message}].content[{part}]"
"""The name of a part of a conversation."""


@dataclass(frozen=True)
class _Named:
    """An image that is named by an address or by the id of a file: a part of a message. `place`: the part's name in
    error messages."""

    message: int
    part: int
    sent: Mapping[str, Any]
    address: str | None
    file_id: object
    place: str


class Media:
    """Reads the images that conversations name. `store` gives the server's files, if it keeps any."""

    def __init__(self, config: ServerConfig, keys: KeyRing, store: "Callable[[], Store] | None") -> None:
        self._store = store
        self._lane = Lane(len(keys.users), FETCHED_BYTES, LARGEST_IMAGES)
        hosts = config.allowed_media_domains
        self._fetcher: Fetcher | None = imported("kvern.images.addresses:Fetcher")(hosts) if hosts else None

    @contextlib.asynccontextmanager
    async def read(self, messages: Messages, key: ApiKey, place: str = PLACE) -> AsyncIterator[Messages]:
        """Yields messages whose images are all there; `place` is that of a part. Raises HttpError or InvalidRequest."""
        named = [one for one in _named(messages, place) if one.file_id is not None or self._fetcher is not None]
        if not named:
            yield messages
            return
        if len(named) > MOST_IMAGES:
            raise InvalidRequest(f"the request names {len(named)} images: at most {MOST_IMAGES} are read")
        details = [detail_of(one.sent, one.place) for one in named]
        left = min(LARGEST_IMAGES, len(named) * LARGEST_FILE)

        def take(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise InvalidRequest(f"the images have more than {LARGEST_IMAGES} bytes: make them smaller")

        async with self._lane.room(key.name, left):
            tasks = [asyncio.create_task(self._content(one, key, take)) for one in named]
            try:
                contents = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            messages = [_copied(message) for message in messages]
            for one, data, detail in zip(named, contents, details, strict=True):
                parts = messages[one.message]["content"]
                parts[one.part] = replace(parts[one.part], sent={"type": "image", "image": data, "detail": detail})
            yield messages

    async def _content(self, named: _Named, key: ApiKey, take: Callable[[int], None]) -> bytes:
        if named.file_id is not None:
            return await self._file(named, key, take)
        assert self._fetcher is not None and named.address is not None
        try:
            return await self._fetcher.fetch(named.address, take)
        except InvalidRequest as error:
            raise InvalidRequest(f"{named.place}: {error}") from None

    async def _file(self, named: _Named, key: ApiKey, take: Callable[[int], None]) -> bytes:
        """The content of a file that the key has uploaded."""
        missing = f"{named.place}: there is no file {shown(named.file_id)} of this key: upload it to /v1/files"
        if not isinstance(named.file_id, str) or self._store is None:
            raise HttpError(400, missing, code="file_not_found")
        store = self._store()
        try:
            file = await store.load("file", key.name, named.file_id)
            if file["bytes"] > LARGEST_FILE:
                raise InvalidRequest(
                    f"{named.place}: the file has {file['bytes']} bytes: at most {LARGEST_FILE} are read as an image"
                )
            take(file["bytes"])
            return await asyncio.to_thread(store.path(file["id"]).read_bytes)
        except FileNotFoundError:
            raise HttpError(400, missing, code="file_not_found") from None
        except HttpError as error:
            raise HttpError(400, missing, code="file_not_found") if error.status == 404 else error from None


def _named(messages: Sequence[Mapping[str, Any]], where: str) -> Iterator[_Named]:
    """Yields the images of a conversation that are not in it."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, MediaPart) and part.kind == "image" and isinstance(part.sent, Mapping):
                held, file_id = held_by(part.sent), file_id_of(part.sent)
                address = held if isinstance(held, str) and ADDRESS.match(held) else None
                if address is not None or (held is None and file_id is not None):
                    said = where.format(message=number, part=place)
                    yield _Named(number, place, part.sent, address, None if address else file_id, said)


def _copied(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts can be changed."""
    content = message.get("content")
    return {**message, "content": list(content)} if isinstance(content, list) else message
