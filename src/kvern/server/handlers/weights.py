"""The route for administrators' API keys that replaces a model's weights while it serves."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import typed
from kvern.errors import ConfigError, InvalidWeights, shown
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.handlers.admin import LONGEST_PATH, check_admin
from kvern.server.http import json_response, until_gone
from kvern.server.service import ServedEngine

KEEP, RECOMPUTE = "keep", "recompute"
FIELDS = {"path", "in_flight"}


class WeightsApi:
    """The handler of POST /v1/models/{model}/weights."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def update(self, request: Request) -> Response:
        """POST /v1/models/{model}/weights: `path` of safetensors here, and what becomes of requests `in_flight`.

        The answer comes when steps use the new weights. A client that leaves before they were read changes nothing.
        """
        check_admin(request)
        name = request.path_params["model"]
        engine = self._found(name)
        body = await read_object(request)
        if unknown := sorted(body.keys() - FIELDS):
            raise HttpError(400, f"{unknown[0]} is unknown here: give path and in_flight", param=unknown[0])
        path = typed(body, "path", str, "")
        if not path.isprintable() or len(path) > LONGEST_PATH or not Path(path).is_absolute():
            right = f"an absolute path on the server's machine, {LONGEST_PATH} printable characters at most"
            raise wrong_value("path", path, right)
        in_flight = typed(body, "in_flight", str, RECOMPUTE)
        if in_flight not in (KEEP, RECOMPUTE):
            raise wrong_value("in_flight", in_flight, f"{RECOMPUTE} or {KEEP}")
        try:
            with self._service.wanted(name):
                update = engine.client.weights.update(path, keep=in_flight == KEEP)
                version = await until_gone(update, request.receive)
        except InvalidWeights as error:
            raise HttpError(400, f"the old weights stay: {error}", param="path") from error
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
