"""Routes for administrators' API keys: load and unload adapters, add and remove engines while the server runs."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import LONGEST_TIMEOUT, typed
from kvern.errors import ConfigError, InvalidRequest, shown
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.http import json_response, until_gone
from kvern.server.service import ServedEngine

if TYPE_CHECKING:
    from kvern.residency.keeper import Keeper, Resident
    from kvern.residency.policy import State

LONGEST_NAME = 256
LONGEST_PATH = 1024
"""The limit in characters."""


class AdaptersApi:
    """Handlers of the adapter routes. Adapters are read from folders below `adapter_folder`, never from the network."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service
        self._folder = apis.service.config.adapter_folder
        self._loading: set[str] = set()
        """Names of the adapters that any engine is loading now."""

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: `lora_name`, and `lora_path`, a folder relative to the server's or absolute."""
        name, engine, body = await self._read(request)
        path = typed(body, "lora_path", str, "")
        if not path or not path.isprintable() or len(path) > LONGEST_PATH:
            raise wrong_value("lora_path", path, f"a folder, {LONGEST_PATH} printable characters at most")
        if name in self._loading:
            raise HttpError(400, f"lora_name {name} is being loaded: choose another name", param="lora_name")
        if name in self._service.names and not engine.answers_for(name):
            raise HttpError(400, f"lora_name {name} is another model's: choose another name", param="lora_name")
        folder = str(self._allowed(path))
        self._loading.add(name)
        try:
            with self._service.wanted(engine.models[0]):
                await until_gone(engine.client.adapters.load(name, folder), request.receive)
        finally:
            self._loading.remove(name)
        return json_response({"id": name, "object": "adapter", "loaded": True})

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: `lora_name`. Running requests keep the adapter until they end; new ones are
        refused."""
        name, engine, _ = await self._read(request)
        try:
            engine.client.adapters.unload(name)
        except InvalidRequest as error:
            raise HttpError(404, str(error), param="lora_name", code="model_not_found") from error
        return json_response({"id": name, "object": "adapter", "loaded": False})

    async def _read(self, request: Request) -> tuple[str, ServedEngine, dict[str, object]]:
        """Returns the adapter's name, the engine of the body's `model`, and the body."""
        check_admin(request)
        if self._folder is None:
            raise HttpError(403, "this server was started without adapter_folder")
        body = await read_object(request)
        name = typed(body, "lora_name", str, "")
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise wrong_value("lora_name", name, f"a name of 1 to {LONGEST_NAME} printable characters")
        return name, self._service.engine_of(await self._service.model(body, request.state.key)), body

    def _allowed(self, path: str) -> Path:
        """Returns the folder that a path names, symbolic links followed.

        Raises HttpError if the folder is not below `adapter_folder`.
        """
        assert self._folder is not None
        allowed = self._folder.resolve()
        try:
            folder = (allowed / path).resolve()
        except (OSError, RuntimeError) as error:
            raise HttpError(400, f"lora_path is {shown(path)}, which cannot be followed", param="lora_path") from error
        if not folder.is_relative_to(allowed):
            message = f"lora_path is {shown(path)}, which is not below the server's adapter_folder"
            raise HttpError(403, message, param="lora_path")
        return folder


class EnginesApi:
    """Handlers of the engine routes. A request whose client leaves before the answer changes nothing."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def add(self, request: Request) -> Response:
        """POST /v1/add_engine: start another engine of a model. The answer comes when the engine takes requests."""
        engine, _ = await self._read(request)
        try:
            added = await until_gone(engine.client.replicas.add(), request.receive)
        except ConfigError as error:
            raise HttpError(400, f"no engine is added: {error}") from error
        return json_response({"id": added and added.name, "object": "engine", "model": engine.models[0], "ready": True})

    async def remove(self, request: Request) -> Response:
        """POST /v1/remove_engine: end `engine`, after `grace_seconds` at most. The answer comes when it has ended."""
        engine, body = await self._read(request)
        name = typed(body, "engine", str, "")
        seconds = typed(body, "grace_seconds", (int, float), self._service.config.grace_seconds)
        if not 0 <= seconds <= LONGEST_TIMEOUT:
            raise wrong_value("grace_seconds", seconds, f"a number from 0 to {LONGEST_TIMEOUT:.0f}")
        try:
            await until_gone(engine.client.replicas.remove(name, seconds), request.receive)
        except InvalidRequest as error:
            raise HttpError(400, str(error), param="engine") from error
        return json_response({"id": name, "object": "engine", "model": engine.models[0], "ready": False})

    async def _read(self, request: Request) -> tuple[ServedEngine, dict[str, object]]:
        """Returns the engines of the body's `model`, and the body. Raises HttpError if the key is no
        administrator's."""
        check_admin(request)
        if self._service.keeper is not None:
            raise HttpError(409, "a server of several models adds and removes no engines: see data_parallel_size")
        body = await read_object(request)
        return self._service.engine_of(await self._service.model(body, request.state.key)), body


class ModelsApi:
    """Handlers of the routes that wake one of several models and put it to sleep."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def load(self, request: Request) -> Response:
        """POST /v1/models/{model}/load: the answer comes when the model is awake."""
        _, resident = self._found(request)
        await until_gone(self._service.wake(resident.name, request.state.key), request.receive)
        return self._told(resident)

    async def sleep(self, request: Request) -> Response:
        """POST /v1/models/{model}/sleep: the model is put to sleep when its requests have ended, see `_dismiss`."""
        return await self._dismiss(request, "asleep")

    async def unload(self, request: Request) -> Response:
        """POST /v1/models/{model}/unload: likewise its process ends, also if it is asleep."""
        return await self._dismiss(request, "cold")

    async def _dismiss(self, request: Request, state: "State") -> Response:
        """The answer comes after `grace_seconds` at the latest, and says in which state the model is."""
        keeper, resident = self._found(request)
        if resident.model.terms.pin:
            raise HttpError(409, f"model {resident.name} is pinned: start the server without its pin")
        await until_gone(keeper.dismiss(resident, state, self._service.config.grace_seconds), request.receive)
        return self._told(resident)

    def _found(self, request: Request) -> "tuple[Keeper, Resident]":
        check_admin(request)
        name, keeper = request.path_params["model"], self._service.keeper
        if keeper is None:
            raise HttpError(409, "this server has one model, which is always awake: see the options models, models_dir")
        if (resident := keeper.find(name)) is None:
            self._service.engine_of(name)  # raises
            raise AssertionError(name)
        return keeper, resident

    def _told(self, resident: "Resident") -> Response:
        return json_response(self._service.entry(resident.name, int(time.time())))


def check_admin(request: Request, instead: str = "") -> None:
    """Refuses keys of others than administrators; `instead` is what such a client may do. Raises HttpError."""
    if not request.state.key.admin:
        how = "this needs an API key with admin=1: start the server with --api-key-file and a line NAME:KEY admin=1"
        raise HttpError(403, f"{how}; {instead}" if instead else how)
