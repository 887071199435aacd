"""/v1/rerank: the handler."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.fields import merge_extra
from kvern.api.rerank import KNOWN, read_rerank, rerank_answer
from kvern.server.apis import Apis
from kvern.server.handlers.relevance import Relevance
from kvern.server.handlers.whole_answers import whole_answer
from kvern.server.keys import ApiKey


class Rerank:
    """Handler of /v1/rerank."""

    def __init__(self, apis: Apis) -> None:
        self._service, self._relevance = apis.service, apis.get(Relevance)

    async def create(self, request: Request) -> Response:
        """POST /v1/rerank."""
        return await whole_answer(request, self.answer, lambda _: KNOWN)

    async def answer(
        self, body: dict[str, Any], key: ApiKey, has_read: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Returns the body of the answer. Once `body` is read, it is emptied and `has_read` is called.

        Raises what `Relevance.of` raises.
        """
        merge_extra(body)
        model, wanted = self._service.model(body), read_rerank(body)
        body.clear()
        has_read()
        return rerank_answer(wanted, await self._relevance.of(wanted.asked, model, key), model)
