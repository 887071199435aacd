"""What a body of /v1/chat/completions says beside the sampling: messages, tools, thinking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.errors import InvalidRequest, shown
from kvern.json_work import is_too_much
from kvern.tools.definitions import NO_TOOLS, ToolUse, read_tools

if TYPE_CHECKING:
    from kvern.outputs import CompletionOutput
    from kvern.tools.pieces import Message, ToolCall

CHAT_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "thinking_budget",
        "include_reasoning",
        "reasoning_effort",
        "chat_template_kwargs",
    }
)
RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class ChatBody:
    """A conversation and how it is to be answered. `variables` are for the chat template."""

    messages: list[dict[str, Any]]
    use: ToolUse = NO_TOOLS
    thinking_budget: int | None = None
    include_reasoning: bool = True
    variables: dict[str, Any] = field(default_factory=dict)


def read_chat_body(body: Mapping[str, Any]) -> ChatBody:
    """Check all of it. Raises InvalidRequest with the place of what is wrong."""
    include = body.get("include_reasoning")
    if include is not None and not isinstance(include, bool):
        raise InvalidRequest(f"include_reasoning is {shown(include)}: it must be true or false")
    return ChatBody(
        plain_messages(body.get("messages")),
        read_tools(body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls")),
        body.get("thinking_budget"),
        include is not False,
        template_variables(body),
    )


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` and `reasoning_effort` as names that a template can see. Raises InvalidRequest."""
    given, effort = body.get("chat_template_kwargs"), body.get("reasoning_effort")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest(f"chat_template_kwargs is {shown(given)}: it must be an object")
    taken = sorted(RESERVED & set(given or ()))
    if taken:
        raise InvalidRequest(f"chat_template_kwargs holds {taken[0]}, which has a field of its own: leave it out")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest(f"reasoning_effort is {shown(effort)}: it must be a text")
    effort_says = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**effort_says, **(given or {})}


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Messages in OpenAI's form as templates expect them. Raises InvalidRequest."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages must be a list of one message or more, each an object")
    if is_too_much("".join(_arguments(messages)).encode(errors="replace")):
        raise InvalidRequest("messages: the arguments of all tool_calls hold more values than fit in one request")
    return [_plain_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The JSON texts of all calls."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield function["arguments"]


def _plain_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """No nulls, the older name of the developer's role, content as one text, arguments as objects."""
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if isinstance(plain.get("content"), list):
        plain["content"] = text_of(plain["content"])
    if plain.get("role") == "tool" and not (isinstance(plain.get("tool_call_id"), str) and plain["tool_call_id"]):
        raise InvalidRequest(f"{place}.tool_call_id is missing: the result of a tool needs the id of the call")
    calls = plain.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{place}.tool_calls is {shown(calls)}: it must be a list")
        plain["tool_calls"] = [plain_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
        if not calls:
            del plain["tool_calls"]
        plain.setdefault("content", "")
    return plain


def plain_call(call: object, place: str) -> dict[str, Any]:
    """A call whose arguments, a JSON text in OpenAI's form, are an object. Raises InvalidRequest."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place} is {shown(call)}: it must be an object with a function that has a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{place}.function.arguments is not valid JSON: {error}") from error
    if not isinstance(arguments, dict | None):
        raise InvalidRequest(f"{place}.function.arguments is {shown(arguments)}: it must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def text_of(parts: Sequence[Any], kinds: Sequence[str] = TEXT_PARTS) -> str:
    """The text of a message that comes in parts. Raises InvalidRequest for parts that are not text."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequest(
                f"messages: a content part is of type {shown(kind)}: this model takes text ({', '.join(kinds)}) only"
            )
    return "\n".join(part["text"] for part in parts)


def finish_reason(completion: CompletionOutput, message: Message) -> str | None:
    """OpenAI's word for why an answer ended."""
    return "tool_calls" if message.tool_calls and completion.finish_reason == "stop" else completion.finish_reason


def assistant_message(message: Message, include_reasoning: bool) -> dict[str, Any]:
    """The answer in OpenAI's form; content is null if there are calls and nothing else."""
    shown: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning and include_reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["content"] = message.content or None
        shown["tool_calls"] = [tool_call(call) for call in message.tool_calls]
    return shown


def tool_call(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
