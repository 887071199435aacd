"""Routes that add and remove engines while the server runs, for administrators' API keys."""

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError
from kvern.api.fields import LONGEST_TIMEOUT, typed
from kvern.errors import ConfigError, InvalidRequest, shown
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.http import json_response, until_gone
from kvern.server.service import ServedEngine


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
            message = f"grace_seconds is {shown(seconds)}: it must be a number from 0 to {LONGEST_TIMEOUT:.0f}"
            raise HttpError(400, message, param="grace_seconds")
        try:
            await until_gone(engine.client.replicas.remove(name, seconds), request.receive)
        except InvalidRequest as error:
            raise HttpError(400, str(error), param="engine") from error
        return json_response({"id": name, "object": "engine", "model": engine.models[0], "ready": False})

    async def _read(self, request: Request) -> tuple[ServedEngine, dict[str, object]]:
        """Returns the engines of the body's `model`, and the body. Raises HttpError if the key is no
        administrator's."""
        if not request.state.key.admin:
            raise HttpError(403, "this needs an API key with admin=1", code="permission_denied")
        body = await read_object(request)
        return self._service.engine_of(self._service.model(body)), body
