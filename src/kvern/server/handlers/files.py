"""OpenAI's /v1/files: the handlers."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message as ASGIMessage

from kvern.api.errors import HttpError, wrong_value
from kvern.errors import shown
from kvern.server.apis import Apis
from kvern.server.http import json_response
from kvern.server.stores.database import storage_errors
from kvern.server.stores.files import Object

MOST_FILE_BYTES = 512 << 20
PURPOSES = ("batch", "user_data", "vision")
OUTPUT = "batch_output"
"""The purpose of files that batches write."""
PART_BYTES = 1 << 20
SLOWEST_UPLOAD = 1 << 14
"""The least average rate of an upload, bytes per second, after the time that every body has."""
MOST_UPLOADS = 4
"""The limit of one key at the same time: while uploads arrive they do not count as its files."""
MOST_ON_PAGE = 10_000


class Files:
    """Handlers of files."""

    def __init__(self, apis: Apis) -> None:
        self._store = apis.store
        self._uploads: Counter[str] = Counter()

    async def create(self, request: Request) -> Response:
        """POST /v1/files."""
        check_form(request.headers.get("content-type", ""))
        owner = request.state.key.name
        if self._uploads[owner] >= MOST_UPLOADS:
            message = f"key {owner} sends {MOST_UPLOADS} files at the same time: wait until one is there"
            raise HttpError(429, message, headers={"retry-after": "1"})
        self._uploads[owner] += 1
        try:
            await self._store.check_upload(owner, int(request.headers.get("content-length", 0)))
            return json_response(await self._receive(request, owner))
        finally:
            self._uploads[owner] -= 1

    async def _receive(self, request: Request, owner: str) -> Object:
        request = Request(request.scope, limited(request))
        try:
            with storage_errors():  # the form is written to disk while it arrives
                await request.form(max_files=1, max_fields=10)
        except HTTPException as error:
            raise HttpError(400, f"the form is malformed: {error.detail}") from error
        async with request.form() as form:
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise HttpError(400, "file is missing: send a multipart form with file and purpose", param="file")
            if purpose not in PURPOSES:
                raise wrong_value("purpose", purpose, f"one of {', '.join(PURPOSES)}")
            name = (upload.filename or "file")[:255]
            file_id, size = await self._store.write(owner, parts_of(upload))
        body = file_object(file_id, size, name, purpose)
        try:
            await self._store.save("file", owner, body)
        except BaseException:
            await self._store.remove(owner, file_id)
            raise
        return body

    async def list(self, request: Request) -> Response:
        """GET /v1/files."""
        found = await self._store.all("file", request.state.key.name)
        purpose = request.query_params.get("purpose")
        if purpose not in (None, *PURPOSES, OUTPUT):
            raise wrong_value("purpose", purpose, f"one of {', '.join((*PURPOSES, OUTPUT))}")
        return json_response(page_of([body for _, body in found if purpose in (None, body["purpose"])], request))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/files/{file_id}."""
        return json_response(await self._find(request))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{file_id}/content."""
        body = await self._find(request)
        path = self._store.path(body["id"])
        if not path.is_file():
            raise HttpError(404, f"the content of file {body['id']} is gone", code="file_not_found")
        return FileResponse(path, media_type="application/octet-stream", filename=body["filename"])

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{file_id}."""
        body = await self._find(request)
        await self._store.remove(request.state.key.name, body["id"])
        return json_response({"id": body["id"], "object": "file", "deleted": True})

    async def _find(self, request: Request) -> Object:
        return await self._store.load("file", request.state.key.name, request.path_params["file_id"])


def page_of(found: list[Object], request: Request) -> Object:
    """Returns a page of `limit` objects after the one named `after`. Raises HttpError."""
    limit, after = page_size(request), request.query_params.get("after")
    if after is not None:
        found = found[place_in(found, after, "after") + 1 :]
    page = found[:limit]
    return {"object": "list", "data": page, **ends_of(page), "has_more": len(found) > len(page)}


def page_size(request: Request) -> int:
    """Returns `limit`, by default 20. Raises HttpError."""
    limit = request.query_params.get("limit", "20")
    if re.fullmatch("[0-9]{1,5}", limit) is None or not 1 <= int(limit) <= MOST_ON_PAGE:
        raise wrong_value("limit", limit, f"1 to {MOST_ON_PAGE}")
    return int(limit)


def place_in(found: list[Object], object_id: str, param: str) -> int:
    """Returns the place of an object in a list. Raises HttpError 404."""
    for place, body in enumerate(found):
        if body["id"] == object_id:
            return place
    raise HttpError(404, f"there is no {shown(object_id)} in the list", param=param, code="not_found")


def ends_of(page: list[Object]) -> Object:
    """Returns the ids of the first and the last object."""
    return {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}


def file_object(file_id: str, size: int, name: str, purpose: str) -> Object:
    """Returns a file as the API shows it."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": int(time.time()),
        "filename": name,
        "purpose": purpose,
        "status": "processed",
    }


def check_form(content_type: str) -> None:
    """Refuses a body that is not a multipart form in UTF-8. Raises HttpError."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise HttpError(400, f"content-type is {shown(content_type)}: send a multipart form with file and purpose")
    charset = options.get(b"charset", b"utf-8").lower()
    if charset not in (b"utf-8", b"utf8"):
        raise HttpError(400, f"the form's charset is {shown(charset.decode('latin-1'))}: it must be utf-8")


def limited(request: Request) -> Any:
    """Returns the request's `receive` with limits on the bytes and the rate of an upload, which raise HttpError."""
    size = 0
    began = time.monotonic()
    seconds = request.state.body_seconds

    async def receive() -> ASGIMessage:
        nonlocal size
        left = began + seconds + size / SLOWEST_UPLOAD - time.monotonic()
        try:
            message = await asyncio.wait_for(request.receive(), left)
        except TimeoutError as error:
            slow = f"{size} bytes of the file arrived in {time.monotonic() - began:.0f} s: send it faster"
            raise HttpError(408, slow, headers={"connection": "close"}) from error
        size += len(message.get("body", b""))
        if size > MOST_FILE_BYTES:
            raise HttpError(413, f"the file has more than {MOST_FILE_BYTES} bytes: split it")
        return message

    return receive


async def parts_of(upload: UploadFile) -> AsyncIterator[bytes]:
    """Yields the content of an upload in parts."""
    while part := await upload.read(PART_BYTES):
        yield part
