"""Answers of OpenAI's /v1/chat/completions and /v1/completions, whole or as chunks."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.api.completions import AnswerOptions
from kvern.api.conversation import assistant_message, finish_reason, reasoning_fields
from kvern.api.text_logprobs import TextOffsets, finite, tables_at_once, text_logprobs, token_name
from kvern.io.json_lines import as_json
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.pieces import Arguments, CallBegins, Content, Piece, Reasoning
from kvern.request.step import TokenLogprobs
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest
from kvern.version import __version__

if TYPE_CHECKING:
    from kvern.api.custom_tools import InputReader


def choice_of(
    completion: CompletionOutput, chat: ChatRequest | None, options: AnswerOptions, tokenizer: Tokenizer, start: int = 0
) -> dict[str, Any]:
    """Returns a whole answer to a conversation or a text. `start` is the number of characters that are sent before
    it."""
    choice: dict[str, Any] = {"index": completion.index}
    ended: str | None = completion.finish_reason
    if chat is None:
        offsets = TextOffsets(tokenizer, options, start)
        choice |= {"text": completion.text, "logprobs": text_logprobs(completion, options, tokenizer, offsets)}
        if choice["logprobs"] is not None:  # tokens after a stop string are not in the text
            end = start + len(completion.text)
            choice["logprobs"]["text_offset"] = [min(place, end) for place in choice["logprobs"]["text_offset"]]
    else:
        message = chat.message(completion.text)
        choice["message"] = assistant_message(message, options.include_reasoning, options.prefix, options.custom_tools)
        choice["logprobs"] = chat_logprobs(completion, options, tokenizer)
        ended = finish_reason(completion, message)
    choice |= {"finish_reason": ended, "stop_reason": completion.stop_reason}
    if options.token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def chat_logprobs(completion: CompletionOutput, options: AnswerOptions, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns each token's log-probability, with the most probable tokens in its place."""
    if completion.logprobs is None or options.logprobs is None:
        return None
    content = []
    for token_id, table in zip(completion.token_ids, completion.logprobs, strict=True):
        entries = {
            candidate: {
                "token": f"token_id:{candidate}" if options.ids_as_tokens else entry.token or "",
                "logprob": finite(entry.logprob),
                "bytes": list(tokenizer.id_to_bytes(candidate)),
            }
            for candidate, entry in table.items()
        }
        tops = [entries[best] for best in _best(table, options.logprobs)]
        content.append(as_json({**entries[token_id], "top_logprobs": tops}))
    return {"content": content, "refusal": None}


def _best(table: TokenLogprobs, count: int) -> list[int]:
    """Returns the ids of the `count` most probable tokens. The table begins with the sampled token, probable or not."""
    ids = list(table)[len(table) > count :]
    return sorted(ids, key=lambda token_id: -table[token_id].logprob)


def prompt_logprobs(output: RequestOutput) -> list[msgspec.Raw | None]:
    """Returns the tables of a prompt by token id, as JSON."""
    return [
        None
        if table is None
        else as_json(
            {
                token_id: {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.token}
                for token_id, entry in table.items()
            }
        )
        for table in output.prompt_logprobs or ()
    ]


def completion_details(thought: int, answers: Sequence[CompletionOutput]) -> dict[str, Any]:
    """Returns a part of OpenAI's usage: reasoning tokens of the answers, and tokens of their predictions."""
    details = {
        "reasoning_tokens": thought,
        "accepted_prediction_tokens": sum(answer.accepted_prediction_tokens for answer in answers),
        "rejected_prediction_tokens": sum(answer.rejected_prediction_tokens for answer in answers),
    }
    return {"completion_tokens_details": details}


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
        self._tokenizer, self._offsets = tokenizer, TextOffsets(tokenizer, options)
        self._reader = None if chat is None else chat.reader()
        self._deltas = Deltas(options)
        self._thought = None if chat is None else chat.thought_tokens()
        self._prefix = prefix
        self._characters = 0
        self.tokens = 0
        """The number of the answer's tokens that have been sent."""
        self._written: dict[str, Any] | None = None
        """Log-probabilities that are encoded for the next chunk."""
        self._tokens_written = 0
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
        choice["logprobs"] = self._logprobs()
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

    def write_some(self) -> bool:
        """Encodes log-probabilities of a few tokens that are not sent. Returns False if there were none."""
        if self._answer.logprobs is None or self._options.logprobs is None:
            return False
        begin = self._tokens_written
        if begin == len(self._answer.token_ids) and self._written is not None:
            return False
        self._tokens_written = end = min(begin + tables_at_once(self._options.logprobs), len(self._answer.token_ids))
        new = CompletionOutput(self._index, token_ids=self._answer.token_ids[begin:end])
        new.logprobs = self._answer.logprobs[begin:end]
        if self._chat is not None:
            told = chat_logprobs(new, self._options, self._tokenizer)
        else:
            told = text_logprobs(new, self._options, self._tokenizer, self._offsets)
        if self._written is None:
            self._written = told
        else:
            for name, values in (told or {}).items():
                if values:
                    self._written[name] += values
        return end > begin

    def _logprobs(self) -> dict[str, Any] | None:
        """Returns the log-probabilities of all tokens that are not sent."""
        while self.write_some():
            pass
        written, self._written = self._written, None
        return written


def _first(news: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The first delta of an answer."""
    return {"role": "assistant", **news, "content": prefix + news.get("content", "")}


class Deltas:
    """The pieces of one answer in OpenAI's format."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._inputs: dict[int, InputReader] = {}
        """Of calls of custom tools, whose input is decoded."""

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
        counts = usage(outputs, 0 if options.prompt_only else None, self._chat) | details(outputs, self._chat)
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
                    chunk["usage"] = usage([output], part.tokens, self._chat) | part.details
                if choice["finish_reason"] is not None:
                    chunk |= self._server
                yield chunk
        if options.include_usage:
            counts = usage(outputs, chat=self._chat) | details(outputs, self._chat)
            yield {**head, **self._server, "choices": [], "usage": counts}

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


def usage(
    outputs: Sequence[RequestOutput], generated: int | None = None, chat: ChatRequest | None = None
) -> dict[str, Any]:
    """Counts the tokens of all prompts and answers, of prompts that came from the cache, and of a chat's images."""
    counts = {"cached_tokens": sum(output.cached_tokens for output in outputs), **image_tokens(chat)}
    return {**token_counts(outputs, generated), "prompt_tokens_details": counts}


def image_tokens(chat: ChatRequest | None) -> dict[str, int]:
    """Returns the count of a conversation's image tokens, for details of the prompt's tokens; empty without images."""
    return {"image_tokens": chat.image_tokens} if chat is not None and chat.image_tokens else {}


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
