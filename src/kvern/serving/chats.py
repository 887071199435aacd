"""Conversations as LLM and AsyncLLM take them, and messages that grow with the text of an answer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from kvern.engine.inputs import Messages, Prompt
from kvern.errors import InvalidRequest
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import SamplingParams, params_of
from kvern.tools.chat import AnswerReader, Chat, ChatRequest, PromptOptions
from kvern.tools.checks import read_tools

Tools = Sequence[Mapping[str, Any]] | None
OneParams = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters, as a mapping too: {"temperature": 0}."""
Params = OneParams | Sequence[OneParams]
AdapterChoice = str | Sequence[str | None] | None


def chat_request(
    chat: Chat,
    messages: Messages,
    params: OneParams,
    tools: Tools,
    *,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
    **options: Any,
) -> ChatRequest:
    """Make a request of a conversation, with the options of `LLM.chat`. Raises InvalidRequest."""
    use = read_tools(tools, tool_choice, parallel_tool_calls)
    return chat.request(messages, as_params(params) or SamplingParams(), use, PromptOptions(**options))


def follow(chat: ChatRequest) -> Callable[[RequestOutput], RequestOutput]:
    """Return a function that lets the messages of a growing output grow with its text."""
    readers: dict[int, AnswerReader] = {}

    def grown(output: RequestOutput) -> RequestOutput:
        for answer in output.outputs:
            reader = readers.setdefault(answer.index, chat.reader())
            ended = answer.finish_reason is not None  # before the text, which another thread may let grow and end now
            reader.read(answer.text, ended)
            answer.message = reader.message
        return output

    return grown


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or several, as several."""
    if not messages:
        raise InvalidRequest("the conversation is empty: it needs at least one message")
    return cast("list[Messages]", [messages] if isinstance(messages[0], Mapping) else list(messages))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    if not items:
        raise InvalidRequest("the prompt is empty: it needs at least one token")
    if all(isinstance(item, int) for item in items):
        return [cast("Sequence[int]", items)]
    return cast("list[Prompt]", items)


def one_for_each(params: Params, count: int) -> list[SamplingParams | None]:
    """One SamplingParams for each of `count` prompts. Raises InvalidParameter, or InvalidRequest for another number."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [as_params(params)] * count
    if len(params) != count:
        raise InvalidRequest(f"there are {count} prompts and {len(params)} sampling parameters: give one, or one each")
    return [as_params(each) for each in params]


def as_params(params: OneParams) -> SamplingParams | None:
    """The sampling parameters of a mapping. Raises InvalidParameter, which names the nearest parameter."""
    return params_of(params) if isinstance(params, Mapping) else params


def one_adapter_for_each(adapter: AdapterChoice, count: int) -> list[str | None]:
    """One adapter's name for each of `count` prompts."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise InvalidRequest(f"there are {count} prompts and {len(adapter)} adapters: give one, or one each")
    return list(adapter)
