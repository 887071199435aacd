"""OpenAI's /v1/completions and /v1/chat/completions: from a body to prompts and parameters, from outputs to answers."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvern.batch.openai_format import (
    CHAT,
    COMPLETIONS,
    ONLY_VALUES,
    OWN_FIELDS,
    WITHOUT_EFFECT,
    chat_choice,
    chat_logprobs,
    parameters,
    text_choice,
    text_logprobs,
)
from kvern.batch.requests import sampling_params
from kvern.engine.client import EngineClient, Generation
from kvern.engine.inputs import Prompt
from kvern.engine.output import CompletionOutput, RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.server.responses import HttpError

COMPLETION_TOKENS = 16
"""OpenAI's default length of /v1/completions."""
MAX_PROMPTS = 256
STREAMING = {"stream", "stream_options", "echo", "priority"}


@dataclass
class Call:
    """One request of either route. `ignored` are fields of its body that mean nothing here."""

    url: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    ignored: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT


async def read_call(body: dict[str, Any], url: str, client: EngineClient, models: Sequence[str]) -> Call:
    """Check a body. Raises HttpError, InvalidRequest or InvalidParameter."""
    extra = body.pop("extra_body", None)
    if isinstance(extra, dict):
        body = {**extra, **body}
    model = body.get("model") or models[0]
    if model not in models:
        message = f"there is no model {model!r:.100}: this server has {', '.join(models)}"
        raise HttpError(404, message, param="model", code="model_not_found")
    for name, values in ONLY_VALUES.items():
        if name in body and name not in STREAMING and body[name] not in values:
            raise HttpError(400, f"{name} is {body[name]!r:.60}: this server does not do that", param=name)
    defaults = SamplingParams(max_tokens=COMPLETION_TOKENS) if url == COMPLETIONS else SamplingParams()
    known = WITHOUT_EFFECT | OWN_FIELDS | STREAMING | set(ONLY_VALUES) | set(SamplingParams.__struct_fields__)
    call = Call(
        url,
        model,
        await read_prompts(body, url, client),
        sampling_params(defaults, parameters(body, url)),
        priority=typed(body, "priority", int, 0),
        stream=typed(body, "stream", bool, False),
        include_usage=bool(typed(body, "stream_options", dict, {}).get("include_usage")),
        echo=url == COMPLETIONS and typed(body, "echo", bool, False),
        ignored=sorted(set(body) - known),
    )
    if call.echo and call.params.logprobs is not None:
        raise HttpError(400, "echo is true and logprobs is set: ask for one of them", param="echo")
    return call


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field of this type, or the default if it is missing or null. Raises HttpError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise HttpError(400, f"{name} is {value!r:.60}: it must be of type {kind.__name__}", param=name)
    return value


async def read_prompts(body: Mapping[str, Any], url: str, client: EngineClient) -> list[Prompt]:
    """The prompts of a body: one text or list of token ids, or several; or one conversation."""
    if url == CHAT:
        messages = typed(body, "messages", list, [])
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise HttpError(400, "messages must be a list of one message or more, each an object", param="messages")
        tools = typed(body, "tools", list, None) if body.get("tool_choice") != "none" else None
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return [await client.chat_prompt(messages, tools)]
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise HttpError(400, f"prompt holds {len(prompt)} prompts: at most {MAX_PROMPTS}", param="prompt")
        return list(prompt)
    raise HttpError(
        400, f"prompt is {prompt!r:.60}: it must be a text, a list of token ids, or a list of these", param="prompt"
    )


async def submit(call: Call, client: EngineClient, news: asyncio.Event) -> list[Generation]:
    """Hand all prompts to the engine, or none. Raises InvalidRequest, InvalidParameter or EngineDied."""
    generations: list[Generation] = []
    try:
        for prompt in call.prompts:
            generation = await client.submit(prompt, call.params, news=news, priority=call.priority)
            generations.append(generation)
    except BaseException:
        client.abort(generations)
        raise
    return generations


async def answer(call: Call, client: EngineClient) -> dict[str, Any]:
    """Generate all, then answer at once."""
    news = asyncio.Event()
    generations = await submit(call, client, news)
    async for _ in client.follow(generations, news):
        pass
    outputs = [generation.output for generation in generations]
    make = chat_choice if call.is_chat else text_choice
    choices = []
    for number, output in enumerate(outputs):
        for item in output.outputs:
            choice = make(item)
            choice["index"] = number * call.params.n + item.index
            if call.echo:
                choice["text"] = echoed(output, client) + choice["text"]
            choices.append(choice)
    kind = "chat.completion" if call.is_chat else "text_completion"
    return {**envelope(call, kind), "choices": choices, "usage": usage(outputs)}


async def events(
    call: Call, client: EngineClient, generations: list[Generation], news: asyncio.Event
) -> AsyncIterator[object]:
    """The chunks of a stream: what is new since the last, and the usage if it was asked for."""
    outputs = [generation.output for generation in generations]
    kind = "chat.completion.chunk" if call.is_chat else "text_completion"
    parts = [
        Part(item, number * call.params.n + item.index, call.is_chat, echoed(output, client) if call.echo else "")
        for number, output in enumerate(outputs)
        for item in output.outputs
    ]
    head = envelope(call, kind)
    if call.include_usage:
        head["usage"] = None
    async for _ in client.follow(generations, news):
        for part in parts:
            choice = part.news()
            if choice is not None:
                yield {**head, "choices": [choice]}
    if call.include_usage:
        yield {**head, "choices": [], "usage": usage(outputs)}


class Part:
    """What of one answer has been sent."""

    def __init__(self, answer: CompletionOutput, index: int, chat: bool, echo: str) -> None:
        self._answer, self._index, self._chat, self._echo = answer, index, chat, echo
        self._characters = self._tokens = 0
        self._begun = self._ended = False

    def news(self) -> dict[str, Any] | None:
        """The next chunk's choice; None if nothing is new."""
        answer = self._answer
        if self._ended or (len(answer.token_ids) == self._tokens and answer.finish_reason is None):
            return None
        text = answer.text[self._characters :]
        choice: dict[str, Any] = {"index": self._index}
        if self._chat:
            choice["delta"] = {"content": text} if self._begun else {"role": "assistant", "content": text}
        else:
            choice["text"] = text if self._begun else self._echo + text
        new = CompletionOutput(self._index, token_ids=answer.token_ids[self._tokens :])
        new.logprobs = None if answer.logprobs is None else answer.logprobs[self._tokens :]
        choice["logprobs"] = (chat_logprobs if self._chat else text_logprobs)(new)
        choice["finish_reason"] = answer.finish_reason
        self._characters, self._tokens = len(answer.text), len(answer.token_ids)
        self._begun, self._ended = True, answer.finish_reason is not None
        return choice


def envelope(call: Call, kind: str) -> dict[str, Any]:
    """What every answer and chunk begins with."""
    prefix = "chatcmpl" if call.is_chat else "cmpl"
    return {"id": f"{prefix}-{call.identity}", "object": kind, "created": call.created, "model": call.model}


def echoed(output: RequestOutput, client: EngineClient) -> str:
    """The prompt as text."""
    return output.prompt if output.prompt is not None else client.tokenizer.decode(output.prompt_token_ids)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts and answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(item.token_ids) for output in outputs for item in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
    }
