"""Anthropic's /v1/messages and /v1/messages/count_tokens, in its own form of bodies, events and errors."""

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.batch.requests import sampling_params
from kvern.engine.output import CompletionOutput, RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.server.http import (
    EventStream,
    HttpError,
    error_response,
    ignored_header,
    json_response,
    read_object,
    status_of,
    until_gone,
)
from kvern.server.openai import conversation, text_of
from kvern.server.service import OWN_FIELDS, Running, Service, typed

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
# fmt: off
KNOWN = frozenset({
    "messages", "model", "max_tokens", "system", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
    "metadata", "service_tier",
    *SamplingParams.__struct_fields__, *OWN_FIELDS,
})
# fmt: on
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
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
        thinking = typed(body, "thinking", dict, {"type": "disabled"})
        if thinking.get("type") != "disabled":
            raise HttpError(400, f"thinking is {thinking!r:.60}: this server does not do that", param="thinking")
        names = set(SamplingParams.__struct_fields__) - {"n", "logprobs", "prompt_logprobs", "prompt_logprobs_from"}
        values = {name: body[name] for name in names if body.get(name) is not None}
        if body.get("stop_sequences") is not None:
            values["stop"] = body["stop_sequences"]
        params = sampling_params(SamplingParams(), values)
        headers = ignored_header(body, KNOWN)
        ask = service.ask(body, [await self._prompt(body)], params, request.state.key)
        if typed(body, "stream", bool, False):
            running = await service.start(ask)
            return EventStream(_events(running, model), running.close, headers, last=b"", failed=_failed_event)
        outputs = await until_gone(service.run(ask), request.receive)
        return json_response({} if outputs is None else _message(outputs[0], model), headers=headers)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await read_object(request)
        self._service.model(body)
        return json_response({"input_tokens": len(await self._prompt(body))})

    async def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        system, messages = body.get("system"), typed(body, "messages", list, [])
        converted = []
        if system is not None:
            converted.append({"role": "system", "content": _text(system)})
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
                text = f"a message is {message!r:.60}: it must be an object with role user or assistant"
                raise HttpError(400, text, param="messages")
            converted += _chat_messages(message)
        tools = typed(body, "tools", list, None)
        if typed(body, "tool_choice", dict, {}).get("type") == "none":
            tools = None
        return await conversation(converted, None if tools is None else _chat_tools(tools), self._service)


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


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return text_of(content, ("text",))
    raise HttpError(400, f"content is {content!r:.60}: it must be a text or a list of blocks", param="messages")


def _chat_messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message, whose blocks may be text, calls of tools and their results, as messages that templates know."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message["role"], "content": _text(content)}]
    blocks = [block if isinstance(block, dict) else {} for block in content]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    texts = [block for block in blocks if block not in results and block not in uses]
    converted: list[dict[str, Any]] = [
        {"role": "tool", "content": _text(block.get("content", "")), "tool_call_id": block.get("tool_use_id")}
        for block in results
    ]
    if texts or uses:
        converted.append({"role": message["role"], "content": _text(texts)})
    if uses:
        converted[-1]["tool_calls"] = [
            {
                "id": block.get("id"),
                "type": "function",
                "function": {"name": block.get("name"), "arguments": block.get("input") or {}},
            }
            for block in uses
        ]
    return converted


def _chat_tools(tools: list[Any]) -> list[dict[str, Any]]:
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            raise HttpError(400, f"a tool is {tool!r:.60}: it must have a name and an input_schema", param="tools")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
    ]


def _stop_reason(answer: CompletionOutput) -> dict[str, Any]:
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    return {"stop_reason": "max_tokens" if answer.finish_reason == "length" else "end_turn", "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, int]:
    """Anthropic counts the cached tokens of a prompt apart."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": len(output.outputs[0].token_ids),
    }


def _message(output: RequestOutput, model: str) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": answer.text}] if answer.finish_reason is not None else [],
        **_stop_reason(answer),
        "usage": _usage(output),
    }


async def _events(running: Running, model: str) -> AsyncIterator[object]:
    [output] = running.outputs
    answer = output.outputs[0]
    begun, sent = False, 0
    async for _ in running:
        if not begun:
            begun = True
            message = _message(output, model) | {"content": [], "stop_reason": None, "stop_sequence": None}
            yield "message_start", {"type": "message_start", "message": message}
            block = {"type": "text", "text": ""}
            yield "content_block_start", {"type": "content_block_start", "index": 0, "content_block": block}
        if len(answer.text) > sent:
            delta = {"type": "text_delta", "text": answer.text[sent:]}
            sent = len(answer.text)
            yield "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}
    yield "content_block_stop", {"type": "content_block_stop", "index": 0}
    yield "message_delta", {"type": "message_delta", "delta": _stop_reason(answer), "usage": _usage(output)}
    yield "message_stop", {"type": "message_stop"}
