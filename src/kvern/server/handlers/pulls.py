"""ollama's routes that download models from the Hugging Face hub and delete them, for administrators' API keys."""

import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from huggingface_hub import errors
from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import typed
from kvern.api.ollama import LATEST
from kvern.errors import ConfigError, ModelNotFound
from kvern.io.bytecode import bytecode_environment
from kvern.models.hub import embedded_models
from kvern.models.hub_cache import arrived, model_folder, remove, space_for
from kvern.models.repository import Listing, repository_of
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.handlers.admin import check_admin
from kvern.server.handlers.ollama import STREAM, named
from kvern.server.http import ignored_header, whole_answer
from kvern.server.streams import EventStream

HUB_NAME = re.compile(r"(?:(?:hf\.co|huggingface\.co)/)?(?P<name>[\w.-]+/[\w.-]+(?::[\w.-]+)?)")
RIGHT_NAME = "a model of the Hugging Face hub, organisation/name, or organisation/name:Q4_K_M for one of its GGUF files"
KNOWN = ("model", "name", "stream")
LOOK_SECONDS = 0.2
"""The interval of checks how much has arrived."""
ABSENT = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)
SUCCESS = {"status": "success"}


class Pulls:
    """The handlers. Each pull is a process, which ends when its client leaves; the hub's cache locks its files."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service
        self._running: Counter[str] = Counter()
        """The number of pulls by the name of the repository."""

    async def pull(self, request: Request) -> Response | EventStream:
        """POST /api/pull: lines of JSON with the progress, or the last of them alone if `stream` is false.

        Everybody may pull a model that is served: that does nothing.
        """
        body = await read_object(request)
        headers, stream = ignored_header(body, KNOWN), typed(body, "stream", bool, True)
        lines = self._nothing() if self._is_served(body) else await self._begun(request, body)
        return EventStream(lines, lambda: None, headers, STREAM) if stream else await _last(request, lines, headers)

    async def delete(self, request: Request) -> Response:
        """DELETE /api/delete: the model is deleted from this machine, unless it is served."""
        body = await read_object(request)
        check_admin(request, "kvern rm MODEL on the server's machine does the same")
        if self._is_served(body):
            raise HttpError(409, f"{named(body)} is served: end its server first")
        model = _hub_name(body)
        name = model.partition(":")[0]
        if any(model_folder(name) in engine.client.folder.parents for engine in self._service.engines) or name in (
            {} if self._service.keeper is None else {one.model.engine.model for one in self._service.keeper.residents}
        ):
            raise HttpError(409, f"{model} is served: end its server first")
        if self._running[name]:
            raise HttpError(409, f"{model} is being pulled: wait until that ends")
        try:
            await asyncio.to_thread(remove, model)
        except ModelNotFound as error:
            raise HttpError(404, str(error), param="model", code="model_not_found") from error
        return Response()

    def _is_served(self, body: dict[str, Any]) -> bool:
        """True if nothing has to be downloaded for the model that a body names."""
        name = str(named(body)).removesuffix(LATEST)
        return name in (*self._service.names, *(folder.name for folder in embedded_models()))

    async def _nothing(self) -> AsyncGenerator[object]:
        yield SUCCESS

    async def _begun(self, request: Request, body: dict[str, Any]) -> AsyncGenerator[object]:
        """Returns the lines of a pull for which there is a model and space. Raises HttpError."""
        check_admin(request, "kvern pull MODEL on the server's machine does the same")
        model = _hub_name(body)
        hub = repository_of(model)
        try:
            listing = await asyncio.to_thread(hub.listing, model.partition(":")[2])
            await asyncio.to_thread(space_for, hub, listing)
        except ModelNotFound as error:
            cause = error.__cause__
            raise HttpError(404 if cause is None or isinstance(cause, ABSENT) else 502, str(error)) from error
        except ConfigError as error:
            raise HttpError(507, str(error)) from error
        return self._lines(model, hub.name, listing)

    async def _lines(self, model: str, name: str, listing: Listing) -> AsyncGenerator[object]:
        yield {"status": "pulling manifest"}
        self._running[name] += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvern.models.pulling", model),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **bytecode_environment(), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        said = asyncio.create_task(process.communicate())
        told: dict[str, tuple[int, int]] = {}
        try:
            while not said.done():
                await asyncio.wait([said], timeout=LOOK_SECONDS)
                here = await asyncio.to_thread(arrived, name, listing)
                for digest, sizes in here.items() - told.items():
                    yield _progress(digest, *sizes)
                told = here
            if process.returncode:
                raise HttpError(502, said.result()[0].decode() or f"{model}: the process that downloads it was ended")
        finally:
            self._running[name] -= 1
            if process.returncode is None:
                process.terminate()
            await said
        yield SUCCESS


async def _last(request: Request, lines: AsyncGenerator[object], headers: dict[str, str]) -> Response:
    """Answers with the last line. The pull ends if the client leaves first."""

    async def last() -> object:
        line: object = None
        async for line in lines:  # noqa: B007
            pass
        return line

    try:
        return await whole_answer(request, last(), headers)
    finally:
        await lines.aclose()


def _hub_name(body: dict[str, Any]) -> str:
    """Returns the name on the hub of the model that a body names. Raises HttpError."""
    name = named(body)
    if not isinstance(name, str) or (found := HUB_NAME.fullmatch(name.removesuffix(LATEST))) is None:
        raise wrong_value("model", name, RIGHT_NAME)
    return found["name"]


def _progress(digest: str, completed: int, total: int) -> dict[str, object]:
    kind = "sha256" if len(digest) == 64 else "sha1"
    return {
        "status": f"pulling {digest[:12]}",
        "digest": f"{kind}:{digest}",
        "total": total,
        "completed": completed,
    }
