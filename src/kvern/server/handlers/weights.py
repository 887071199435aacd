"""The route for administrators' API keys that replaces a model's weights while it serves."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import typed
from kvern.errors import ConfigError, InvalidWeights, shown
from kvern.request.weights import WeightGroup
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.handlers.admin import LONGEST_PATH, check_admin
from kvern.server.http import json_response, until_gone
from kvern.server.service import ServedEngine

KEEP, RECOMPUTE = "keep", "recompute"
FIELDS = {"path", "group", "in_flight"}


class WeightsApi:
    """The handler of POST /v1/models/{model}/weights."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def update(self, request: Request) -> Response:
        """POST /v1/models/{model}/weights: `path` of safetensors here, or a `group` that brings them, and what
        becomes of requests `in_flight`.

        The answer comes when steps use the new weights. A client that leaves before they were read changes nothing.
        """
        check_admin(request)
        name = request.path_params["model"]
        engine = self._found(name)
        body = await read_object(request)
        if unknown := sorted(body.keys() - FIELDS):
            raise HttpError(400, f"{unknown[0]} is unknown here: give path or group, and in_flight", param=unknown[0])
        source = _source(body)
        in_flight = typed(body, "in_flight", str, RECOMPUTE)
        if in_flight not in (KEEP, RECOMPUTE):
            raise wrong_value("in_flight", in_flight, f"{RECOMPUTE} or {KEEP}")
        try:
            with self._service.wanted(name):
                update = engine.client.weights.update(source, keep=in_flight == KEEP)
                version = await until_gone(update, request.receive)
        except InvalidWeights as error:
            raise HttpError(
                400, f"the old weights stay: {error}", param="path" if isinstance(source, str) else "group"
            ) from error
        except ConfigError as error:
            raise HttpError(409, str(error)) from error
        return json_response({"id": name, "object": "weights", "version": version, "in_flight": in_flight})

    def _found(self, name: str) -> ServedEngine:
        """The engines of a model of this name that has some. Raises HttpError."""
        keeper = self._service.keeper
        resident = None if keeper is None else keeper.find(name)
        if keeper is not None and resident is not None and keeper.state(resident) != "awake":
            state = keeper.state(resident)
            message = f"model {name} is {state}, and has no weights to replace: POST /v1/models/{name}/load before"
            raise HttpError(409, message)
        engine = self._service.engine_of(name)
        if name not in engine.models:
            raise HttpError(400, f"{shown(name)} is an adapter: name its model, {engine.models[0]}", param="model")
        return engine


def _source(body: dict[str, Any]) -> str | WeightGroup:
    """Returns where the weights of a body are. Raises HttpError."""
    if (given := typed(body, "group", dict, None)) is not None:
        if "path" in body:
            raise HttpError(400, "path and group are two sources: give one of them", param="group")
        try:
            group = msgspec.convert(given, WeightGroup)
        except msgspec.ValidationError as error:
            raise HttpError(400, f"group: {error}", param="group") from error
        url = urlsplit(group.address)
        if url.scheme != "tcp" or not url.hostname or not url.port:
            raise wrong_value("group.address", group.address, "tcp://HOST:PORT, where the first member listens")
        if group.rank >= group.world_size:
            raise wrong_value("group.rank", group.rank, f"below world_size, {group.world_size}")
        return group
    path: str = typed(body, "path", str, "")
    if not path.isprintable() or len(path) > LONGEST_PATH or not Path(path).is_absolute():
        right = f"an absolute path on the server's machine, {LONGEST_PATH} printable characters at most"
        raise wrong_value("path", path, right)
    return path
