"""OpenAI's /v1/completions and /v1/chat/completions: from a body to an ask, from outputs to answers and chunks."""

import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvern.batch.chat_body import ChatBody, plain_messages, read_chat_body
from kvern.batch.openai_format import (
    CHAT,
    ONLY_VALUES,
    OWN_FIELDS,
    WITHOUT_EFFECT,
    chat_choice,
    parameters,
    text_choice,
    text_logprobs,
)
from kvern.batch.requests import sampling_params
from kvern.engine.inputs import Prompt
from kvern.errors import shown
from kvern.outputs import CompletionOutput, RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.server.http import HttpError
from kvern.server.keys import ApiKey
from kvern.server.parts import Part
from kvern.server.service import OWN_FIELDS as OWN
from kvern.server.service import Ask, Running, Service, typed
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import read_tools

logger = logging.getLogger("kvern.requests")

COMPLETION_TOKENS = 16
"""OpenAI's default length of /v1/completions."""
MOST_PROMPTS = 256
STREAMING = {"stream", "stream_options", "echo", "best_of"}


@dataclass
class Call:
    """One request of either route. `known` are the fields that mean something."""

    url: str
    model: str
    ask: Ask
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    chat: ChatRequest | None = None
    """How the answers to a conversation are read."""
    include_reasoning: bool = True
    answers: int = 1
    """For each prompt: `n`. The ask has more if `best_of` was given."""
    logprobs: bool = False
    prompt_only: bool = False
    """`max_tokens` is 0: only the echo is wanted."""
    known: frozenset[str] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT


async def read_call(body: dict[str, Any], url: str, service: Service, key: ApiKey) -> Call:
    """Check a body. Raises HttpError, InvalidRequest or InvalidParameter."""
    merge_extra(body)
    model = service.model(body)
    is_chat = url == CHAT
    searching = bool(body.get("use_beam_search"))
    for name, values in ONLY_VALUES.items():
        if searching and name == "best_of":
            continue  # the number of beams
        if name in body and body[name] not in values and (name not in STREAMING or (is_chat and name == "best_of")):
            raise HttpError(400, f"{name} is {shown(body[name])}: this server does not do that", param=name)
    echo = not is_chat and typed(body, "echo", bool, False)
    prompt_only = echo and body.get("max_tokens") == 0
    defaults = SamplingParams() if is_chat else SamplingParams(max_tokens=COMPLETION_TOKENS)
    params = sampling_params(defaults, parameters(body, url) | ({"max_tokens": 1} if prompt_only else {}))
    answers, logprobs = params.n, params.logprobs is not None
    if echo and logprobs:
        params = params.replace(prompt_logprobs=params.logprobs)
    best_of = answers if is_chat or searching else typed(body, "best_of", int, answers)
    stream = typed(body, "stream", bool, False)
    if best_of < answers or (best_of > answers and stream):
        message = f"best_of is {best_of} with n {answers}: it must not be smaller, and a stream cannot choose the best"
        raise HttpError(400, message, param="best_of")
    if best_of > answers:
        params = params.replace(n=best_of, logprobs=params.logprobs or 0)
    if echo and logprobs and stream:
        raise HttpError(400, "echo, logprobs and stream are set: ask for two of them at most", param="echo")
    known = (
        WITHOUT_EFFECT | OWN_FIELDS | STREAMING | set(ONLY_VALUES) | set(SamplingParams.__struct_fields__) | set(OWN)
    )
    chat, include_reasoning = None, True
    if is_chat:
        read = read_chat_body(body)
        chat, include_reasoning = await chat_request(read, params, service, key), read.include_reasoning
        params = chat.params
    prompts = read_prompts(body) if chat is None else [chat.prompt]
    return Call(
        url,
        model,
        service.ask(body, prompts, params, key),
        chat=chat,
        include_reasoning=include_reasoning,
        stream=stream,
        include_usage=bool(typed(body, "stream_options", dict, {}).get("include_usage")),
        echo=echo,
        answers=answers,
        logprobs=logprobs,
        prompt_only=prompt_only,
        known=frozenset(known),
    )


def merge_extra(body: dict[str, Any]) -> None:
    """Let the fields of `extra_body` stand beside the others, which go before."""
    extra = body.pop("extra_body", None)
    if isinstance(extra, dict):
        for name, value in extra.items():
            body.setdefault(name, value)


def read_prompts(body: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a body: one text or list of token ids, or several. Raises HttpError."""
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(first, int)):
        return [prompt]  # whether all of them are ids is looked at outside the event loop
    if isinstance(prompt, list) and isinstance(first, str | list):
        if len(prompt) > MOST_PROMPTS:
            raise HttpError(400, f"prompt holds {len(prompt)} prompts: at most {MOST_PROMPTS}", param="prompt")
        return list(prompt)
    raise HttpError(
        400, f"prompt is {shown(prompt)}: it must be a text, a list of token ids, or a list of these", param="prompt"
    )


async def chat_request(body: ChatBody, params: SamplingParams, service: Service, key: ApiKey) -> ChatRequest:
    """A conversation as prompt, parameters and a reader of its answers. Raises InvalidRequest or InvalidParameter."""
    options: dict[str, Any] = {"thinking_budget": body.thinking_budget, "variables": body.variables}
    return await service.client.chat(body.messages, params, body.use, owner=key.line, **options)


async def conversation(
    messages: object, tools: list[Any] | None, service: Service, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Messages in OpenAI's form as token ids. Raises InvalidRequest."""
    use = read_tools(tools)
    return await service.client.chat_prompt(plain_messages(messages), list(use.definitions) or None, variables)


def answer(call: Call, outputs: Sequence[RequestOutput], service: Service) -> dict[str, Any]:
    """All answers at once."""
    choices = []
    for number, output in enumerate(outputs):
        for index, item in enumerate(best(output.outputs, call.answers)):
            choice = text_choice(item) if call.chat is None else chat_choice(item, call.chat, call.include_reasoning)
            choice["index"] = number * call.answers + index
            if not call.logprobs:
                choice["logprobs"] = None
            if call.echo:
                echo(choice, output, call, service)
            choices.append(choice)
    kind = "chat.completion" if call.is_chat else "text_completion"
    return {**envelope(call, kind), "choices": choices, "usage": usage(outputs, 0 if call.prompt_only else None)}


def log_body(body: Mapping[str, Any], request_id: str) -> None:
    """Write what was asked into the log: only for servers that were told to."""
    logger.info("%s asks %s", request_id, msgspec.json.encode(body).decode())


def best(answers: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The most probable ones, by the mean log-probability of their tokens, if there are more than wanted."""
    if len(answers) == count:
        return answers
    return sorted(answers, key=lambda item: -(item.cumulative_logprob or 0.0) / max(len(item.token_ids), 1))[:count]


def echo(choice: dict[str, Any], output: RequestOutput, call: Call, service: Service) -> None:
    """Put the prompt before the answer, and its log-probabilities before the answer's."""
    choice["text"] = echoed(output, service) + ("" if call.prompt_only else choice["text"])
    if choice["logprobs"] is None:
        return
    tables = output.prompt_logprobs or []
    without = tables.count(None)
    prompt = CompletionOutput(0, token_ids=output.prompt_token_ids[without:])
    prompt.logprobs = [table for table in tables if table is not None]
    before = text_logprobs(prompt)
    assert before is not None
    names = [service.client.tokenizer.id_to_token(token) for token in output.prompt_token_ids[:without]]
    first, nothing = "".join(names), [None] * without
    offsets = list(itertools.accumulate(map(len, names), initial=0))[:-1]
    start = {"tokens": names, "token_logprobs": nothing, "top_logprobs": nothing, "text_offset": offsets}
    merged = {}
    for name, values in choice["logprobs"].items():
        before_it, shift = before[name], 0
        if name == "text_offset":
            before_it = [len(first) + offset for offset in before_it]
            shift = len(first) + sum(map(len, before["tokens"]))
        after = [] if call.prompt_only else [value + shift for value in values] if shift else values
        merged[name] = start[name] + before_it + after
    choice["logprobs"] = merged


async def events(call: Call, running: Running, service: Service) -> AsyncIterator[object]:
    """The chunks of a stream: what is new since the last, and the usage if it was asked for."""
    kind = "chat.completion.chunk" if call.is_chat else "text_completion"
    parts = [
        Part(
            item,
            number * call.answers + item.index,
            None if call.chat is None else call.chat.reader(),
            call.include_reasoning,
            echoed(output, service) if call.echo else "",
        )
        for number, output in enumerate(running.outputs)
        for item in output.outputs
    ]
    head = envelope(call, kind)
    if call.include_usage:
        head["usage"] = None
    async for _ in running:
        for part in parts:
            choice = part.news(service.config.stream_interval)
            if choice is not None:
                yield {**head, "choices": [choice]}
    if call.include_usage:
        yield {**head, "choices": [], "usage": usage(running.outputs)}


def envelope(call: Call, kind: str) -> dict[str, Any]:
    """What every answer and chunk begins with."""
    prefix = "chatcmpl" if call.is_chat else "cmpl"
    return {"id": f"{prefix}-{call.identity}", "object": kind, "created": call.created, "model": call.model}


def echoed(output: RequestOutput, service: Service) -> str:
    """The prompt as text."""
    return output.prompt if output.prompt is not None else service.client.tokenizer.decode(output.prompt_token_ids)


def usage(outputs: Sequence[RequestOutput], generated: int | None = None) -> dict[str, Any]:
    """Tokens of all prompts and answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    if generated is None:
        generated = sum(len(item.token_ids) for output in outputs for item in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
    }
