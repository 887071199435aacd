"""Log-probabilities of answers and prompts; those of texts name tokens by their texts, with offsets in what is sent.

It is loaded with the first request that asks for them. Tables, here and in other APIs, are encoded one by one at once.
Answers then hold no object for each entry, which would make garbage collections slow.
"""

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from kvern.api.completions import ENTRIES_AT_ONCE, AnswerOptions
from kvern.io.json_lines import as_json
from kvern.request.logprobs import Row
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.text.tokenizer import Tokenizer


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
    rows: Iterable[Row], options: AnswerOptions, tokenizer: Tokenizer, offsets: TextOffsets
) -> dict[str, Any]:
    """Returns the log-probabilities of an answer to a text, of a part of it, or of a prompt."""
    token_ids = []
    names = []
    logprobs = []
    tops = []
    texts = names_of(options, tokenizer)
    for row in rows:
        ids = row.token_ids
        named = dict(zip([texts[token_id] for token_id in ids], row.logprobs, strict=True))
        if len(named) < len(ids) + 1 - ids.count(ids[0]):
            named = _apart(row.by_id(), texts)
        if row.rank > 1:  # or it is the best already
            named = dict(sorted(named.items(), key=itemgetter(1), reverse=True))
        if not math.isfinite(sum(row.logprobs)):
            named = {name: finite(logprob) for name, logprob in named.items()}
        token_ids.append(ids[0])
        names.append(texts[ids[0]])
        logprobs.append(finite(row.logprobs[0]))
        tops.append(as_json(named))
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets.of(token_ids)}


def _apart(table: Mapping[int, float], texts: Mapping[int, str]) -> dict[str, float]:
    """Names tokens whose text another one has by their ids."""
    named: dict[str, float] = {}
    for token_id, logprob in table.items():
        name = texts[token_id]
        named[f"token_id:{token_id}" if name in named else name] = logprob
    return named


def tables_at_once(count: int) -> int:
    """Returns how many tables of `count` entries are encoded before other tasks have a turn."""
    return max(1, ENTRIES_AT_ONCE // (1 + count))


def finite(logprob: float) -> float:
    """Returns a log-probability for JSON, which has no infinity: -9999, as OpenAI writes for impossible tokens."""
    return logprob if math.isfinite(logprob) else -9999.0


def names_of(options: AnswerOptions, tokenizer: Tokenizer) -> Mapping[int, str]:
    """Returns the names of tokens in answers to texts."""
    return tokenizer.made_once(_number if options.ids_as_tokens else _name)


def _number(_: Tokenizer, token_id: int) -> str:
    return f"token_id:{token_id}"


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Returns a token's text; for a part of a character its bytes, as ``bytes:\xe2\x80``."""
    data = tokenizer.id_to_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenEntry(msgspec.Struct, gc=False):
    """An entry as conversations have it."""

    token: str
    logprob: float
    bytes: msgspec.Raw


class ToldToken(TokenEntry, gc=False):
    """A token, with the most probable ones in its place."""

    top_logprobs: list[TokenEntry]


def _bytes(tokenizer: Tokenizer, token_id: int) -> msgspec.Raw:
    return as_json(list(tokenizer.id_to_bytes(token_id)))


def chat_logprobs(rows: Iterable[Row], options: AnswerOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns each token's log-probability, with the most probable tokens in its place."""
    content = []
    most = options.logprobs or 0
    texts = tokenizer.made_once(_number) if options.ids_as_tokens else tokenizer.texts
    data = tokenizer.made_once(_bytes)
    for row in rows:
        table = row.by_id()
        best = list(table.items())[len(table) > most :]
        if row.rank > 1:  # or it is the best already
            best.sort(key=itemgetter(1), reverse=True)
        if not math.isfinite(sum(row.logprobs)):
            best = [(token, finite(logprob)) for token, logprob in best]
        entries = [TokenEntry(texts[token], logprob, data[token]) for token, logprob in best]
        own = row.token_ids[0]
        content.append(as_json(ToldToken(texts[own], finite(row.logprobs[0]), data[own], entries)))
    return {"content": content, "refusal": None}


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
    if completion.logprobs is None:
        return None
    found = text_logprobs(completion.logprobs.rows(), options, tokenizer, TextOffsets(tokenizer, options, start))
    end = start + len(completion.text)  # tokens after a stop string are not in the text
    found["text_offset"] = [min(place, end) for place in found["text_offset"]]
    return found


def whole_chat(completion: CompletionOutput, options: AnswerOptions, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the log-probabilities of a whole answer to a conversation."""
    return None if completion.logprobs is None else chat_logprobs(completion.logprobs.rows(), options, tokenizer)


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

    def write_some(self) -> int:
        """Encodes those of a few tokens that are not sent. Returns how many log-probabilities these are."""
        if self._answer.logprobs is None:
            return 0
        begin = self._tokens_written
        if begin == len(self._answer.token_ids) and self._written is not None:
            return 0
        self._tokens_written = end = min(
            begin + tables_at_once(self._options.logprobs or 0), len(self._answer.token_ids)
        )
        rows = self._answer.logprobs.rows(begin, end)
        if self._offsets is None:
            told = chat_logprobs(rows, self._options, self._tokenizer)
        else:
            told = text_logprobs(rows, self._options, self._tokenizer, self._offsets)
        if self._written is None:
            self._written = told
        else:
            for name, values in told.items():
                if values:
                    self._written[name] += values
        return (end - begin) * (1 + self._answer.logprobs.most)

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
    assert output.prompt_logprobs is not None
    without = output.prompt_logprobs.missing
    offsets, first = TextOffsets(tokenizer, options, text=text), output.prompt_token_ids[:without]
    start: dict[str, list[Any]] = {
        "tokens": [names_of(options, tokenizer)[token] for token in first],
        "token_logprobs": [None] * without,
        "top_logprobs": [None] * without,
        "text_offset": offsets.of(first),
    }
    before = text_logprobs(output.prompt_logprobs.told.rows(), options, tokenizer, offsets)
    return {
        name: start[name] + before[name] + ([] if options.prompt_only else values) for name, values in answer.items()
    }
