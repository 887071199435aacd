"""OpenAI's /v1/responses: bodies, and responses as they stand, with the events of their growing."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvern.api.conversation import ChatBody, plain_messages, template_variables
from kvern.api.errors import HttpError
from kvern.api.fields import COMMON_FIELDS, CommonFields, read_common, read_metadata, sampling_params, typed
from kvern.api.forms import response_format
from kvern.api.response_items import OutputItems, chat_tool_choice, chat_tools, input_messages
from kvern.errors import shown
from kvern.outputs import RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import read_tools

Messages = list[dict[str, Any]]

REFUSED = {"prompt": None, "max_tool_calls": None, "truncation": "disabled"}
"""Fields that are accepted only with the value that asks for nothing."""
LONGEST_USER = 512
"""Characters."""

# fmt: off
KNOWN = frozenset({
    "input", "instructions", "model", "max_output_tokens", "previous_response_id", "stream", "background", "store",
    "metadata", "tools", "tool_choice", "text", "user", "parallel_tool_calls", "service_tier", "reasoning", "include",
    "truncation", "safety_identifier", "stream_options", "thinking_budget", "chat_template_kwargs", "conversation",
    *SamplingParams.__struct_fields__, *COMMON_FIELDS, *REFUSED,
})
# fmt: on


@dataclass(frozen=True)
class ResponseBody:
    """What a body asks for: the answer to a conversation. `response` is how it stands when it begins."""

    conversation: ChatBody
    params: SamplingParams
    common: CommonFields
    response: dict[str, Any]
    stream: bool


def read_response(body: Mapping[str, Any], model: str, earlier: Messages) -> ResponseBody:
    """Check a body; `earlier` are the messages that its input goes on from.

    Raises HttpError, InvalidRequest or InvalidParameter.
    """
    for name, value in REFUSED.items():
        if body.get(name) not in (None, value):
            raise HttpError(400, f"{name} is {shown(body[name])}: this server does not do that", param=name)
    text = typed(body, "text", dict, {})
    tools = typed(body, "tools", list, [])
    messages = [*earlier, *input_messages(body.get("input"))]
    instructions = typed(body, "instructions", str, None)
    prompt = [{"role": "system", "content": instructions}] * (instructions is not None) + messages
    use = read_tools(chat_tools(tools), chat_tool_choice(body.get("tool_choice")), body.get("parallel_tool_calls"))
    reasoning = typed(body, "reasoning", dict, {})
    user = typed(body, "user", str, None)
    if user is not None and len(user) > LONGEST_USER:
        raise HttpError(400, f"user has {len(user)} characters: at most {LONGEST_USER}", param="user")
    variables = template_variables({"reasoning_effort": reasoning.get("effort"), **body})
    form = text.get("format") or {"type": "text"}
    params = _params(body, form)
    conversation = ChatBody(plain_messages(prompt), use, body.get("thinking_budget"), True, variables)
    response = _begun(body, model, params, form)
    stream = typed(body, "stream", bool, False)
    if response["background"] and not response["store"]:
        raise HttpError(
            400, "background is set and store is false: what is asked for later must be kept", param="store"
        )
    return ResponseBody(conversation, params, read_common(body), response, stream)


def _params(body: Mapping[str, Any], form: object) -> SamplingParams:
    values = {name: body[name] for name in SamplingParams.__struct_fields__ if body.get(name) is not None}
    values.pop("logprobs", None)
    structured = response_format(form)
    if structured is not None:
        values["structured"] = structured
    if body.get("max_output_tokens") is not None:
        values["max_tokens"] = body["max_output_tokens"]
    if values.get("n", 1) != 1:
        raise HttpError(400, f"n is {shown(values['n'])}: a response has one answer", param="n")
    return sampling_params(SamplingParams(), values)


def _begun(body: Mapping[str, Any], model: str, params: SamplingParams, form: object) -> dict[str, Any]:
    """A response before its answer."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": typed(body, "background", bool, False),
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": read_metadata(body),
        "model": model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": typed(body, "store", bool, True),
        "temperature": params.temperature if params.temperature is not None else 1.0,
        "text": {"format": form},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": params.top_p if params.top_p is not None else 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": body.get("user"),
    }


def complete(response: dict[str, Any], chat: ChatRequest, output: RequestOutput) -> None:
    """Give a response its whole answer."""
    items = OutputItems()
    items.add(chat.reader().read(output.outputs[0].text, True))
    items.end(_conclude(response, output))
    response["output"] = items.items


def fail(response: dict[str, Any], error: Exception) -> None:
    """Let a response fail."""
    response["status"] = "failed"
    response["error"] = {"code": "server_error", "message": str(error)}


class ResponseEvents:
    """The events of one response, which grows with them; they are numbered."""

    def __init__(self, response: dict[str, Any], chat: ChatRequest) -> None:
        self._response, self._chat = response, chat
        self._number = 0

    async def of(self, output: RequestOutput, news: AsyncIterable[None]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """All events of an output that has grown at each of the news, each a name and what it holds."""
        response, answer, reader = self._response, output.outputs[0], self._chat.reader()
        items = OutputItems()
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        async for _ in news:
            for kind, fields in items.add(reader.read(answer.text, answer.finish_reason is not None)):
                yield self._event(kind, **fields)
        for kind, fields in items.end(_conclude(response, output)):
            yield self._event(kind, **fields)
        response["output"] = items.items
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Exception) -> tuple[str, dict[str, Any]]:
        """Let the response fail; the event that says so."""
        fail(self._response, error)
        return self._event("response.failed", response=self._response)

    def cancelled(self) -> tuple[str, dict[str, Any]]:
        """Cancel the response; the event that says so, for which clients know no other kind."""
        self._response["status"] = "cancelled"
        return self._event("response.incomplete", response=self._response)

    def _event(self, kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        number, self._number = self._number, self._number + 1
        return kind, {"type": kind, "sequence_number": number, **fields}


def _conclude(response: dict[str, Any], output: RequestOutput) -> str:
    """All but the items; returns the status."""
    answer = output.outputs[0]
    cut = answer.finish_reason == "length"
    status = response["status"] = "incomplete" if cut else "completed"
    response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    prompt, generated = len(output.prompt_token_ids), len(answer.token_ids)
    response["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
    return status
