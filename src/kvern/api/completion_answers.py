"""Answers of OpenAI's /v1/chat/completions and /v1/completions, whole or as chunks."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

from kvern.api.choices import StreamedChoice, choice_of, completion_details, prompt_logprobs
from kvern.api.completions import AnswerOptions
from kvern.api.text_logprobs import TextOffsets, text_logprobs, token_name
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest
from kvern.version import __version__

FINGERPRINT = f"kvern-{__version__}"
"""Answers with the same seed are the same under one fingerprint, model and options."""


class CompletionWriter:
    """Writes the answers to one body; `chat` reads answers to a conversation."""

    def __init__(self, options: AnswerOptions, model: str, tokenizer: Tokenizer, chat: ChatRequest | None) -> None:
        self._options = options
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat
        self._created, self._identity = int(time.time()), options.request_id or uuid.uuid4().hex

    @property
    def lacks(self) -> tuple[str, ...]:
        """`ChatRequest.lacks`."""
        return () if self._chat is None else self._chat.lacks

    @property
    def is_large(self) -> bool:
        """An answer may have many log-probabilities."""
        return self._options.logprobs is not None or self._options.prompt_logprobs

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns all answers and frees their log-probabilities."""
        options = self._options
        choices = []
        for number, output in enumerate(outputs):
            for index, item in enumerate(best(output.outputs, options.answers)):
                start = len(self._prompt(output)) if options.echo else 0
                choice = choice_of(item, self._chat, options, self._tokenizer, start)
                choice["index"] = number * options.answers + index
                if options.echo:
                    self._echo(choice, output)
                if not options.is_chat:
                    choice |= of_prompt(output, options)
                choices.append(choice)
        head = self._head("chat.completion" if options.is_chat else "text_completion")
        head |= of_prompt(outputs[0], options) if options.is_chat else {}
        for output in outputs:
            output.forget_logprobs()
        counts = usage(outputs, 0 if options.prompt_only else None) | details(outputs, self._chat)
        return {**head, **self._server, "choices": choices, "usage": counts}

    async def chunks(
        self, outputs: Sequence[RequestOutput], news: AsyncIterable[None], interval: int
    ) -> AsyncIterator[object]:
        """Yields a chunk whenever `interval` tokens are new, then the usage if the request wants it."""
        options = self._options
        interval = max(interval, options.stream_interval)
        how = self._chat, options, self._tokenizer
        parts = [
            (output, StreamedChoice(item, number * options.answers + item.index, *how, prefix))
            for number, output in enumerate(outputs)
            for prefix in [self._prompt(output) if options.echo else options.prefix]
            for item in output.outputs
        ]
        head = self._head("chat.completion.chunk" if options.is_chat else "text_completion")
        if options.include_usage:
            head["usage"] = None
        shown: set[str] = set()
        async for _ in news:
            for output, part in parts:
                while part.write_some():
                    await asyncio.sleep(0)
                choice = part.news(interval)
                if choice is None:
                    continue
                chunk = {**head, "choices": [choice]}
                if options.token_ids and output.request_id not in shown:
                    shown.add(output.request_id)
                    (chunk if options.is_chat else choice)["prompt_token_ids"] = output.prompt_token_ids
                if options.continuous_usage:
                    chunk["usage"] = usage([output], part.tokens) | part.details
                if choice["finish_reason"] is not None:
                    chunk |= self._server
                yield chunk
        if options.include_usage:
            yield {**head, **self._server, "choices": [], "usage": usage(outputs) | details(outputs, self._chat)}

    def _head(self, kind: str) -> dict[str, Any]:
        """Returns the first fields of every answer and chunk."""
        prefix = "chatcmpl" if self._options.is_chat else "cmpl"
        return {"id": f"{prefix}-{self._identity}", "object": kind, "created": self._created, "model": self._model}

    @property
    def _server(self) -> dict[str, Any]:
        """Fields that describe the server, for whole answers and the last chunk of a choice."""
        tier = {"service_tier": "default"} if self._options.service_tier else {}
        return {"system_fingerprint": FINGERPRINT, **tier}

    def _prompt(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._tokenizer.decode(output.prompt_token_ids)

    def _echo(self, choice: dict[str, Any], output: RequestOutput) -> None:
        """Puts the prompt before the answer, and the prompt's log-probabilities before the answer's."""
        prompt_only = self._options.prompt_only
        choice["text"] = self._prompt(output) + ("" if prompt_only else choice["text"])
        if choice["logprobs"] is None:
            return
        tables, text = output.prompt_logprobs or [], self._prompt(output)
        without = tables.count(None)
        prompt = CompletionOutput(0, token_ids=output.prompt_token_ids[without:])
        prompt.logprobs = [table for table in tables if table is not None]
        offsets, first = TextOffsets(self._tokenizer, self._options, text=text), output.prompt_token_ids[:without]
        start: dict[str, list[Any]] = {
            "tokens": [token_name(token, self._options, self._tokenizer) for token in first],
            "token_logprobs": [None] * without,
            "top_logprobs": [None] * without,
            "text_offset": offsets.of(first),
        }
        before = text_logprobs(prompt, self._options, self._tokenizer, offsets)
        assert before is not None
        choice["logprobs"] = {
            name: start[name] + before[name] + ([] if prompt_only else values)
            for name, values in choice["logprobs"].items()
        }


def best(answers: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """Returns the `count` answers with the highest mean log-probability of their tokens."""
    if len(answers) == count:
        return answers
    return sorted(answers, key=lambda item: -(item.cumulative_logprob or 0.0) / max(len(item.token_ids), 1))[:count]


def of_prompt(output: RequestOutput, options: AnswerOptions) -> dict[str, Any]:
    """Returns what the request wants of the prompt: in the answer to a conversation, in each choice for texts."""
    found: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if options.token_ids else {}
    return found | ({"prompt_logprobs": prompt_logprobs(output)} if options.prompt_logprobs else {})


def usage(outputs: Sequence[RequestOutput], generated: int | None = None) -> dict[str, Any]:
    """Counts the tokens of all prompts and answers, and of prompts that came from the cache."""
    cached = sum(output.cached_tokens for output in outputs)
    return {**token_counts(outputs, generated), "prompt_tokens_details": {"cached_tokens": cached}}


def details(outputs: Sequence[RequestOutput], chat: ChatRequest | None) -> dict[str, Any]:
    """Returns the part of the usage that counts kinds of tokens in all answers to a conversation."""
    if chat is None:
        return {}
    answers = [item for output in outputs for item in output.outputs]
    return completion_details(sum(chat.reasoning_tokens(item.token_ids) for item in answers), answers)


def token_counts(outputs: Sequence[RequestOutput], generated: int | None = None) -> dict[str, Any]:
    """Counts the tokens of all prompts and answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    if generated is None:
        generated = sum(len(item.token_ids) for output in outputs for item in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
