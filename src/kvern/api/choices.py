"""One answer of /v1/chat/completions or /v1/completions: as a whole choice, or as the part since the last chunk."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvern.api.completions import AnswerOptions
from kvern.api.conversation import assistant_message, finish_reason, reasoning_fields
from kvern.api.text_logprobs import TextOffsets, finite, tables_at_once, text_logprobs
from kvern.io.json_lines import as_json
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.pieces import Arguments, CallBegins, Content, Piece, Reasoning
from kvern.request.step import TokenLogprobs
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest


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
        choice["message"] = assistant_message(message, options.include_reasoning, options.prefix)
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
        self._thought = None if chat is None else chat.thought_tokens()
        self._prefix = prefix
        self._characters = self._tokens = 0
        self._written: dict[str, Any] | None = None
        """Log-probabilities that are encoded for the next chunk."""
        self._tokens_written = 0
        self._begun = self._ended = False

    def news(self, interval: int) -> dict[str, Any] | None:
        """Returns the next chunk's choice, or None if fewer than `interval` tokens are new (one is enough for the
        first)."""
        answer = self._answer
        waiting = len(answer.token_ids) - self._tokens
        if self._ended or (answer.finish_reason is None and waiting < (interval if self._begun else 1)):
            return None
        choice: dict[str, Any] = {"index": self._index}
        if self._reader is not None:
            choice["delta"] = delta(
                self._reader.read(answer.text, answer.finish_reason is not None), self._options.include_reasoning
            )
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
            choice["token_ids"] = answer.token_ids[self._tokens :]
        self._characters, self._tokens = len(answer.text), len(answer.token_ids)
        self._begun, self._ended = True, answer.finish_reason is not None
        if self._ended:
            choice["stop_reason"] = answer.stop_reason
        return choice

    @property
    def tokens(self) -> int:
        """The number of the answer's tokens that have been sent."""
        return self._tokens

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


def delta(pieces: Sequence[Piece], include_reasoning: bool) -> dict[str, Any]:
    """Returns pieces of an answer in OpenAI's format."""
    found: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        match piece:
            case Content(text):
                found["content"] = found.get("content", "") + text
            case Reasoning(text) if include_reasoning:
                found |= reasoning_fields(found.get("reasoning", "") + text)
            case CallBegins(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        found["tool_calls"] = list(calls.values())
    return found
