"""The route for administrators' API keys that profiles the steps of an engine while it serves."""

import asyncio
import gzip

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import typed
from kvern.errors import ConfigError, shown
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.handlers.admin import check_admin
from kvern.server.http import CLIENT_GONE, SentInPieces, until_gone
from kvern.server.service import ServedEngine
from kvern.serving.client_traces import MOST_SECONDS, MOST_STEPS
from kvern.serving.replica import Replica

FIELDS = {"model", "engine", "steps", "seconds"}
STEPS, SECONDS = 20, 30.0


class ProfileApi:
    """The handler of POST /v1/profile."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def take(self, request: Request) -> Response:
        """POST /v1/profile: a Chrome trace of the next `steps` of `engine`, of those that run within `seconds`."""
        check_admin(request)
        body = await read_object(request)
        if unknown := sorted(body.keys() - FIELDS):
            raise HttpError(400, f"{unknown[0]} is unknown here: give steps and seconds", param=unknown[0])
        steps = typed(body, "steps", int, STEPS)
        if not 1 <= steps <= MOST_STEPS:
            raise wrong_value("steps", steps, f"a number from 1 to {MOST_STEPS}")
        seconds = typed(body, "seconds", (int, float), SECONDS)
        if not 0 < seconds <= MOST_SECONDS:
            raise wrong_value("seconds", seconds, f"a number above 0, {MOST_SECONDS:g} at most")
        name = await self._service.model(body, request.state.key)
        replica = _chosen(self._service.engine_of(name), typed(body, "engine", str, None))
        try:
            with self._service.wanted(name):
                trace = await until_gone(replica.traces.take(steps, seconds), request.receive)
        except ConfigError as error:
            raise HttpError(409, str(error)) from error
        if trace is None:
            return Response(status_code=CLIENT_GONE)
        headers = {"vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        else:
            trace = await asyncio.to_thread(gzip.decompress, trace)
        return SentInPieces(trace, headers=headers, media_type="application/json")


def _chosen(engine: ServedEngine, name: str | None) -> Replica:
    """Returns the engine of this name, else the first that takes requests. Raises HttpError."""
    replicas = list(engine.client.replicas)
    if name is None:
        return next((replica for replica in replicas if replica.supervisor.is_ready), replicas[0])
    if (found := next((replica for replica in replicas if replica.name == name), None)) is None:
        names = ", ".join(replica.name for replica in replicas)
        raise HttpError(400, f"engine is {shown(name)}: this model's are {names}", param="engine")
    return found
