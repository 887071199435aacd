"""Log-probabilities of answers and prompts; those of texts name tokens by their texts, with offsets in what is sent.

It is loaded with the first request that asks for them. Tables, here and in other APIs, are encoded a few at a time,
also of answers that are sent whole: those then hold no object for each entry, which would make garbage collections
slow, and answers that end together do not wait for each other.
"""

import codecs
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import msgspec

from kvern.api.completions import ENTRIES_AT_ONCE, AnswerOptions
from kvern.io.json_lines import as_json
from kvern.request.logprobs import LogprobTables, Row
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


def in_order(row: Row) -> tuple[Sequence[int], Sequence[float]]:
    """Returns a row's tokens, each once, and their log-probabilities for JSON, the most probable first; of equally
    probable ones the token of the row."""
    ids = row.token_ids
    logprobs = row.logprobs
    rank = row.rank
    own = logprobs[0]
    most = len(ids) - 1
    if math.isfinite(sum(logprobs)):
        if rank > most and logprobs[most] > own:
            return (*ids[1:], ids[0]), (*logprobs[1:], own)
        if rank <= most and ids[rank] == ids[0] and logprobs[rank] == own and (rank == 1 or logprobs[rank - 1] > own):
            return ids[1:], logprobs[1:]
    table = list(row.by_id().items())
    if rank > 1:  # or it is the best already
        table.sort(key=itemgetter(1), reverse=True)
    return [token_id for token_id, _ in table], [finite(logprob) for _, logprob in table]


class JsonLists:
    """An object with lists that grow. They are encoded when more is added, or with all else when they are taken."""

    def __init__(self, *names: str) -> None:
        self._nothing: dict[str, Sequence[object]] = dict.fromkeys(names, ())
        self._last = self._nothing
        self._encoded: list[list[bytes]] = []

    def add(self, lists: dict[str, Sequence[object]]) -> None:
        """Adds values to each list."""
        if self._last is not self._nothing:
            self._encoded.append([msgspec.json.encode(values)[1:-1] for values in self._last.values()])
        self._last = lists

    def take(self, more: dict[str, object]) -> msgspec.Raw:
        """Returns the JSON of what was added since the last call, and of fields behind it."""
        if not self._encoded:
            found = msgspec.json.encode(self._last | more)
        else:
            self.add(self._nothing)
            lists = zip(self._nothing, map(b",".join, zip(*self._encoded, strict=True)), strict=True)
            parts = [part for name, items in lists for part in (b'"', name.encode(), b'":[', items, b"],")]
            found = b"".join([b"{", *parts, msgspec.json.encode(more)[1:]])
            self._encoded = []
        self._last = self._nothing
        return msgspec.Raw(found)


class TextLists:
    """The log-probabilities of a text's tokens as JSON: of an answer, a part of it, or a prompt and its answer."""

    def __init__(self, options: AnswerOptions, tokenizer: Tokenizer, offsets: TextOffsets) -> None:
        self._texts = names_of(options, tokenizer)
        self.offsets = offsets
        self._lists = JsonLists("tokens", "token_logprobs", "top_logprobs")
        self._places: list[int] = []

    def add_first(self, token_ids: Sequence[int]) -> None:
        """Adds the first tokens of a prompt, which have no log-probabilities."""
        self._add(token_ids, [None] * len(token_ids), [None] * len(token_ids))

    def add(self, rows: Iterable[Row]) -> None:
        """Adds tokens."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        name = self._texts.__getitem__
        for row in rows:
            ids, numbers = in_order(row)
            named = dict(zip(map(name, ids), numbers, strict=True))
            token_ids.append(row.token_ids[0])
            logprobs.append(finite(row.logprobs[0]))
            tops.append(named if len(named) == len(ids) else _apart(row, ids, numbers, self._texts))
        self._add(token_ids, logprobs, tops)

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[object], tops: Sequence[object]) -> None:
        if token_ids:
            names = [self._texts[token_id] for token_id in token_ids]
            self._lists.add({"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops})
            self._places += self.offsets.of(token_ids)

    def take(self, end: int | None = None) -> msgspec.Raw:
        """Returns the JSON of those that were added since the last call.

        `end`: of the text, if it is known; tokens behind a stop string are not in it.
        """
        places = self._places if end is None else [min(place, end) for place in self._places]
        self._places = []
        return self._lists.take({"text_offset": places})


def _apart(row: Row, ids: Iterable[int], logprobs: Iterable[float], texts: Mapping[int, str]) -> dict[str, float]:
    """Names tokens whose text another one has by their ids, but the token of the row by its text."""
    name_of: dict[int, str] = {}
    taken = set[str]()
    for token_id in row.by_id():
        name = texts[token_id]
        name_of[token_id] = f"token_id:{token_id}" if name in taken else name
        taken.add(name_of[token_id])
    return {name_of[token_id]: logprob for token_id, logprob in zip(ids, logprobs, strict=True)}


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


class ChatLists:
    """The log-probabilities of a conversation's answer as JSON: each token's, with the most probable in its place."""

    def __init__(self, options: AnswerOptions, tokenizer: Tokenizer) -> None:
        self._most = options.logprobs or 0
        self._texts = tokenizer.made_once(_number) if options.ids_as_tokens else tokenizer.texts
        self._data = tokenizer.made_once(_bytes)
        self._lists = JsonLists("content")

    def add(self, rows: Iterable[Row]) -> None:
        """Adds tokens."""
        told = []
        text = self._texts.__getitem__
        data = self._data.__getitem__
        for row in rows:
            own = row.token_ids[0]
            ids, logprobs = in_order(row)
            if len(ids) > self._most:
                place = ids.index(own)
                ids, logprobs = [*ids[:place], *ids[place + 1 :]], [*logprobs[:place], *logprobs[place + 1 :]]
            entries = list(map(TokenEntry, map(text, ids), logprobs, map(data, ids)))
            told.append(ToldToken(text(own), finite(row.logprobs[0]), data(own), entries))
        if told:
            self._lists.add({"content": told})

    def take(self, end: int | None = None) -> msgspec.Raw:
        """Returns the JSON of those that were added since the last call. `end`: as of `TextLists`."""
        return self._lists.take({"refusal": None})


class PromptEntry(msgspec.Struct, gc=False):
    """An entry of a prompt's table."""

    logprob: float
    rank: int
    decoded_token: str | None


def prompt_tables(output: RequestOutput) -> msgspec.Raw:
    """Returns a JSON list of a table for each token of a prompt: by token id its logprob, rank and text; null: there is
    none."""
    found = output.prompt_logprobs
    if found is None:
        return msgspec.Raw(b"[]")
    parts = [b"null"] * found.missing
    for rows in _some_at_once(found.told):
        parts.append(msgspec.json.encode([_prompt_table(row, found.told.texts) for row in rows])[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def _prompt_table(row: Row, texts: Mapping[int, str]) -> dict[int, PromptEntry]:
    ids = row.token_ids
    logprobs = row.logprobs
    rank = row.rank
    best = ids[1:]
    if (best[rank - 1] == ids[0] if rank <= len(best) else ids[0] not in best) and math.isfinite(sum(logprobs)):
        ranks = (rank, *range(1, len(ids)))
        return dict(zip(ids, map(PromptEntry, logprobs, ranks, map(texts.__getitem__, ids)), strict=True))
    return {
        token_id: PromptEntry(finite(entry.logprob), entry.rank, entry.token)
        for token_id, entry in row.table(texts).items()
    }


class LogprobWriter:
    """The log-probabilities of one answer, to a conversation or to a text, which may grow."""

    def __init__(
        self, answer: CompletionOutput, options: AnswerOptions, tokenizer: Tokenizer, is_chat: bool, start: int = 0
    ) -> None:
        """`start`: the number of characters that are sent before the answer."""
        self._answer = answer
        self._start = start
        self._at_once = tables_at_once(options.logprobs or 0)
        self._lists: TextLists | ChatLists
        if is_chat:
            self._lists = ChatLists(options, tokenizer)
        else:
            self._lists = TextLists(options, tokenizer, TextOffsets(tokenizer, options, start))
        self._tokens_written = 0

    def write_some(self) -> int:
        """Encodes those of a few tokens that are not encoded. Returns how many log-probabilities these are."""
        told, begin = self._answer.logprobs, self._tokens_written
        end = len(self._answer.token_ids)
        if told is None or begin == end:
            return 0
        self._tokens_written = end = min(begin + self._at_once, end)
        self._lists.add(told.rows(begin, end))
        return (end - begin) * (1 + told.most)

    def take(self) -> msgspec.Raw | None:
        """Returns those of all tokens that are not sent."""
        while self.write_some():
            pass
        return None if self._answer.logprobs is None else self._lists.take()

    def whole(self) -> msgspec.Raw | None:
        """Returns those of all tokens of an answer that has ended and of which nothing was sent."""
        while self.write_some():
            pass
        end = self._start + len(self._answer.text)
        return None if self._answer.logprobs is None else self._lists.take(end)


def with_prompt(
    answer: CompletionOutput, output: RequestOutput, options: AnswerOptions, tokenizer: Tokenizer
) -> msgspec.Raw:
    """Returns the log-probabilities of a prompt that is sent, too, and then those of its answer, if there is one."""
    text = output.prompt if output.prompt is not None else tokenizer.decode(output.prompt_token_ids)
    assert output.prompt_logprobs is not None and answer.logprobs is not None
    missing, told = output.prompt_logprobs.missing, output.prompt_logprobs.told
    lists = TextLists(options, tokenizer, TextOffsets(tokenizer, options, text=text))
    lists.add_first(output.prompt_token_ids[:missing])
    for rows in _some_at_once(told):
        lists.add(rows)
    if not options.prompt_only:
        lists.offsets = TextOffsets(tokenizer, options, len(text))
        for rows in _some_at_once(answer.logprobs):
            lists.add(rows)
    return lists.take(len(text) + len(answer.text))


def _some_at_once(tables: LogprobTables) -> Iterator[Iterator[Row]]:
    """Yields the rows, those that are encoded at once together."""
    count = tables_at_once(tables.most)
    return (tables.rows(first, first + count) for first in range(0, len(tables), count))
