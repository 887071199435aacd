"""Log-probabilities of answers and prompts; those of texts name tokens by their texts, with offsets in what is sent.

It is loaded with the first request that asks for them. Tables, here and in other APIs, are encoded one by one at once.
Answers then hold no object for each entry, which would make garbage collections slow.
"""

import codecs
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from kvern.api.completions import AnswerOptions
from kvern.io.json_lines import as_json
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.step import TokenLogprobs
from kvern.text.tokenizer import Tokenizer

ENTRIES_AT_ONCE = 1024
"""The log-probabilities that are encoded at once."""


class TextOffsets:
    """Offsets of tokens in a text, in characters. Tokens that are parts of one character have the same offset.

    Special tokens that are left out of an answer have no length. For a prompt the `text` is known; tokens are searched
    in it, as tokenizers may put tokens and a blank before it.
    """

    def __init__(self, tokenizer: Tokenizer, options: AnswerOptions, start: int = 0, text: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._next)
            self._next += self._length(token_id)
        return found

    def _length(self, token_id: int) -> int:
        """Returns the number of characters that end with a token."""
        options, special = self._options, self._tokenizer.is_special(token_id)
        if self._text is None and special and options.skips_special and token_id not in options.visible:
            return 0
        piece = self._decoder.decode(self._tokenizer.id_to_bytes(token_id))
        if self._text is None or self._text.startswith(piece, self._next):
            return len(piece)
        if special:
            return 0
        has_blank = piece.startswith(" ") and self._text.startswith(piece[1:], self._next)
        return min(len(piece) - has_blank, len(self._text) - self._next)  # a normalizer may have changed it


def text_logprobs(
    completion: CompletionOutput, options: AnswerOptions, tokenizer: Tokenizer, offsets: TextOffsets
) -> dict[str, Any] | None:
    """Returns the log-probabilities of an answer, or of a part of it."""
    if completion.logprobs is None or options.logprobs is None:
        return None
    names = []
    logprobs = []
    tops = []
    for token_id, table in zip(completion.token_ids, completion.logprobs, strict=True):
        logprobs.append(finite(table[token_id].logprob))
        names.append(token_name(token_id, options, tokenizer))
        named = {names[-1]: table[token_id]}
        for other, entry in table.items():
            if other != token_id:
                name = token_name(other, options, tokenizer)
                named[f"token_id:{other}" if name in named else name] = entry
        best = sorted(named.items(), key=lambda item: -item[1].logprob)
        tops.append(as_json({name: finite(entry.logprob) for name, entry in best}))
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets.of(completion.token_ids),
    }


def tables_at_once(count: int) -> int:
    """Returns how many tables of `count` entries are encoded before other tasks have a turn."""
    return max(1, ENTRIES_AT_ONCE // (1 + count))


def finite(logprob: float) -> float:
    """Returns a log-probability for JSON, which has no infinity: -9999, as OpenAI writes for impossible tokens."""
    return logprob if math.isfinite(logprob) else -9999.0


def token_name(token_id: int, options: AnswerOptions, tokenizer: Tokenizer) -> str:
    r"""Returns a token's text; for a part of a character its bytes, as ``bytes:\xe2\x80``, or its id if ids are
    wanted."""
    if options.ids_as_tokens:
        return f"token_id:{token_id}"
    data = tokenizer.id_to_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


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


def prompt_tables(output: RequestOutput) -> list[msgspec.Raw | None]:
    """Returns a JSON table for each token of a prompt: by token id its logprob, rank and text; None: there is none."""
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


def whole_text(
    completion: CompletionOutput, options: AnswerOptions, tokenizer: Tokenizer, start: int
) -> dict[str, Any] | None:
    """Returns the log-probabilities of a whole answer to a text, which begins at the character `start`."""
    found = text_logprobs(completion, options, tokenizer, TextOffsets(tokenizer, options, start))
    if found is not None:  # tokens after a stop string are not in the text
        end = start + len(completion.text)
        found["text_offset"] = [min(place, end) for place in found["text_offset"]]
    return found


class LogprobWriter:
    """The log-probabilities of one streamed answer, to a conversation or to a text."""

    def __init__(self, answer: CompletionOutput, options: AnswerOptions, tokenizer: Tokenizer, is_chat: bool) -> None:
        self._answer = answer
        self._options = options
        self._tokenizer = tokenizer
        self._offsets = None if is_chat else TextOffsets(tokenizer, options)
        self._written: dict[str, Any] | None = None
        """Encoded for the next chunk."""
        self._tokens_written = 0

    def write_some(self) -> bool:
        """Encodes those of a few tokens that are not sent. Returns False if there were none."""
        if self._answer.logprobs is None:
            return False
        begin = self._tokens_written
        if begin == len(self._answer.token_ids) and self._written is not None:
            return False
        self._tokens_written = end = min(
            begin + tables_at_once(self._options.logprobs or 0), len(self._answer.token_ids)
        )
        new = CompletionOutput(self._answer.index, token_ids=self._answer.token_ids[begin:end])
        new.logprobs = self._answer.logprobs[begin:end]
        if self._offsets is None:
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

    def take(self) -> dict[str, Any] | None:
        """Returns those of all tokens that are not sent."""
        while self.write_some():
            pass
        written, self._written = self._written, None
        return written


def behind_prompt(
    answer: dict[str, Any], output: RequestOutput, options: AnswerOptions, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the log-probabilities of a prompt that is sent, too, and then those of its answer, if there is one."""
    text = output.prompt if output.prompt is not None else tokenizer.decode(output.prompt_token_ids)
    tables = output.prompt_logprobs or []
    without = tables.count(None)
    prompt = CompletionOutput(0, token_ids=output.prompt_token_ids[without:])
    prompt.logprobs = [table for table in tables if table is not None]
    offsets, first = TextOffsets(tokenizer, options, text=text), output.prompt_token_ids[:without]
    start: dict[str, list[Any]] = {
        "tokens": [token_name(token, options, tokenizer) for token in first],
        "token_logprobs": [None] * without,
        "top_logprobs": [None] * without,
        "text_offset": offsets.of(first),
    }
    before = text_logprobs(prompt, options, tokenizer, offsets)
    assert before is not None
    return {
        name: start[name] + before[name] + ([] if options.prompt_only else values) for name, values in answer.items()
    }
