"""The conversation in a body of /v1/chat/completions: messages, tools, thinking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvern.api.chat_fields import SWITCHES, read_thinking
from kvern.api.fields import typed
from kvern.errors import InvalidRequest, shown
from kvern.io.json_lines import is_too_much
from kvern.text.content import MessageContent, content_of
from kvern.text.message_forms import arguments_of
from kvern.tools.chat import DEFAULT_PROMPT, PromptOptions
from kvern.tools.definitions import NO_TOOLS, ToolUse
from kvern.tools.encoding import Encoding
from kvern.tools.thinking import REASONING

if TYPE_CHECKING:
    from kvern.request.outputs import CompletionOutput
    from kvern.request.pieces import Message, ToolCall


RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class ChatBody:
    """A conversation, the options of its prompt, and whether clients see what the model thinks."""

    messages: list[dict[str, Any]]
    use: ToolUse = NO_TOOLS
    options: PromptOptions = DEFAULT_PROMPT
    include_reasoning: bool = True
    custom_tools: frozenset[str] = frozenset()
    """The names of tools whose calls are shown as texts."""


def read_chat_body(body: Mapping[str, Any], encoding: Encoding | None = None) -> ChatBody:
    """Checks the conversation of a body. Raises HttpError or InvalidRequest that names the wrong place."""
    thinking = read_thinking(body)
    continued = typed(body, "continue_final_message", bool, False)
    messages = plain_messages(body.get("messages"))
    use, custom = chat_tools(body)
    options = PromptOptions(
        thinking_budget=thinking.budget,
        variables=template_variables(body),
        add_generation_prompt=typed(body, "add_generation_prompt", bool, not continued),
        continue_final_message=continued,
        encoding=encoding,
    )
    return ChatBody(messages, use, options, thinking.include, custom)


def chat_tools(body: Mapping[str, Any]) -> tuple[ToolUse, frozenset[str]]:
    """Returns the tools of a body, and the names of custom ones. Modules that read them are imported for the first.

    Raises InvalidRequest.
    """
    tools, choice, parallel = (body.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls"))
    if tools is choice is parallel is None:
        return NO_TOOLS, frozenset()
    from kvern.api.custom_tools import as_functions
    from kvern.tools.checks import read_tools

    tools, choice, custom = as_functions(tools, choice)
    return read_tools(tools, choice, parallel), custom


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template variables of a body: thinking, `documents` and `chat_template_kwargs`.

    Raises HttpError or InvalidRequest.
    """
    given, documents = body.get("chat_template_kwargs"), typed(body, "documents", list, None)
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest(f"chat_template_kwargs is {shown(given)}: it must be an object")
    taken = sorted(RESERVED & set(given or ()))
    if taken:
        raise InvalidRequest(f"chat_template_kwargs holds {taken[0]}, which has a field of its own: leave it out")
    wrong = next((document for document in documents or () if not isinstance(document, dict)), None)
    if wrong is not None:
        raise InvalidRequest(f"documents holds {shown(wrong)}: each must be an object")
    named = {} if documents is None else {"documents": documents}
    thinking = read_thinking(body).variables
    if any(name in (given or {}) for name in SWITCHES):
        thinking = {name: value for name, value in thinking.items() if name not in SWITCHES}
    return {**thinking, **named, **(given or {})}


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Returns messages in OpenAI's format as templates expect them. Raises InvalidRequest."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages must be a list of one message or more, each an object")
    if is_too_much("".join(_arguments(messages)).encode(errors="replace")):
        raise InvalidRequest("messages: the arguments of all tool_calls hold more values than fit in one request")
    return [_plain_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the JSON texts of all calls."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield function["arguments"]


def _plain_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns a message without nulls, with the newer name of the developer's role, content as `content_of` makes it,
    and arguments as objects."""
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if isinstance(plain.get("content"), list):
        plain["content"] = parts_of(plain["content"], place=f"{place}.content")
    if plain.get("role") == "tool" and not (isinstance(plain.get("tool_call_id"), str) and plain["tool_call_id"]):
        raise InvalidRequest(f"{place}.tool_call_id is missing: the result of a tool needs the id of the call")
    if plain.get("role") == "assistant":
        _name_reasoning(plain)
    calls = plain.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{place}.tool_calls is {shown(calls)}: it must be a list")
        plain["tool_calls"] = [plain_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
        if not calls:
            del plain["tool_calls"]
    if plain.get("function_call") is not None:
        raise InvalidRequest(f"{place}.function_call is OpenAI's older name of a call: send it in tool_calls")
    plain.setdefault("content", plain["refusal"] if isinstance(plain.get("refusal"), str) else "")
    return plain


def _name_reasoning(message: dict[str, Any]) -> None:
    """Puts the reasoning of an assistant's message under every name that a template may read."""
    found = [message.pop(name, None) for name in REASONING]
    thought = next((text for text in found if isinstance(text, str) and text), None)
    if thought is not None:
        message |= dict.fromkeys(REASONING, thought)
    message.pop("reasoning_details", None)


def plain_call(call: object, place: str) -> dict[str, Any]:
    """Returns a call whose arguments, a JSON text in OpenAI's format, are an object. Raises InvalidRequest."""
    if isinstance(call, dict) and call.get("type") == "custom":
        from kvern.api.custom_tools import as_function_call

        return as_function_call(call, place)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place} is {shown(call)}: it must be an object with a function that has a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    if not isinstance(arguments, dict | None):
        raise InvalidRequest(f"{place}.function.arguments is {shown(arguments)}: it must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def parts_of(
    parts: Sequence[Any], place: str = "messages", note: Callable[[Any], str | None] = lambda part: None
) -> MessageContent:
    """Returns the content of a message that comes in parts. Raises InvalidRequest for parts of unknown types."""
    return content_of(parts, _text_of_part, lambda part: _refusal(part, TEXT_PARTS, place), note)


def text_of(parts: Sequence[Any], kinds: Sequence[str]) -> str:
    """Returns the text of parts that may be nothing else. Raises InvalidRequest."""
    texts = []
    for part in parts:
        text = _text_of_part(part, kinds)
        if text is None:
            raise InvalidRequest(_refusal(part, kinds, "messages"))
        texts.append(text)
    return "\n".join(texts)


def _text_of_part(part: object, kinds: Sequence[str] = TEXT_PARTS) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    return text if isinstance(text, str) and (kind == "refusal" or kind in kinds) else None


def _refusal(part: object, kinds: Sequence[str], place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    return f"{place}: a content part is of type {shown(kind)}: this model takes text ({', '.join(kinds)}) only"


def finish_reason(completion: CompletionOutput, message: Message) -> str | None:
    """Returns OpenAI's word for why an answer ended."""
    return "tool_calls" if message.tool_calls and completion.finish_reason == "stop" else completion.finish_reason


def assistant_message(
    message: Message, include_reasoning: bool, prefix: str = "", custom: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Returns the answer in OpenAI's format, after a `prefix`; calls of `custom` tools are texts. The content is null
    if there are only calls."""
    content = prefix + message.content
    shown: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning and include_reasoning:
        shown |= reasoning_fields(message.reasoning)
    if message.tool_calls:
        shown["content"] = content or None
        shown["tool_calls"] = [tool_call(call, call.name in custom) for call in message.tool_calls]
    return shown


def reasoning_fields(text: str) -> dict[str, str]:
    """Returns the reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def tool_call(call: ToolCall, is_custom: bool) -> dict[str, Any]:
    """Returns a call in OpenAI's format."""
    if is_custom:
        from kvern.api.custom_tools import input_of

        return {"id": call.call_id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
