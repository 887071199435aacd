"""Anthropic's /v1/messages and /v1/messages/count_tokens: bodies, answers and events, and errors in its own form."""

import uuid
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvern.api.conversation import ChatBody, plain_messages, template_variables
from kvern.api.errors import HttpError
from kvern.api.fields import COMMON_FIELDS, CommonFields, read_common, sampling_params, typed
from kvern.api.message_blocks import BlockEvents, blocks, chat_messages, chat_tool_choice, chat_tools, text
from kvern.errors import shown
from kvern.outputs import CompletionOutput, RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import read_tools
from kvern.tools.pieces import Message

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
# fmt: off
KNOWN = frozenset({
    "messages", "model", "max_tokens", "system", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
    "metadata", "service_tier", "chat_template_kwargs",
    *SamplingParams.__struct_fields__, *COMMON_FIELDS,
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


@dataclass(frozen=True)
class MessageBody:
    """What a body asks for: the answer to a conversation."""

    conversation: ChatBody
    params: SamplingParams
    common: CommonFields
    stream: bool


def read_message(body: Mapping[str, Any]) -> MessageBody:
    """Check a body of MESSAGES. Raises HttpError, InvalidRequest or InvalidParameter."""
    if body.get("max_tokens") is None:
        raise HttpError(400, "max_tokens is missing: say how many tokens the answer may have", param="max_tokens")
    names = set(SamplingParams.__struct_fields__) - {"n", "logprobs", "prompt_logprobs", "prompt_logprobs_from"}
    values = {name: body[name] for name in names if body.get(name) is not None}
    if body.get("stop_sequences") is not None:
        values["stop"] = body["stop_sequences"]
    conversation = read_conversation(body)
    params = sampling_params(SamplingParams(), values)
    return MessageBody(conversation, params, read_common(body), typed(body, "stream", bool, False))


def read_conversation(body: Mapping[str, Any]) -> ChatBody:
    """What both routes read alike. Raises HttpError or InvalidRequest."""
    system, given = body.get("system"), typed(body, "messages", list, [])
    if not given:
        raise HttpError(400, "messages is missing: it must be a list of one message or more", param="messages")
    converted = [] if system is None else [{"role": "system", "content": text(system)}]
    for number, message in enumerate(given):
        converted += chat_messages(message, f"messages[{number}]")
    choice, parallel = chat_tool_choice(typed(body, "tool_choice", dict, {}))
    use = read_tools(chat_tools(typed(body, "tools", list, [])), choice, parallel)
    budget, variables = _thinking_of(typed(body, "thinking", dict, {}))
    return ChatBody(plain_messages(converted), use, budget, True, {**variables, **template_variables(body)})


def _thinking_of(thinking: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
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


def error_body(status: int, message: str) -> dict[str, Any]:
    """Anthropic's shape of an error."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


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


def message_answer(output: RequestOutput, chat: ChatRequest, model: str) -> dict[str, Any]:
    """A whole answer."""
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


async def message_events(
    output: RequestOutput, chat: ChatRequest, model: str, news: AsyncIterable[None]
) -> AsyncIterator[object]:
    """The events of an answer that has grown at each of the news, each a name and what it holds."""
    answer, reader, growing = output.outputs[0], chat.reader(), BlockEvents()
    begun = False
    async for _ in news:
        if not begun:
            begun = True
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield "message_start", {"type": "message_start", "message": message_answer(output, chat, model) | nothing}
        for event in growing.add(reader.read(answer.text, answer.finish_reason is not None)):
            yield event
    for event in growing.end():
        yield event
    stopped = {"type": "message_delta", "delta": _stop_reason(answer, reader.message), "usage": _usage(output)}
    yield "message_delta", stopped
    yield "message_stop", {"type": "message_stop"}
