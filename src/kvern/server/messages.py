"""Anthropic's /v1/messages and /v1/messages/count_tokens, in its own form of bodies, events and errors."""

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.batch.chat_body import ChatBody, plain_messages, template_variables
from kvern.batch.requests import sampling_params
from kvern.errors import shown
from kvern.outputs import CompletionOutput, RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.server.bodies import let_go, read_object
from kvern.server.http import (
    EventStream,
    HttpError,
    error_response,
    ignored_header,
    json_response,
    status_of,
    until_gone,
)
from kvern.server.message_blocks import BlockEvents, blocks, chat_messages, chat_tool_choice, chat_tools, text
from kvern.server.openai import chat_request
from kvern.server.service import OWN_FIELDS, Running, Service, typed
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import read_tools
from kvern.tools.pieces import Message

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
# fmt: off
KNOWN = frozenset({
    "messages", "model", "max_tokens", "system", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
    "metadata", "service_tier", "chat_template_kwargs",
    *SamplingParams.__struct_fields__, *OWN_FIELDS,
})
# fmt: on
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class MessagesApi:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/messages."""
        body = await read_object(request)
        service = self._service
        model = service.model(body)
        if body.get("max_tokens") is None:
            raise HttpError(400, "max_tokens is missing: say how many tokens the answer may have", param="max_tokens")
        names = set(SamplingParams.__struct_fields__) - {"n", "logprobs", "prompt_logprobs", "prompt_logprobs_from"}
        values = {name: body[name] for name in names if body.get(name) is not None}
        if body.get("stop_sequences") is not None:
            values["stop"] = body["stop_sequences"]
        chat = await chat_request(
            self._chat(body), sampling_params(SamplingParams(), values), service, request.state.key
        )
        headers = ignored_header(body, KNOWN)
        ask = service.ask(body, [chat.prompt], chat.params, request.state.key)
        stream = typed(body, "stream", bool, False)
        let_go(request, body)
        if stream:
            running = await service.start(ask)
            return EventStream(_events(running, chat, model), running.close, headers, last=b"", failed=_failed_event)
        outputs = await until_gone(service.run(ask), request.receive)
        return json_response({} if outputs is None else _message(outputs[0], chat, model), headers=headers)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await read_object(request)
        self._service.model(body)
        chat = self._chat(body)
        with self._service.admission.enter(request.state.key):
            prompt = await self._service.client.chat_prompt(chat.messages, list(chat.use.definitions) or None)
        return json_response({"input_tokens": len(prompt)})

    def _chat(self, body: Mapping[str, Any]) -> ChatBody:
        system, given = body.get("system"), typed(body, "messages", list, [])
        if not given:
            raise HttpError(400, "messages is missing: it must be a list of one message or more", param="messages")
        converted = [] if system is None else [{"role": "system", "content": text(system)}]
        for number, message in enumerate(given):
            converted += chat_messages(message, f"messages[{number}]")
        choice, parallel = chat_tool_choice(typed(body, "tool_choice", dict, {}))
        use = read_tools(chat_tools(typed(body, "tools", list, [])), choice, parallel)
        budget, variables = thinking_of(typed(body, "thinking", dict, {}))
        return ChatBody(plain_messages(converted), use, budget, True, {**variables, **template_variables(body)})


def thinking_of(thinking: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """`thinking` as a budget and as what templates call it. Raises HttpError."""
    kind = thinking.get("type")
    if kind is None and not thinking:
        return None, {}
    if kind not in ("enabled", "disabled", "adaptive"):
        raise HttpError(400, f"thinking.type is {shown(kind)}: it must be enabled or disabled", param="thinking")
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        message = f"thinking.budget_tokens is {shown(budget)}: it must be a number of tokens, 1 or more"
        raise HttpError(400, message, param="thinking")
    return (budget if kind == "enabled" else None), {"enable_thinking": kind != "disabled"}


def error_for(path: str, error: Exception) -> Response:
    """An error in the shape that a path's clients know."""
    if not path.startswith(PATH):
        return error_response(error)
    status = status_of(error)
    return json_response(_error(status, str(error)), status, getattr(error, "headers", None))


def _error(status: int, message: str) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _failed_event(error: Exception) -> object:
    return "error", _error(status_of(error), str(error))


def _stop_reason(answer: CompletionOutput, message: Message) -> dict[str, Any]:
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    ended = "tool_use" if message.tool_calls else "end_turn"
    return {"stop_reason": "max_tokens" if answer.finish_reason == "length" else ended, "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, int]:
    """Anthropic counts the cached tokens of a prompt apart."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": len(output.outputs[0].token_ids),
    }


def _message(output: RequestOutput, chat: ChatRequest, model: str) -> dict[str, Any]:
    answer = output.outputs[0]
    message = chat.message(answer.text)
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks(message),
        **_stop_reason(answer, message),
        "usage": _usage(output),
    }


async def _events(running: Running, chat: ChatRequest, model: str) -> AsyncIterator[object]:
    [output] = running.outputs
    answer, reader, growing = output.outputs[0], chat.reader(), BlockEvents()
    begun = False
    async for _ in running:
        if not begun:
            begun = True
            message = {**_message(output, chat, model), "content": [], "stop_reason": None, "stop_sequence": None}
            yield "message_start", {"type": "message_start", "message": message}
        for event in growing.add(reader.read(answer.text, answer.finish_reason is not None)):
            yield event
    for event in growing.end():
        yield event
    stopped = {"type": "message_delta", "delta": _stop_reason(answer, reader.message), "usage": _usage(output)}
    yield "message_delta", stopped
    yield "message_stop", {"type": "message_stop"}
