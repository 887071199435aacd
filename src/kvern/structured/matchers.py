"""llguidance with a model's tokenizer, and the matchers of an engine.

Matchers are prepared in a thread, and kept for other requests with the same grammar.
"""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from kvern.errors import InvalidParameter, KvernError, in_a_line

if TYPE_CHECKING:
    import torch

    from kvern.text.tokenizer import Tokenizer

CHEAP_SECONDS = 0.005
"""The computing time below which a matcher is made anew for each row; slower ones are copied and share their work."""
PREPARING_THREADS = 2
"""Make the matchers of new grammars; requests that begin do not wait for these."""
CHEAP_GRAMMARS = 1024
"""Limit of the grammars remembered to be cheap."""
MATCHER_BYTES, CHARACTER_BYTES = 1 << 20, 300
"""Approximate bytes of a matcher, and in addition for each character of its grammar."""
SPARE_BYTES, PATTERN_BYTES = 128 << 20, 512 << 20
"""Approximate bytes of kept matchers: of ended requests, and of those that are copied."""
MOST_ITEMS = 4000
"""Alternatives that are open at one place; with more, following them takes a time that grows as their square."""
BETWEEN, WITHIN = '}]":0123456789-tnf,{[', '"}]:0123456789-tnf,{['
"""Signs by which JSON ends soon, the best first: between its tokens, where line breaks may be, and within one."""


class GrammarLibrary:
    """llguidance with one model's tokenizer, which it reads at first use: a moment for a large vocabulary.

    Its matchers are the states of answers in their grammars. Masks allow end-of-sequence tokens only where a grammar
    ends. Its properties raise InvalidParameter if the model has no tokenizer that llguidance can use.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer in the library's form."""
        if not (self._folder / "tokenizer.json").is_file():
            raise InvalidParameter(f"structured needs a tokenizer, and {self._folder} has no tokenizer.json")
        try:
            text = within(self._vocab_size, self._read_tokenizer().definition())
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self.eos_token_ids))
        except (KvernError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            what = "llguidance cannot be used with this model's tokenizer"
            raise InvalidParameter(f"structured: {what}: {in_a_line(error)}") from error

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens of the tokenizer that end an answer."""
        tokenizer = self._read_tokenizer()
        found = tuple(token for token in tokenizer.eos_token_ids if token < min(self._vocab_size, tokenizer.vocab_size))
        if not found:
            raise InvalidParameter("structured needs an end-of-sequence token, and this model names none")
        return found

    @functools.cached_property
    def ending(self) -> int:
        """A number with the bits of `eos_token_ids`."""
        return sum(1 << token for token in set(self.eos_token_ids))

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that no text of a grammar matches, only their ids; entries of the table without a token among them."""
        known = range(self.tokenizer.vocab_size)
        padding = range(self._read_tokenizer().vocab_size, self._vocab_size)
        return frozenset(token for token in known if self.tokenizer.is_special_token(token)) | frozenset(padding)

    def _read_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer, which a thread imports and reads for an engine's first grammar."""
        from kvern.text.tokenizer import Tokenizer

        return Tokenizer(self._folder)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an answer that follows a compiled grammar. Several threads may call this."""
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=_limits())

    def fill(self, going: Sequence[tuple[LLMatcher, int]], masks: "torch.Tensor", side_by_side: bool) -> None:
        """Writes the tokens that each matcher allows into its row of `masks` [R, words] int32, on the host.

        `side_by_side`: use threads of the library.
        """
        row_bytes = 4 * masks.shape[1]
        if side_by_side and going:
            self._executor.unsafe_compute_mask_ptr(list(going), masks.data_ptr(), row_bytes, len(masks))
            return
        for matcher, row in going:
            matcher.unsafe_compute_mask_ptr(masks[row].data_ptr(), row_bytes)

    def way_out(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Tokens that finish the current JSON, without the token that ends the answer.

        None: no way of at most `most` tokens is known. The matcher's state does not change.
        """
        copy, way = matcher.deep_copy(), list[int]()
        while len(way) <= most and not copy.is_error():
            if copy.is_stopped() or copy.is_accepting():
                return way
            signs = BETWEEN if copy.validate_tokens(self._signs["\n"]) else WITHIN
            step = next((self._signs[sign] for sign in signs if copy.validate_tokens(self._signs[sign])), None)
            step = step or self.tokenizer.tokenize_bytes(copy.compute_ff_bytes())
            step = step or [some_token(copy.compute_bitmask(), self.ending, 0)]
            taken = copy.try_consume_tokens(step)
            if not taken:
                return None
            way += step[:taken]
        return None

    @functools.cached_property
    def _signs(self) -> dict[str, list[int]]:
        return {sign: self.tokenizer.tokenize_str(sign) for sign in f"{BETWEEN}\n"}

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_lexer_states=100_000, max_grammar_size=200_000, max_items_in_row=MOST_ITEMS, verbose_errors=False
    )


def some_token(mask: bytes, ending: int, place: int) -> int:
    """An allowed token, a different one at each place; a token that ends the answer only if it must end."""
    allowed = int.from_bytes(mask, "little")
    mask = ((allowed & ~ending) or allowed).to_bytes(len(mask), "little")
    first = place * 41 % len(mask)
    turned = mask[first:] + mask[:first]
    byte = len(turned) - len(turned.lstrip(b"\0"))
    return 8 * ((first + byte) % len(mask)) + (turned[byte] & -turned[byte]).bit_length() - 1


@functools.cache
def library_of(folder: Path, vocab_size: int) -> GrammarLibrary:
    """The library of one model, shared within this process."""
    return GrammarLibrary(folder, vocab_size)


def within(vocab_size: int, text: str) -> str:
    """A `tokenizer.json` without tokens whose ids are beyond a model's `vocab_size`.

    Image and padding tokens are often appended to the vocabulary of a checkpoint whose embeddings were not extended.
    """
    held = msgspec.json.decode(text)
    model: dict[str, Any] = held["model"]
    added = held.get("added_tokens") or []
    vocabulary = model["vocab"]
    last = max((token["id"] for token in added), default=0)
    last = max(last, len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=0))
    if last < vocab_size:
        return text
    held["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    if isinstance(vocabulary, list):  # of pieces with their scores; the place is the id
        model["vocab"] = vocabulary[:vocab_size]
    else:
        model["vocab"] = kept = {token: number for token, number in vocabulary.items() if number < vocab_size}
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if _is_within(merge, kept)]
    return msgspec.json.encode(held).decode()


def _is_within(merge: str | list[str], vocabulary: dict[str, int]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in vocabulary and right in vocabulary and left + right in vocabulary


class Kept:
    """A thread-safe cache of matchers by grammar, which drops the oldest beyond a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._matchers: OrderedDict[str, list[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, grammar: object) -> bool:
        return grammar in self._matchers

    def __len__(self) -> int:
        return sum(map(len, self._matchers.values()))

    def add(self, grammar: str, matcher: LLMatcher) -> None:
        """Keeps a matcher."""
        with self._lock:
            self._matchers.setdefault(grammar, []).append(matcher)
            self._matchers.move_to_end(grammar)
            self._bytes += size(grammar)
            while self._bytes > self._most:
                self._drop(next(iter(self._matchers)))

    def take(self, grammar: str) -> LLMatcher | None:
        """Removes and returns a kept matcher."""
        with self._lock:
            return self._drop(grammar) if grammar in self._matchers else None

    def copy(self, grammar: str) -> LLMatcher | None:
        """A copy of one."""
        with self._lock:
            if grammar not in self._matchers:
                return None
            self._matchers.move_to_end(grammar)
            return self._matchers[grammar][0].deep_copy()

    def _drop(self, grammar: str) -> LLMatcher:
        self._bytes -= size(grammar)
        matcher = self._matchers[grammar].pop()
        if not self._matchers[grammar]:
            del self._matchers[grammar]
        return matcher


def size(grammar: str) -> int:
    """The approximate bytes of a matcher of this grammar."""
    return MATCHER_BYTES + CHARACTER_BYTES * len(grammar)


class Matchers:
    """Makes and keeps matchers. Only one thread calls it; others make matchers in the background."""

    def __init__(self, library: GrammarLibrary) -> None:
        self._library = library
        self._spare = Kept(SPARE_BYTES)
        self._patterns = Kept(PATTERN_BYTES)
        self._cheap: OrderedDict[str, None] = OrderedDict()
        self._making: dict[str, Future[None]] = {}

    def prepare(self, grammar: str) -> "Future[None] | None":
        """Starts to make a matcher of a new grammar in a thread; None: it exists and `take` is fast.

        `take` finds it there when it is done, unless it was dropped for others.
        """
        for made in [name for name, future in self._making.items() if future.done()]:
            del self._making[made]
        if grammar in self._cheap or grammar in self._patterns:
            return None
        if grammar not in self._making:
            self._making[grammar] = self._preparing.submit(self._prepare, grammar)
        return self._making[grammar]

    def take(self, grammars: Sequence[str]) -> list[LLMatcher]:
        """A matcher at the start state for each grammar: kept ones, and others made in parallel."""
        kept = [self._spare.take(grammar) or self._patterns.copy(grammar) for grammar in grammars]
        missing = [grammar for grammar, matcher in zip(grammars, kept, strict=True) if matcher is None]
        made = self._threads.map(self._make, missing) if missing else iter(())
        return [matcher or next(made) for matcher in kept]

    def give_back(self, grammar: str, matcher: LLMatcher) -> None:
        """Keeps the matcher of an ended answer, because it has cached work for its grammar."""
        if not matcher.is_error() and matcher.reset():
            self._spare.add(grammar, matcher)

    def _prepare(self, grammar: str) -> None:
        self._spare.add(grammar, self._make(grammar))

    def _make(self, grammar: str) -> LLMatcher:
        start = time.thread_time()
        matcher = self._library.matcher(grammar)
        if time.thread_time() - start > CHEAP_SECONDS:
            self._patterns.add(grammar, matcher.deep_copy())
        else:
            self._cheap[grammar] = None
            if len(self._cheap) > CHEAP_GRAMMARS:
                self._cheap.popitem(last=False)
        return matcher

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(thread_name_prefix="grammar")

    @functools.cached_property
    def _preparing(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="new-grammar")
