"""Conversations as LLM and AsyncLLM take them, and messages that grow with the text of an answer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from kvern.engine.inputs import ONE_INPUT, InputProcessor, Messages, Prompt
from kvern.errors import InvalidParameter, InvalidRequest, shown
from kvern.images.parts import held_by
from kvern.request.other_names import fields_of
from kvern.request.outputs import RequestOutput
from kvern.request.request import PromptInput
from kvern.request.sampling_params import SamplingParams, params_of
from kvern.text.content import kind_of
from kvern.tools.chat import AnswerReader, Chat, ChatRequest, PromptOptions
from kvern.tools.checks import read_tools
from kvern.tools.encoding import ROOM_FOR_ANSWER, Encoding

Tools = Sequence[Mapping[str, Any]] | None
OneParams = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters, as a mapping too: {"temperature": 0}."""
Params = OneParams | Sequence[OneParams]
Prompts = Prompt | Mapping[str, Any] | Sequence[Prompt | Mapping[str, Any]]
"""One prompt or several; as vLLM has them, too: {"prompt": TEXT} or {"prompt_token_ids": IDS}, with images at their
placeholders by {"multi_modal_data": {"image": IMAGE or IMAGES}}. A model that embeds images takes {"image": IMAGE}."""
AdapterChoice = str | Sequence[str | None] | None


class ChatOptions(TypedDict, total=False):
    """Options of `chat` and `stream_chat`."""

    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    thinking_budget: int | None
    """Most tokens of thinking."""
    variables: Mapping[str, Any] | None
    """Further variables of the chat template."""
    add_generation_prompt: bool
    """The prompt ends with the header of a new answer, which is the default."""
    continue_final_message: bool
    """The answer continues the last message."""


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


def as_prompts(prompts: Prompts, inputs: InputProcessor) -> list[Prompt]:
    """One prompt or several, as several. Raises InvalidRequest."""
    if isinstance(prompts, Mapping):
        return [_named_prompt(prompts, inputs, "the prompt")]
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    items = [
        _named_prompt(item, inputs, f"prompt {number}") if isinstance(item, Mapping) else item
        for number, item in enumerate(prompts)
    ]
    if not items:
        raise InvalidRequest("the prompt is empty: it needs at least one token")
    if all(isinstance(item, int) for item in items):
        return [cast("Sequence[int]", items)]
    return cast("list[Prompt]", items)


def _named_prompt(prompt: Mapping[str, Any], inputs: InputProcessor, place: str) -> Prompt:
    """The prompt in a mapping as vLLM has it, or in one like a part of a message: an image alone, or a text."""
    found = {name: value for name, value in prompt.items() if value is not None}
    if kind_of(prompt) == "image" or held_by(prompt) is not None:
        if "text" in found or "prompt" in found:
            raise InvalidRequest(f"{place} has a text and an image: {ONE_INPUT}")
        return inputs.picture(prompt, place)
    if found.keys() - {"type"} == {"text"} and isinstance(found["text"], str):
        return found["text"]
    media = found.pop("multi_modal_data", None)
    if found.keys() not in ({"prompt"}, {"prompt_token_ids"}):
        raise InvalidRequest(f"a prompt has {', '.join(found) or 'nothing'}: give prompt or prompt_token_ids alone")
    text = cast("str | list[int]", next(iter(found.values())))
    return inputs.with_images(text, media) if media else text


def cut_prompts(prompts: Sequence[Prompt], most: int | None, inputs: InputProcessor, ends: bool = True) -> list[Prompt]:
    """Prompts of `most` tokens, of which the last ones stay, or the first if not `ends`; -1: what the context holds.

    Raises InvalidParameter.
    """
    if most is None:
        return list(prompts)
    if type(most) is not int or (most < 1 and most != ROOM_FOR_ANSWER):
        raise InvalidParameter(f"truncate_prompt_tokens is {shown(most)}: it must be at least 1, or -1 for what fits")
    encoding, longest = Encoding(True, most, ends, keeps_special=not ends), inputs.max_model_len
    if not ends:  # nothing follows
        encoding = encoding.within(longest - (not inputs.model.is_encoder))
    return [
        encoding.encode(inputs.tokenizer, prompt, longest, None)
        if isinstance(prompt, str)
        else prompt
        if isinstance(prompt, PromptInput)
        else encoding.cut(list(prompt), longest, None)
        for prompt in prompts
    ]


def beam_params(params: OneParams, prompts: int) -> list[SamplingParams]:
    """The parameters of a beam search, whose answers are all its beams. Raises InvalidParameter."""
    found = as_params(params)
    if found is None or found.beam_width is None:
        raise InvalidParameter("beam_search needs beam_width, such as {'beam_width': 4, 'max_tokens': 64}")
    return [found.replace(n=found.beam_width)] * prompts


def one_for_each(params: Params, count: int) -> list[SamplingParams | None]:
    """One SamplingParams for each of `count` prompts. Raises InvalidParameter, or InvalidRequest for another number."""
    if not isinstance(params, Sequence):
        return [as_params(params)] * count
    if len(params) != count:
        raise InvalidRequest(f"there are {count} prompts and {len(params)} sampling parameters: give one, or one each")
    return [as_params(each) for each in params]


def as_params(params: OneParams) -> SamplingParams | None:
    """The sampling parameters of a mapping, or of another library's object. Raises InvalidParameter, which names the
    nearest parameter."""
    if params is None or isinstance(params, SamplingParams):
        return params
    fields = fields_of(params)
    if not isinstance(fields, Mapping):
        raise InvalidParameter(f"sampling_params is {shown(params)}: give SamplingParams, or a mapping of its fields")
    return params_of(fields)


def one_adapter_for_each(adapter: AdapterChoice, count: int) -> list[str | None]:
    """One adapter's name for each of `count` prompts."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise InvalidRequest(f"there are {count} prompts and {len(adapter)} adapters: give one, or one each")
    return list(adapter)
