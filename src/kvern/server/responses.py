"""OpenAI's /v1/responses: conversations that the server remembers, events of named kinds, work in the background."""

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.batch.chat_body import ChatBody, plain_messages, template_variables
from kvern.batch.openai_format import response_format
from kvern.batch.requests import sampling_params
from kvern.errors import KvernError, shown
from kvern.outputs import RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.server.bodies import let_go, read_object
from kvern.server.http import EventStream, HttpError, ignored_header, json_response, until_gone
from kvern.server.keys import ApiKey
from kvern.server.openai import chat_request, merge_extra
from kvern.server.response_items import OutputItems, chat_tool_choice, chat_tools, input_messages
from kvern.server.response_memory import Packed, ResponseMemory, Stored
from kvern.server.service import OWN_FIELDS, Ask, Running, Service, read_metadata, typed
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import read_tools

logger = logging.getLogger("kvern")

REFUSED = {"conversation": None, "prompt": None, "max_tool_calls": None, "truncation": "disabled"}
"""Fields that are accepted only with the value that asks for nothing."""
LONGEST_USER = 512
"""Characters."""

# fmt: off
KNOWN = frozenset({
    "input", "instructions", "model", "max_output_tokens", "previous_response_id", "stream", "background", "store",
    "metadata", "tools", "tool_choice", "text", "user", "parallel_tool_calls", "service_tier", "reasoning", "include",
    "truncation", "safety_identifier", "stream_options", "thinking_budget", "chat_template_kwargs",
    *SamplingParams.__struct_fields__, *OWN_FIELDS, *REFUSED,
})
# fmt: on


class Responses:
    """The handlers, and what they remember."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._memory = ResponseMemory(len(service.users))

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/responses."""
        body = await read_object(request)
        stored, ask, chat = await self._read(body, request.state.key)
        headers = ignored_header(body, KNOWN)
        stream, background = typed(body, "stream", bool, False), typed(body, "background", bool, False)
        let_go(request, body)
        if stream and background:
            raise HttpError(400, "stream and background are both set: choose one", param="background")
        if stored.body["store"] or background:
            self._memory.add(stored)
        if background:
            stored.body["status"] = "queued"
            stored.task = asyncio.create_task(self._work(stored, ask, chat))
            stored.task.add_done_callback(lambda _: self._end(stored))
            return json_response(stored.body, headers=headers)
        try:
            if stream:
                running = await self._service.start(ask)
                events, failed = self._events(stored, chat, running), functools.partial(failure, stored)
                return EventStream(events, lambda: self._close(stored, running), headers, b"", failed)
            outputs = await until_gone(self._service.run(ask), request.receive)
        except BaseException:
            self._memory.forget(stored.key, stored.body["id"])  # nobody knows it
            raise
        if outputs is None:
            self._memory.forget(stored.key, stored.body["id"])
        else:
            complete(stored, chat, outputs[0])
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

    async def _read(self, body: dict[str, Any], key: ApiKey) -> tuple[Stored, Ask, ChatRequest]:
        service = self._service
        merge_extra(body)
        model = service.model(body)
        for name, value in REFUSED.items():
            if body.get(name) not in (None, value):
                raise HttpError(400, f"{name} is {shown(body[name])}: this server does not do that", param=name)
        text = typed(body, "text", dict, {})
        tools = typed(body, "tools", list, [])
        messages = [*self._earlier(body, key), *input_messages(body.get("input"))]
        instructions = typed(body, "instructions", str, None)
        prompt = [{"role": "system", "content": instructions}] * (instructions is not None) + messages
        use = read_tools(chat_tools(tools), chat_tool_choice(body.get("tool_choice")), body.get("parallel_tool_calls"))
        reasoning = typed(body, "reasoning", dict, {})
        user = typed(body, "user", str, None)
        if user is not None and len(user) > LONGEST_USER:
            raise HttpError(400, f"user has {len(user)} characters: at most {LONGEST_USER}", param="user")
        variables = template_variables({"reasoning_effort": reasoning.get("effort"), **body})
        values = {name: body[name] for name in SamplingParams.__struct_fields__ if body.get(name) is not None}
        values.pop("logprobs", None)
        form = text.get("format") or {"type": "text"}
        structured = response_format(form)
        if structured is not None:
            values["structured"] = structured
        if body.get("max_output_tokens") is not None:
            values["max_tokens"] = body["max_output_tokens"]
        if values.get("n", 1) != 1:
            raise HttpError(400, f"n is {shown(values['n'])}: a response has one answer", param="n")
        conversation = ChatBody(plain_messages(prompt), use, body.get("thinking_budget"), True, variables)
        chat = await chat_request(conversation, sampling_params(SamplingParams(), values), service, key)
        params = chat.params
        response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": typed(body, "background", bool, False),
            "error": None,
            "incomplete_details": None,
            "instructions": instructions,
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": read_metadata(body),
            "model": model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": typed(body, "store", bool, True),
            "temperature": params.temperature if params.temperature is not None else 1.0,
            "text": {"format": form},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": tools,
            "top_p": params.top_p if params.top_p is not None else 1.0,
            "truncation": "disabled",
            "usage": None,
            "user": user,
        }
        return Stored(key.name, response, messages), service.ask(body, [chat.prompt], params, key), chat

    def _earlier(self, body: Mapping[str, Any], key: ApiKey) -> list[dict[str, Any]]:
        response_id = typed(body, "previous_response_id", str, None)
        if response_id is None:
            return []
        found = self._memory.find(key.name, response_id)
        stored = found.unpacked() if isinstance(found, Packed) else found
        if stored.body["status"] not in ("completed", "incomplete"):
            message = f"response {response_id} is {stored.body['status']}: wait until it is completed"
            raise HttpError(400, message, param="previous_response_id")
        return [*stored.messages, *input_messages(stored.body["output"])]

    async def _work(self, stored: Stored, ask: Ask, chat: ChatRequest) -> None:
        """In the background; what goes wrong is told by the response."""
        stored.body["status"] = "in_progress"
        try:
            [output] = await self._service.run(ask)
            complete(stored, chat, output)
        except (KvernError, HttpError) as error:
            failure(stored, error)
        except Exception:
            logger.exception("response %s failed", stored.body["id"])
            failure(stored, HttpError(500, "the server has a fault; its log tells more"))

    def _close(self, stored: Stored, running: Running) -> None:
        running.close()
        self._end(stored)

    def _end(self, stored: Stored) -> None:
        """Whatever has not come to its end is cancelled."""
        if stored.body["status"] in ("queued", "in_progress"):
            stored.body["status"] = "cancelled"
        self._memory.end(stored)

    async def _events(self, stored: Stored, chat: ChatRequest, running: Running) -> AsyncIterator[object]:
        [output] = running.outputs
        answer, reader = output.outputs[0], chat.reader()
        items = OutputItems()
        yield event(stored, "response.created", response=stored.body)
        yield event(stored, "response.in_progress", response=stored.body)
        async for _ in running:
            for kind, fields in items.add(reader.read(answer.text, answer.finish_reason is not None)):
                yield event(stored, kind, **fields)
        for kind, fields in items.end(conclude(stored, output)):
            yield event(stored, kind, **fields)
        stored.body["output"] = items.items
        yield event(stored, f"response.{stored.body['status']}", response=stored.body)


def failure(stored: Stored, error: Exception) -> object:
    """Let a response fail; the event that says so."""
    stored.body["status"] = "failed"
    stored.body["error"] = {"code": "server_error", "message": str(error)}
    return event(stored, "response.failed", response=stored.body)


def complete(stored: Stored, chat: ChatRequest, output: RequestOutput) -> None:
    """The response to a whole answer."""
    items = OutputItems()
    items.add(chat.reader().read(output.outputs[0].text, True))
    items.end(conclude(stored, output))
    stored.body["output"] = items.items


def conclude(stored: Stored, output: RequestOutput) -> str:
    """All but the items; returns the status."""
    answer = output.outputs[0]
    cut = answer.finish_reason == "length"
    status = stored.body["status"] = "incomplete" if cut else "completed"
    stored.body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    prompt, generated = len(output.prompt_token_ids), len(answer.token_ids)
    stored.body["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
    return status


def event(stored: Stored, kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A named event; they are numbered."""
    number, stored.sequence = stored.sequence, stored.sequence + 1
    return kind, {"type": kind, "sequence_number": number, **fields}
