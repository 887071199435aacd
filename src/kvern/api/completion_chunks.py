"""Answers of OpenAI's /v1/chat/completions and /v1/completions as chunks."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from kvern.api.completion_answers import CompletionWriter, completion_details, details, usage
from kvern.api.completions import ENTRIES_AT_ONCE, AnswerOptions
from kvern.api.conversation import finish_reason, reasoning_fields
from kvern.plugins import imported
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.pieces import Arguments, CallBegins, Content, Piece, Reasoning
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest

if TYPE_CHECKING:
    from kvern.api.custom_tools import InputReader
    from kvern.api.logprobs import LogprobWriter


class StreamedChoice:
    """One answer as chunks: to a conversation if there is a `chat`, else to a text. `prefix` is sent before it."""

    def __init__(
        self,
        answer: CompletionOutput,
        index: int,
        chat: ChatRequest | None,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        prefix: str = "",
    ) -> None:
        self._answer = answer
        self._index = index
        self._chat = chat
        self._options = options
        self._logprobs: LogprobWriter | None = None
        if options.logprobs is not None:
            make = imported("kvern.api.logprobs:LogprobWriter")
            self._logprobs = make(answer, options, tokenizer, chat is not None)
        self._reader = None if chat is None else chat.reader()
        self._deltas = Deltas(options)
        self._thought = None if chat is None else chat.thought_tokens()
        self._prefix = prefix
        self._characters = 0
        self.tokens = 0
        """The number of the answer's tokens that have been sent."""
        self._begun = self._ended = False

    def news(self, interval: int) -> dict[str, Any] | None:
        """Returns the next chunk's choice, or None if fewer than `interval` tokens are new (one is enough for the
        first)."""
        answer = self._answer
        waiting = len(answer.token_ids) - self.tokens
        if self._ended or (answer.finish_reason is None and waiting < (interval if self._begun else 1)):
            return None
        choice: dict[str, Any] = {"index": self._index}
        if self._reader is not None:
            ended = answer.finish_reason is not None
            choice["delta"] = self._deltas.next(self._reader.read(answer.text, ended), ended)
            if not choice["delta"] and self._begun and answer.finish_reason is None:
                return None  # the new text is held back; its log-probabilities go with the next chunk
            if not self._begun:
                choice["delta"] = _first(choice["delta"], self._prefix)
        else:
            choice["text"] = ("" if self._begun else self._prefix) + answer.text[self._characters :]
        choice["logprobs"] = None if self._logprobs is None else self._logprobs.take()
        choice["finish_reason"] = (
            answer.finish_reason if self._reader is None else finish_reason(answer, self._reader.message)
        )
        if self._options.token_ids:
            choice["token_ids"] = answer.token_ids[self.tokens :]
        self._characters, self.tokens = len(answer.text), len(answer.token_ids)
        self._begun, self._ended = True, answer.finish_reason is not None
        if self._ended:
            choice["stop_reason"] = answer.stop_reason
        return choice

    @property
    def details(self) -> dict[str, Any]:
        """The part of the usage that counts kinds of tokens in an answer to a conversation so far."""
        if self._chat is None:
            return {}
        thought = 0 if self._thought is None else self._thought.count(self._answer.token_ids)
        return completion_details(thought, [self._answer])

    def write_some(self) -> int:
        """Encodes log-probabilities of a few tokens that are not sent. Returns how many there were."""
        return 0 if self._logprobs is None else self._logprobs.write_some()


def _first(news: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The first delta of an answer."""
    return {"role": "assistant", **news, "content": prefix + news.get("content", "")}


class Deltas:
    """The pieces of one answer in OpenAI's format."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._inputs: dict[int, InputReader] = {}
        """The calls of custom tools, whose input is decoded."""

    def next(self, pieces: Sequence[Piece], ended: bool) -> dict[str, Any]:
        """Returns the next pieces; `ended`: there are no more."""
        found: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            match piece:
                case Content(text):
                    found["content"] = found.get("content", "") + text
                case Reasoning(text) if self._options.include_reasoning:
                    found |= reasoning_fields(found.get("reasoning", "") + text)
                case CallBegins(index, call_id, name):
                    kind = self._kind(index, name)
                    holder = {"name": name, HOLDERS[kind]: ""}
                    calls[index] = {"index": index, "id": call_id, "type": kind, kind: holder}
                case Arguments(index, text):
                    self._grow(calls, index, text)
        for index, reader in self._inputs.items() if ended else ():
            self._grow(calls, index, reader.end(), decoded=True)
        if calls:
            found["tool_calls"] = list(calls.values())
        return found

    def _kind(self, index: int, name: str) -> str:
        if name not in self._options.custom_tools:
            return "function"
        from kvern.api.custom_tools import InputReader

        self._inputs[index] = InputReader()
        return "custom"

    def _grow(self, calls: dict[int, dict[str, Any]], index: int, text: str, decoded: bool = False) -> None:
        """Adds to the text of a call; nothing if there is no new text."""
        kind = "custom" if index in self._inputs else "function"
        if kind == "custom" and not decoded:
            text = self._inputs[index].add(text)
        if text:
            call = calls.setdefault(index, {"index": index, kind: {HOLDERS[kind]: ""}})
            call[kind][HOLDERS[kind]] += text


HOLDERS = {"function": "arguments", "custom": "input"}
"""The field that holds what the model wrote, for each type of a call."""


async def chunks(
    writer: CompletionWriter, outputs: Sequence[RequestOutput], news: AsyncIterable[None], interval: int
) -> AsyncIterator[object]:
    """Yields a chunk whenever `interval` tokens are new, then the usage if the request wants it."""
    options = writer.options
    interval = max(interval, options.stream_interval)
    how = writer.chat, options, writer.tokenizer
    parts = [
        (output, StreamedChoice(item, number * options.answers + item.index, *how, prefix))
        for number, output in enumerate(outputs)
        for prefix in [writer.prompt(output) if options.echo else options.prefix]
        for item in output.outputs
    ]
    head = writer.head("chat.completion.chunk" if options.is_chat else "text_completion")
    if options.include_usage:
        head["usage"] = None
    shown: set[str] = set()
    written = 0
    async for _ in news:
        for output, part in parts:
            while count := part.write_some():
                written += count
                if written >= ENTRIES_AT_ONCE:
                    written = 0
                    await asyncio.sleep(0)
            choice = part.news(interval)
            if choice is None:
                continue
            chunk = {**head, "choices": [choice]}
            if options.token_ids and output.request_id not in shown:
                shown.add(output.request_id)
                (chunk if options.is_chat else choice)["prompt_token_ids"] = output.prompt_token_ids
            if options.continuous_usage:
                chunk["usage"] = usage([output], part.tokens, writer.chat) | part.details
            if choice["finish_reason"] is not None:
                chunk |= writer.server
            yield chunk
    if options.include_usage:
        counts = usage(outputs, chat=writer.chat) | details(outputs, writer.chat)
        yield {**head, **writer.server, "choices": [], "usage": counts}
