"""One answer of /v1/chat/completions or /v1/completions: as a choice, or as what of it is new since the last chunk."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from kvern.api.conversation import assistant_message, finish_reason
from kvern.outputs import CompletionOutput
from kvern.tools.chat import AnswerReader, ChatRequest
from kvern.tools.pieces import Arguments, CallBegins, Content, Piece, Reasoning


def choice_of(completion: CompletionOutput, chat: ChatRequest | None, include_reasoning: bool) -> dict[str, Any]:
    """A whole answer, to a conversation or to a text."""
    choice: dict[str, Any] = {"index": completion.index}
    if chat is None:
        ended = completion.finish_reason
        return {**choice, "text": completion.text, "logprobs": text_logprobs(completion), "finish_reason": ended}
    message = chat.message(completion.text)
    choice["message"] = assistant_message(message, include_reasoning)
    return {**choice, "logprobs": chat_logprobs(completion), "finish_reason": finish_reason(completion, message)}


def chat_logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = []
    for token_id, table in zip(completion.token_ids, completion.logprobs, strict=True):
        entries = {
            candidate: {
                "token": entry.token or "",
                "logprob": finite(entry.logprob),
                "bytes": None if "\ufffd" in (entry.token or "") else list((entry.token or "").encode()),
            }
            for candidate, entry in table.items()
        }
        content.append({**entries[token_id], "top_logprobs": list(entries.values())})
    return {"content": content}


def text_logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
    tokens = [table[token_id].token or "" for token_id, table in pairs]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(table[token_id].logprob) for token_id, table in pairs],
        "top_logprobs": [{entry.token or "": finite(entry.logprob) for entry in table.values()} for _, table in pairs],
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that could not be sampled."""
    return logprob if math.isfinite(logprob) else -9999.0


class StreamedChoice:
    """One answer; `reader` takes the answer to a conversation apart, `echo` is sent before a text."""

    def __init__(
        self,
        answer: CompletionOutput,
        index: int,
        reader: AnswerReader | None = None,
        include_reasoning: bool = True,
        echo: str = "",
    ) -> None:
        self._answer, self._index, self._reader, self._echo = answer, index, reader, echo
        self._include_reasoning = include_reasoning
        self._characters = self._tokens = 0
        self._begun = self._ended = False

    def news(self, interval: int) -> dict[str, Any] | None:
        """The next chunk's choice; None if fewer than `interval` tokens are new (one is enough for the first)."""
        answer = self._answer
        waiting = len(answer.token_ids) - self._tokens
        if self._ended or (answer.finish_reason is None and waiting < (interval if self._begun else 1)):
            return None
        choice: dict[str, Any] = {"index": self._index}
        if self._reader is not None:
            choice["delta"] = delta(
                self._reader.read(answer.text, answer.finish_reason is not None), self._include_reasoning
            )
            if not choice["delta"] and self._begun and answer.finish_reason is None:
                return None  # all of it is held back, and its log-probabilities are sent with what comes next
            if not self._begun:
                choice["delta"] = {"role": "assistant", "content": "", **choice["delta"]}
        else:
            choice["text"] = ("" if self._begun else self._echo) + answer.text[self._characters :]
        choice["logprobs"] = self._logprobs()
        choice["finish_reason"] = (
            answer.finish_reason if self._reader is None else finish_reason(answer, self._reader.message)
        )
        self._characters, self._tokens = len(answer.text), len(answer.token_ids)
        self._begun, self._ended = True, answer.finish_reason is not None
        return choice

    def _logprobs(self) -> dict[str, Any] | None:
        if self._answer.logprobs is None:
            return None
        new = CompletionOutput(self._index, token_ids=self._answer.token_ids[self._tokens :])
        new.logprobs = self._answer.logprobs[self._tokens :]
        return (text_logprobs if self._reader is None else chat_logprobs)(new)


def delta(pieces: Sequence[Piece], include_reasoning: bool) -> dict[str, Any]:
    """Pieces of an answer in OpenAI's form."""
    found: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        match piece:
            case Content(text):
                found["content"] = found.get("content", "") + text
            case Reasoning(text) if include_reasoning:
                found["reasoning_content"] = found.get("reasoning_content", "") + text
            case CallBegins(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        found["tool_calls"] = list(calls.values())
    return found
