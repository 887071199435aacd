"""Routes of OpenAI that this server has by name only, to say why it does not have them."""

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError
from kvern.server.apis import Apis
from kvern.server.http import path_of

OTHERS = {"audio": "a server for speech", "images": "a server that draws"}


class Absent:
    """The handlers."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def refuse(self, request: Request) -> Response:
        """POST /v1/audio/... and /v1/images/..."""
        path = path_of(request.scope)
        what = path.split("/")[2]
        names = ", ".join(self._service.names)
        message = f"{path}: this server has no {what}: {names} reads and writes text; ask {OTHERS[what]}"
        raise HttpError(404, message, code="not_supported")
