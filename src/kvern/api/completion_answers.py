"""Answers of OpenAI's /v1/chat/completions and /v1/completions, at once or as chunks."""

import itertools
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

from kvern.api.choices import StreamedChoice, choice_of, text_logprobs
from kvern.api.completions import AnswerOptions
from kvern.outputs import CompletionOutput, RequestOutput
from kvern.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest


class CompletionWriter:
    """Writes the answers to one body; `chat` is how those to a conversation are read."""

    def __init__(self, options: AnswerOptions, model: str, tokenizer: Tokenizer, chat: ChatRequest | None) -> None:
        self._options, self._model, self._tokenizer, self._chat = options, model, tokenizer, chat
        self._created, self._identity = int(time.time()), uuid.uuid4().hex

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All answers at once."""
        options = self._options
        choices = []
        for number, output in enumerate(outputs):
            for index, item in enumerate(best(output.outputs, options.answers)):
                choice = choice_of(item, self._chat, options.include_reasoning)
                choice["index"] = number * options.answers + index
                if not options.logprobs:
                    choice["logprobs"] = None
                if options.echo:
                    self._echo(choice, output)
                choices.append(choice)
        head = self._head("chat.completion" if options.is_chat else "text_completion")
        return {**head, "choices": choices, "usage": usage(outputs, 0 if options.prompt_only else None)}

    async def chunks(
        self, outputs: Sequence[RequestOutput], news: AsyncIterable[None], interval: int
    ) -> AsyncIterator[object]:
        """What is new at each of the news, once there are `interval` tokens; then the usage if it was asked for."""
        options = self._options
        parts = [
            StreamedChoice(
                item,
                number * options.answers + item.index,
                None if self._chat is None else self._chat.reader(),
                options.include_reasoning,
                self._prompt(output) if options.echo else "",
            )
            for number, output in enumerate(outputs)
            for item in output.outputs
        ]
        head = self._head("chat.completion.chunk" if options.is_chat else "text_completion")
        if options.include_usage:
            head["usage"] = None
        async for _ in news:
            for part in parts:
                choice = part.news(interval)
                if choice is not None:
                    yield {**head, "choices": [choice]}
        if options.include_usage:
            yield {**head, "choices": [], "usage": usage(outputs)}

    def _head(self, kind: str) -> dict[str, Any]:
        """What every answer and chunk begins with."""
        prefix = "chatcmpl" if self._options.is_chat else "cmpl"
        return {"id": f"{prefix}-{self._identity}", "object": kind, "created": self._created, "model": self._model}

    def _prompt(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._tokenizer.decode(output.prompt_token_ids)

    def _echo(self, choice: dict[str, Any], output: RequestOutput) -> None:
        """Put the prompt before the answer, and its log-probabilities before the answer's."""
        prompt_only = self._options.prompt_only
        choice["text"] = self._prompt(output) + ("" if prompt_only else choice["text"])
        if choice["logprobs"] is None:
            return
        tables = output.prompt_logprobs or []
        without = tables.count(None)
        prompt = CompletionOutput(0, token_ids=output.prompt_token_ids[without:])
        prompt.logprobs = [table for table in tables if table is not None]
        before = text_logprobs(prompt)
        assert before is not None
        names = [self._tokenizer.id_to_token(token) for token in output.prompt_token_ids[:without]]
        first, nothing = "".join(names), [None] * without
        offsets = list(itertools.accumulate(map(len, names), initial=0))[:-1]
        start = {"tokens": names, "token_logprobs": nothing, "top_logprobs": nothing, "text_offset": offsets}
        merged = {}
        for name, values in choice["logprobs"].items():
            before_it, shift = before[name], 0
            if name == "text_offset":
                before_it = [len(first) + offset for offset in before_it]
                shift = len(first) + sum(map(len, before["tokens"]))
            after = [] if prompt_only else [value + shift for value in values] if shift else values
            merged[name] = start[name] + before_it + after
        choice["logprobs"] = merged


def best(answers: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The most probable ones, by the mean log-probability of their tokens, if there are more than wanted."""
    if len(answers) == count:
        return answers
    return sorted(answers, key=lambda item: -(item.cumulative_logprob or 0.0) / max(len(item.token_ids), 1))[:count]


def usage(outputs: Sequence[RequestOutput], generated: int | None = None) -> dict[str, Any]:
    """Tokens of all prompts and answers, and how many came from the cache."""
    cached = sum(output.cached_tokens for output in outputs)
    return {**token_counts(outputs, generated), "prompt_tokens_details": {"cached_tokens": cached}}


def token_counts(outputs: Sequence[RequestOutput], generated: int | None = None) -> dict[str, Any]:
    """Tokens of all prompts and answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    if generated is None:
        generated = sum(len(item.token_ids) for output in outputs for item in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
