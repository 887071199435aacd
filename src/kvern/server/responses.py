"""OpenAI's /v1/responses: conversations that the server remembers, streams, work in the background."""

import asyncio
import contextlib
import functools
import logging

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import HttpError
from kvern.api.fields import merge_extra
from kvern.api.response_items import input_messages
from kvern.api.responses import KNOWN, Messages, ResponseEvents, complete, fail, read_response
from kvern.errors import KvernError
from kvern.server.bodies import let_go, read_object
from kvern.server.http import EventStream, ignored_header, json_response, until_gone
from kvern.server.response_memory import Packed, ResponseMemory, Stored
from kvern.server.response_references import with_referred_items
from kvern.server.service import Ask, Running, Service
from kvern.tools.chat import ChatRequest

logger = logging.getLogger("kvern")


class Responses:
    """The handlers, and what they remember."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._memory = ResponseMemory(len(service.users))

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/responses."""
        body = await read_object(request)
        key = request.state.key
        merge_extra(body)
        model = self._service.model(body)
        body["input"] = await with_referred_items(body.get("input"), functools.partial(self._ended, key.name))
        asked = read_response(body, model, lambda name: self._earlier(key.name, name))
        chat = await self._service.engine_of(model).chat(asked.conversation, asked.params, key)
        ask = self._service.ask(model, asked.common, [chat.prompt], chat.params, key)
        stored, stream = Stored(key.name, asked.response, asked.messages), asked.stream
        headers = ignored_header(body, KNOWN)
        del asked
        let_go(request, body)
        if stored.body["store"] or stored.background:
            self._memory.add(stored)
        if stored.background:
            stored.body["status"] = "queued"
            stored.task = asyncio.create_task(self._work(stored, ask, chat))
            stored.task.add_done_callback(lambda _: self._end(stored))
            return json_response(stored.body, headers=headers)
        try:
            if stream:
                running, events = await self._service.start(ask), ResponseEvents(stored.body, chat)
                [output] = running.outputs
                close = functools.partial(self._close, stored, running)
                return EventStream(events.of(output, running), close, headers, b"", events.failed)
            outputs = await until_gone(self._service.run(ask), request.receive)
        except BaseException:
            self._memory.forget(stored.key, stored.body["id"])  # nobody knows it
            raise
        if outputs is None:
            self._memory.forget(stored.key, stored.body["id"])
        else:
            complete(stored.body, chat, outputs[0])
            self._end(stored)
        return json_response(stored.body, headers=headers)

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{response_id}."""
        return json_response(self._find(request).body)

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{response_id}/cancel, for work in the background."""
        stored = self._find(request)
        if not stored.background:
            raise HttpError(400, "the response was not made with background: close its connection to cancel it")
        if isinstance(stored, Stored) and stored.task is not None and not stored.task.done():
            stored.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stored.task
        return json_response(stored.body)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{response_id}."""
        self._find(request)
        response_id = request.path_params["response_id"]
        self._memory.forget(request.state.key.name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    def _find(self, request: Request) -> Stored | Packed:
        return self._memory.find(request.state.key.name, request.path_params["response_id"])

    def _earlier(self, owner: str, response_id: str) -> Messages:
        """The messages up to the end of a response."""
        found = self._memory.find(owner, response_id)
        stored = found.unpacked() if isinstance(found, Packed) else found
        if stored.body["status"] not in ("completed", "incomplete"):
            message = f"response {response_id} is {stored.body['status']}: wait until it is completed"
            raise HttpError(400, message, param="previous_response_id")
        return [*stored.messages, *input_messages(stored.body["output"])]

    async def _ended(self, owner: str, response_id: str) -> bytes | None:
        """A response that has ended, as JSON."""
        with contextlib.suppress(HttpError):
            found = self._memory.find(owner, response_id)
            return bytes(found.body) if isinstance(found, Packed) else None
        return None

    async def _work(self, stored: Stored, ask: Ask, chat: ChatRequest) -> None:
        """In the background; what goes wrong is told by the response."""
        stored.body["status"] = "in_progress"
        try:
            [output] = await self._service.run(ask)
            complete(stored.body, chat, output)
        except KvernError as error:
            fail(stored.body, error)
        except Exception:
            logger.exception("response %s failed", stored.body["id"])
            fail(stored.body, HttpError(500, "the server has a fault; its log tells more"))

    def _close(self, stored: Stored, running: Running) -> None:
        running.close()
        self._end(stored)

    def _end(self, stored: Stored) -> None:
        """Whatever has not come to its end is cancelled."""
        if stored.body["status"] in ("queued", "in_progress"):
            stored.body["status"] = "cancelled"
        self._memory.end(stored)
