"""Routes that never stream: the answer is one object, for a client or for a row of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.fields import merge_extra
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.http import json_response, strangers_header, until_gone
from kvern.server.keys import ApiKey

Body = dict[str, Any]


class WholeAnswers(ABC):
    """The base of handlers of one such route. `known` are the fields that have an effect."""

    known: Collection[str] = ()

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def create(self, request: Request) -> Response:
        """Answers POST to the route."""
        body = await read_object(request)
        merge_extra(body)
        headers = strangers_header(body, self.fields_of(body))
        work = self.answer(body, request.state.key, request.state.held.close)
        return json_response(await until_gone(work, request.receive), headers=headers)

    def fields_of(self, body: Mapping[str, Any]) -> Collection[str]:
        """Returns the fields that have an effect in this body."""
        return self.known

    @abstractmethod
    async def answer(self, body: Body, key: ApiKey, has_read: Callable[[], None] = lambda: None) -> Body:
        """Returns the body of the answer. Once `body` is read, it is emptied and `has_read` is called.

        Raises HttpError, InvalidRequest, EngineDied or DeadlineExceeded.
        """
