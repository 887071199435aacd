"""Conversations as LLM and AsyncLLM take them, and messages that grow with the text of an answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvern.engine.inputs import Messages
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import SamplingParams
from kvern.tools.chat import AnswerReader, Chat, ChatRequest, PromptOptions
from kvern.tools.definitions import read_tools

Tools = Sequence[Mapping[str, Any]] | None


def chat_request(
    chat: Chat,
    messages: Messages,
    params: SamplingParams | None,
    tools: Tools,
    *,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
    **options: Any,
) -> ChatRequest:
    """Make a request of a conversation, with the options of `LLM.chat`. Raises InvalidRequest."""
    use = read_tools(tools, tool_choice, parallel_tool_calls)
    return chat.request(messages, params or SamplingParams(), use, PromptOptions(**options))


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
