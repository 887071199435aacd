"""OpenAI's /v1/responses and /v1/conversations: stored conversations, streams, and work in the background."""

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvern.api.error_bodies import status_of
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import merge_extra, read_metadata, typed
from kvern.api.response_items import input_messages, read_items, referred
from kvern.api.response_output import response_of
from kvern.api.responses import KNOWN, ResponseEvents, complete, read_response
from kvern.errors import KvernError
from kvern.io.json_lines import as_json
from kvern.server.apis import Apis
from kvern.server.bodies import let_go, read_object
from kvern.server.handlers.files import page_of
from kvern.server.http import LACKS_HEADER, apart, header_of_names, ignored_header, json_response, until_gone
from kvern.server.service import Ask, Running
from kvern.server.stores.response_memory import (
    LAST,
    RUNNING,
    Event,
    EventLog,
    Messages,
    Packed,
    Record,
    events_of,
)
from kvern.server.stores.responses import CUT_OFF
from kvern.server.streams import EventStream
from kvern.serving.served import SERVED
from kvern.text.content import restored
from kvern.tools.chat import ChatRequest

MOST_RESPONSES = 1000
MOST_BYTES = 16 << 20
"""The limit of all responses that are read for one request."""


async def with_referred_items(value: object, find: Callable[[str], Awaitable[bytes | None]]) -> object:
    """Returns the input with the items that it refers to. `find` returns a response as JSON, or None.

    A reference stays as it is if it is not found, or occurs a second time. Raises HttpError if too much would be read.
    """
    wanted: dict[str, set[str]] = {}
    for item_id in map(referred, value if isinstance(value, list) else ()):
        response_id = None if item_id is None else response_of(item_id)
        if item_id is not None and response_id is not None:
            wanted.setdefault(response_id, set()).add(item_id)
    if not wanted or not isinstance(value, list):
        return value
    if len(wanted) > MOST_RESPONSES:
        message = f"input refers to items of {len(wanted)} responses: at most {MOST_RESPONSES}"
        raise HttpError(400, message, param="input")
    found: dict[str | None, Any] = {}
    left = MOST_BYTES
    for response_id, item_ids in wanted.items():
        response = await find(response_id)
        if response is None:
            continue
        left -= len(response)
        if left < 0:
            message = f"input refers to items of responses of more than {MOST_BYTES} bytes: send the items themselves"
            raise HttpError(413, message, param="input")
        output = msgspec.json.decode(response)["output"]
        found |= {item["id"]: item for item in output if item["id"] in item_ids}
    return [found.pop(referred(item), item) for item in value]


logger = logging.getLogger("kvern")

ORDERS = ("asc", "desc")


class Responses:
    """Handlers of responses. `tasks` are those of background responses."""

    def __init__(self, apis: Apis) -> None:
        self._service, self._store = apis.service, apis.kept
        self.tasks = apis.tasks

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/responses."""
        body = await read_object(request)
        key = request.state.key
        merge_extra(body)
        model = await self._service.model(body, key)
        body["input"] = await with_referred_items(body.get("input"), functools.partial(self._ended, key.name))
        with contextlib.ExitStack() as held:
            conversation = read_conversation_id(body)
            if conversation is not None:
                held.enter_context(self._store.conversations.held(key.name, conversation))
            before = await self._before(key.name, body, conversation)
            asked = await asyncio.to_thread(read_response, body, model, before)  # there may be thousands of items
            if conversation is not None:
                await self._store.conversations.check_room(key.name, conversation, asked.items)
                asked.response["conversation"] = {"id": conversation}
            chat = await self._service.chat(model, asked.conversation, asked.params, asked.common, key)
            ask = Ask(model, asked.common, [chat.prompt], chat.params, key)
            stream, is_stored = asked.stream, asked.response["store"]
            kept = asked.items if is_stored or conversation is not None else []
            earlier = as_json(before if is_stored else [])
            record = Record(key.name, asked.response, earlier, as_json(kept), conversation)
            headers = ignored_header(body, KNOWN) | header_of_names(LACKS_HEADER, chat.lacks)
            del asked, before, kept
            let_go(request, body)
            if is_stored:
                self._store.hold(record)
            record.held = held.pop_all()
        if record.body["background"]:
            return await self._begin(record, ask, chat, stream, headers)
        try:
            if stream:
                running = await self._service.start(ask)
                close = functools.partial(self._close, record, running)
                return EventStream(self._events(record, running, chat), close, headers, large=ask.is_large)
            outputs = await until_gone(self._service.run(ask), request.receive)
            if outputs is not None:
                work = functools.partial(complete, record.body, chat, outputs[0])
                if ask.is_large:
                    await apart(work)
                else:
                    work()
        except BaseException:
            self._store.drop(record)
            raise
        if outputs is None:
            self._store.drop(record)
        else:
            await self._store.end(record)
        return json_response(record.body, headers=headers)

    async def retrieve(self, request: Request) -> Response | EventStream:
        """GET /v1/responses/{response_id}, or with `stream` its events after number `starting_after`."""
        found = await self._find(request)
        query = request.query_params
        stream, after = query.get("stream", "false"), query.get("starting_after")
        if stream not in ("true", "false"):
            raise wrong_value("stream", stream, "true or false")
        if after is not None and re.fullmatch("[0-9]{1,15}", after) is None:
            raise wrong_value("starting_after", after, "the number of an event")
        if stream == "false":
            return json_response(found.body)
        number = -1 if after is None else int(after)
        if isinstance(found, Record) and found.log is not None:
            events = found.log.follow(number)
        elif isinstance(found, Packed) and found.events is not None:
            events = events_of(found.body, found.events, number)
        else:
            raise HttpError(400, "the response was not made with background and stream: retrieve it without stream")
        return EventStream(events, lambda: None, large=True)

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{response_id}/input_items."""
        found = await self._find(request)
        return json_response(page_of(ordered(msgspec.json.decode(found.items), request), request))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{response_id}/cancel: cancel a background response."""
        found = await self._find(request)
        if isinstance(found, Record) and found.task is not None:
            found.is_unwanted = True
            found.task.cancel()
            await asyncio.wait([found.task])
            await self._store.end(found)
        elif isinstance(found, Record) or not msgspec.json.decode(found.body)["background"]:
            raise HttpError(400, "the response was not made with background: close its connection to cancel it")
        return json_response(found.body)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{response_id}."""
        response_id = request.path_params["response_id"]
        await self._store.forget(request.state.key.name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _find(self, request: Request) -> Record | Packed:
        return await self._store.find(request.state.key.name, request.path_params["response_id"])

    async def _ended(self, owner: str, response_id: str) -> bytes | None:
        """Returns a response that has ended, as JSON; None if there is none."""
        with contextlib.suppress(HttpError):
            found = await self._store.find(owner, response_id)
            return bytes(found.body) if isinstance(found, Packed) else None
        return None

    async def _before(self, owner: str, body: Mapping[str, Any], conversation: str | None) -> Messages:
        """Returns the messages that the input continues."""
        if conversation is not None:
            items = await self._store.conversations.items(owner, conversation)
            return await asyncio.to_thread(input_messages, items) if items else []
        previous = typed(body, "previous_response_id", str, None)
        if previous is None:
            return []
        return await asyncio.to_thread(messages_of, await self._store.find(owner, previous))

    async def _begin(
        self, record: Record, ask: Ask, chat: ChatRequest, stream: bool, headers: Mapping[str, str]
    ) -> Response | EventStream:
        """Starts the response in the background and answers at once."""
        record.body["status"] = "queued"
        if stream:
            record.log = EventLog(record.body)
        written = self._store.begin(record)
        record.task = asyncio.create_task(self._work(record, ask, chat))
        self.tasks.add(record.task)
        record.task.add_done_callback(self.tasks.discard)
        record.task.add_done_callback(lambda _: self._store.end(record))
        await written
        if record.log is not None:
            return EventStream(record.log.follow(-1), lambda: None, headers, large=ask.is_large)
        return json_response(record.body, headers=headers)

    async def _work(self, record: Record, ask: Ask, chat: ChatRequest) -> None:
        """Generates a background response. An error is reported in the response and in its last event."""
        asked = SERVED.get()
        served = None if asked is None else asked.apart(record.id)
        SERVED.set(served)
        status = 200
        record.body["status"] = "in_progress"
        events = ResponseEvents(record.body, chat)
        try:
            running = await self._service.start(ask, patient=record.log is None)
            with contextlib.ExitStack() as held:
                held.callback(running.close)
                async for event in events.of(running.outputs[0], running):
                    _tell(record, event)
        except KvernError as error:
            status = status_of(error)
            _tell(record, events.failed(error))
        except asyncio.CancelledError:
            status = 200 if record.is_unwanted else status_of(CUT_OFF)
            _tell(record, events.cancelled() if record.is_unwanted else events.failed(CUT_OFF))
        except Exception:
            status = 500
            logger.exception("response %s failed", record.id)
            _tell(record, events.failed(HttpError(500, "the server has a fault; its log tells more")))
        finally:
            if served is not None:
                self._service.note_end(served, status)

    async def _events(self, record: Record, running: Running, chat: ChatRequest) -> AsyncIterator[Event]:
        """Yields the events of a response that a client waits for. The response is stored before the first and the
        last."""
        events = ResponseEvents(record.body, chat)
        try:
            if record.body["store"]:
                await self._store.begin(record)
            async with contextlib.aclosing(events.of(running.outputs[0], running)) as told:
                async for event in told:
                    if event[0] in LAST:
                        await self._store.end(record)
                    yield event
        except KvernError as error:
            last = events.failed(error)
            await self._store.end(record)
            yield last

    def _close(self, record: Record, running: Running) -> None:
        running.close()
        self._store.end(record)


def _tell(record: Record, event: Event) -> None:
    if record.log is not None:
        record.log.add(event)


def messages_of(found: Record | Packed) -> Messages:
    """Returns the messages before a response, its input and its output. Raises HttpError if it was not answered."""
    response = found.body if isinstance(found, Record) else msgspec.json.decode(found.body)
    if response["status"] not in ("completed", "incomplete"):
        what = "wait until it is completed" if response["status"] in RUNNING else "go on from one that was answered"
        message = f"response {found.id} is {response['status']}: {what}"
        raise HttpError(400, message, param="previous_response_id")
    parts = (msgspec.json.decode(found.items), response["output"])
    return [
        *restored(msgspec.json.decode(found.before)),
        *(message for part in parts for message in input_messages(part)),
    ]


def read_conversation_id(body: Mapping[str, Any]) -> str | None:
    """Returns the id in `conversation`, which may be an object with an id. Raises HttpError."""
    conversation = typed(body, "conversation", (str, dict), None)
    if conversation is None:
        return None
    if body.get("previous_response_id") is not None:
        message = "conversation and previous_response_id are both set: choose one"
        raise HttpError(400, message, param="conversation")
    conversation_id = conversation if isinstance(conversation, str) else conversation.get("id")
    if not isinstance(conversation_id, str):
        raise wrong_value("conversation", conversation, "the id of a conversation")
    return conversation_id


def ordered(items: list[dict[str, Any]], request: Request) -> list[dict[str, Any]]:
    """Returns items in the `order` of the query, newest first by default. Raises HttpError."""
    order = request.query_params.get("order", "desc")
    if order not in ORDERS:
        raise wrong_value("order", order, "asc or desc")
    return items if order == "asc" else items[::-1]


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
