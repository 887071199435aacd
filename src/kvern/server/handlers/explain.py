"""/v1/requests: what became of a request, for its own key and for administrators."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError
from kvern.errors import shown
from kvern.server.apis import Apis
from kvern.server.explanation import explained
from kvern.server.http import json_response
from kvern.server.keys import ApiKey
from kvern.serving.served import ServedRequest, key_hash


class Requests:
    """Handler of the route."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def explain(self, request: Request) -> Response:
        """GET /v1/requests/{request_id}/explain. Others' requests are not found."""
        name, key = request.path_params["request_id"], request.state.key
        served = self._found(name, key)
        if served is None:
            message = (
                f"no request {shown(name)} of this key is known here: the last 10,000 that asked a model are, by the "
                "x-request-id of their answer"
            )
            raise HttpError(404, message, param="request_id")
        now = served.copy()
        return await asyncio.to_thread(lambda: json_response(explained(now)))

    def _found(self, name: str, key: ApiKey) -> ServedRequest | None:
        owners = [key_hash(key.name, key.client)]
        if key.admin:
            owners += [key_hash(user.name) for user in self._service.keys.users]
        found = (self._service.ledger.find(owner, name) for owner in owners)
        return next((served for served in found if served is not None), None)
