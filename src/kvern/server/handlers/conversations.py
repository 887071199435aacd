"""OpenAI's /v1/conversations: items that several responses share, with metadata."""

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError
from kvern.api.fields import read_metadata
from kvern.api.kept_items import read_items
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.handlers.files import page_of
from kvern.server.handlers.responses import ordered
from kvern.server.http import json_response


class Conversations:
    """Handlers of conversations and their items."""

    def __init__(self, apis: Apis) -> None:
        self._store = apis.kept.conversations

    async def create(self, request: Request) -> Response:
        """POST /v1/conversations."""
        body = await read_object(request)
        items, metadata = read_items(body.get("items")), read_metadata(body)
        return json_response(await self._store.create(request.state.key.name, metadata, items))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/conversations/{conversation_id}."""
        return json_response(await self._store.load(*_named(request)))

    async def update(self, request: Request) -> Response:
        """POST /v1/conversations/{conversation_id}: replace its metadata."""
        metadata = read_metadata(await read_object(request))
        return json_response(await self._store.update(*_named(request), metadata))

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/conversations/{conversation_id}."""
        owner, conversation_id = _named(request)
        await self._store.remove(owner, conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request) -> Response:
        """POST /v1/conversations/{conversation_id}/items."""
        items = read_items((await read_object(request)).get("items"))
        if not items:
            raise HttpError(400, "items is missing: it must be a list of items", param="items")
        await self._store.add(*_named(request), items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return json_response({"object": "list", "data": items, **ends, "has_more": False})

    async def list_items(self, request: Request) -> Response:
        """GET /v1/conversations/{conversation_id}/items."""
        items = await self._store.items(*_named(request))
        return json_response(page_of(ordered(items, request), request))

    async def item(self, request: Request) -> Response:
        """GET /v1/conversations/{conversation_id}/items/{item_id}."""
        return json_response(await self._store.item(*_named(request), request.path_params["item_id"]))

    async def delete_item(self, request: Request) -> Response:
        """DELETE /v1/conversations/{conversation_id}/items/{item_id}."""
        return json_response(await self._store.remove_item(*_named(request), request.path_params["item_id"]))


def _named(request: Request) -> tuple[str, str]:
    """Returns the owner and the conversation's id."""
    return request.state.key.name, request.path_params["conversation_id"]
