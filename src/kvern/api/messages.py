"""Anthropic's /v1/messages and /v1/messages/count_tokens: bodies with their tools, answers, events and errors."""

import datetime
import re
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.api.chat_fields import THINKING_FIELDS, read_thinking
from kvern.api.client_tools import client_tools
from kvern.api.completion_answers import cached_counts
from kvern.api.conversation import ChatBody, plain_messages, template_variables
from kvern.api.errors import HttpError
from kvern.api.fields import COMMON_FIELDS, PARAMETERS, CommonFields, read_common, sampling_params, typed
from kvern.api.message_blocks import BlockEvents, blocks, chat_messages, text
from kvern.api.other_names import in_own_words
from kvern.errors import InvalidRequest, shown
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.pieces import Message
from kvern.request.sampling_params import SamplingParams
from kvern.serving.served import named
from kvern.tools.chat import ChatRequest, PromptOptions
from kvern.tools.checks import read_tools

CLIENT_TOOLS = client_tools("anthropic")
"""Tools that clients run, by the type without its date. Models do not know the description and schema, so they are
given here. The oldest text editors call the inserted text new_str, which is why the schema has it."""
DATED = re.compile(r"(\w{1,64})_\d{8}")


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the tools that a client runs, in OpenAI's format. Raises InvalidRequest."""
    return [_function(tool, f"tools[{number}]") for number, tool in enumerate(tools) if not is_of_service(tool)]


def ignored_tools(tools: Sequence[Any]) -> list[str]:
    """Returns the names of tools that only Anthropic's service runs, such as web_search, and of unknown ones."""
    names = (tool.get("name", tool.get("type")) for tool in tools if is_of_service(tool))
    return [name for name in names if isinstance(name, str)]


def is_of_service(tool: object) -> bool:
    """True if no client runs the tool."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind not in (None, "custom") and _client_tool(kind) is None


def _client_tool(kind: object) -> dict[str, Any] | None:
    dated = DATED.fullmatch(kind) if isinstance(kind, str) else None
    return None if dated is None else CLIENT_TOOLS.get(dated[1])


def _function(tool: object, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{place} is {shown(tool)}: it must be an object with a name")
    known = _client_tool(tool.get("type"))
    if known is not None:
        function = {"name": tool["name"], **known}
    elif "input_schema" not in tool:
        raise InvalidRequest(f"{place} is {shown(tool)}: it must have a name and an input_schema")
    else:
        kept = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        function = {**kept, "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Mapping[str, Any], tools: Sequence[Any]) -> tuple[object, bool]:
    """Returns `tool_choice` in OpenAI's format, and whether several calls at once are allowed.

    A choice that only an ignored tool could satisfy becomes auto. Raises InvalidRequest.
    """
    parallel = choice.get("disable_parallel_tool_use") is not True
    words = {"auto": "auto", "any": "required", "none": "none"}
    kind = choice.get("type", "auto")
    if kind == "tool" and choice.get("name") not in ignored_tools(tools):
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind == "tool" or (kind == "any" and tools and all(map(is_of_service, tools))):
        return "auto", parallel
    if not isinstance(kind, str) or kind not in words:
        raise InvalidRequest(f"tool_choice.type is {shown(kind)}: it must be auto, any, tool or none")
    return words[kind], parallel


MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
# fmt: off
KNOWN = frozenset({
    "messages", "model", "max_tokens", "system", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
    "metadata", "service_tier", "output_config", "output_format", "chat_template_kwargs", "documents",
    *THINKING_FIELDS, *PARAMETERS, *COMMON_FIELDS,
})
# fmt: on
BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code's first system block, with a digest that differs between conversations and requests. It would keep
prompts from sharing cached blocks."""
EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts as the nearest of low, medium and high, which chat templates know."""


@dataclass(frozen=True)
class MessageBody:
    """The contents of a body: a conversation and how it is answered."""

    conversation: ChatBody
    params: SamplingParams
    common: CommonFields
    stream: bool


def read_message(body: Mapping[str, Any], strip_billing_header: bool) -> MessageBody:
    """Checks a body of MESSAGES. Raises HttpError, InvalidRequest or InvalidParameter."""
    body = in_own_words(body, KNOWN)
    if body.get("max_tokens") is None:
        raise HttpError(400, "max_tokens is missing: say how many tokens the answer may have", param="max_tokens")
    values = {name: body[name] for name in PARAMETERS if body.get(name) is not None}
    if body.get("stop_sequences") is not None:
        values["stop"] = body["stop_sequences"]
    schema = _schema_of(body)
    if schema is not None:
        values["structured"] = {"json": schema}
    conversation = read_conversation(body, strip_billing_header)
    params = sampling_params(SamplingParams(), values)
    return MessageBody(conversation, params, read_common(body), typed(body, "stream", bool, False))


def read_conversation(body: Mapping[str, Any], strip_billing_header: bool) -> ChatBody:
    """Reads the fields that both routes share. Raises HttpError or InvalidRequest."""
    system, given = body.get("system"), typed(body, "messages", list, [])
    if not given:
        raise HttpError(400, "messages is missing: it must be a list of one message or more", param="messages")
    instructions = "" if system is None else text(system)
    if strip_billing_header and instructions.startswith(BILLING_HEADER):
        instructions = instructions.partition("\n")[2]
    converted = [{"role": "system", "content": instructions}] if instructions else []
    for number, message in enumerate(given):
        converted += chat_messages(message, f"messages[{number}]")
    tools = typed(body, "tools", list, [])
    choice, parallel = chat_tool_choice(typed(body, "tool_choice", dict, {}), tools)
    use = read_tools(chat_tools(tools), choice, parallel)
    _check_thinking(typed(body, "thinking", dict, {}))
    fields = read_thinking(body)
    if not fields.include:
        message = (
            "include_reasoning or reasoning.exclude hides thinking, which this API always shows: leave it out, or "
        )
        raise HttpError(400, f"{message}send thinking of type disabled", param="include_reasoning")
    variables = {**_effort_of(body), **template_variables(body)}
    options = PromptOptions(thinking_budget=fields.budget, variables=variables)
    return ChatBody(plain_messages(converted), use, options)


def _effort_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `output_config.effort` as a template variable. Raises HttpError."""
    effort = typed(body, "output_config", dict, {}).get("effort")
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise HttpError(400, f"output_config.effort is {shown(effort)}: it must be a text", param="output_config")
    return {"reasoning_effort": EFFORTS.get(effort, effort)}


def _schema_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the schema of the answer, None if it need not be JSON. Raises HttpError."""
    asked = typed(body, "output_config", dict, {}).get("format")
    asked = typed(body, "output_format", dict, None) if asked is None else asked
    if asked is None:
        return None
    schema = asked.get("schema") if isinstance(asked, dict) and asked.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        message = f"the format of output_config is {shown(asked)}: it must be of type json_schema, with a schema"
        raise HttpError(400, message, param="output_config")
    if body.get("structured") is not None:
        raise HttpError(400, "output_config has a format, and structured is set: give one of them", param="structured")
    return schema


def _check_thinking(thinking: Mapping[str, Any]) -> None:
    """Refuses a `thinking` that Anthropic would refuse. Raises HttpError."""
    kind = thinking.get("type")
    if thinking and kind not in ("enabled", "disabled", "adaptive"):
        message = f"thinking.type is {shown(kind)}: it must be enabled, adaptive or disabled"
        raise HttpError(400, message, param="thinking")
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        message = f"thinking.budget_tokens is {shown(budget)}: it must be a number of tokens, 1 or more"
        raise HttpError(400, message, param="thinking")


def _stop_reason(answer: CompletionOutput, message: Message, most_tokens: int | None) -> dict[str, Any]:
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reason = "tool_use" if message.tool_calls else "end_turn"
    if answer.finish_reason == "length":
        is_asked = most_tokens is not None and len(answer.token_ids) >= most_tokens
        reason = "max_tokens" if is_asked else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Returns Anthropic's usage, in which cached tokens are no input tokens."""
    counts = cached_counts([output])
    return {
        "input_tokens": len(output.prompt_token_ids) - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.pop("cached_tokens"),
        **counts,
        "output_tokens": len(output.outputs[0].token_ids),
    }


def message_answer(output: RequestOutput, chat: ChatRequest, model: str) -> dict[str, Any]:
    """Returns a whole answer."""
    answer = output.outputs[0]
    message = chat.message(answer.text)
    return {
        "id": named(f"msg_{uuid.uuid4().hex}"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks(message),
        **_stop_reason(answer, message, chat.params.max_tokens),
        "usage": _usage(output),
    }


async def message_events(
    output: RequestOutput, chat: ChatRequest, model: str, news: AsyncIterable[None]
) -> AsyncIterator[object]:
    """Yields the events of an answer as it grows: each a name and its content."""
    answer = output.outputs[0]
    reader = chat.reader()
    growing = BlockEvents()
    begun = False
    async for _ in news:
        if not begun:
            begun = True
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield "message_start", {"type": "message_start", "message": message_answer(output, chat, model) | nothing}
            yield "ping", {"type": "ping"}
        for event in growing.add(reader.read(answer.text, answer.finish_reason is not None)):
            yield event
    for event in growing.end():
        yield event
    delta = _stop_reason(answer, reader.message, chat.params.max_tokens)
    yield "message_delta", {"type": "message_delta", "delta": delta, "usage": _usage(output)}
    yield "message_stop", {"type": "message_stop"}


def models_page(names: Mapping[str, object], created: int) -> dict[str, Any]:
    """Returns Anthropic's list of models on one page; `names` maps each to the tokens of its context, if known."""
    entries = [model_entry(name, most, created) for name, most in names.items()]
    return {"data": entries, "has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}


def model_entry(name: str, most_tokens: object, created: int) -> dict[str, Any]:
    """Returns one model in Anthropic's format."""
    since = datetime.datetime.fromtimestamp(created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    sizes = {} if most_tokens is None else {"max_input_tokens": most_tokens, "max_tokens": most_tokens}
    return {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active", **sizes}
