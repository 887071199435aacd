"""The matchers of an engine: prepared in a thread, and kept for other requests with the same grammar."""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvern.structured.backend import Matcher
    from kvern.structured.grammar import Grammars

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


class Kept:
    """A thread-safe cache of matchers by grammar, which drops the oldest beyond a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._matchers: OrderedDict[str, list[Matcher]] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, grammar: object) -> bool:
        return grammar in self._matchers

    def __len__(self) -> int:
        return sum(map(len, self._matchers.values()))

    def add(self, grammar: str, matcher: "Matcher") -> None:
        """Keeps a matcher."""
        with self._lock:
            self._matchers.setdefault(grammar, []).append(matcher)
            self._matchers.move_to_end(grammar)
            self._bytes += size(grammar)
            while self._bytes > self._most:
                self._drop(next(iter(self._matchers)))

    def take(self, grammar: str) -> "Matcher | None":
        """Removes and returns a kept matcher."""
        with self._lock:
            return self._drop(grammar) if grammar in self._matchers else None

    def copy(self, grammar: str) -> "Matcher | None":
        """A copy of one."""
        with self._lock:
            if grammar not in self._matchers:
                return None
            self._matchers.move_to_end(grammar)
            return self._matchers[grammar][0].deep_copy()

    def _drop(self, grammar: str) -> "Matcher":
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

    def __init__(self, grammars: "Grammars") -> None:
        self._grammars = grammars
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

    def take(self, grammars: Sequence[str]) -> "list[Matcher]":
        """A matcher at the start state for each grammar: kept ones, and others made in parallel."""
        kept = [self._spare.take(grammar) or self._patterns.copy(grammar) for grammar in grammars]
        missing = [grammar for grammar, matcher in zip(grammars, kept, strict=True) if matcher is None]
        made = self._threads.map(self._make, missing) if missing else iter(())
        return [matcher or next(made) for matcher in kept]

    def give_back(self, grammar: str, matcher: "Matcher") -> None:
        """Keeps the matcher of an ended answer, because it has cached work for its grammar."""
        if not matcher.is_error() and matcher.reset():
            self._spare.add(grammar, matcher)

    def _prepare(self, grammar: str) -> None:
        self._spare.add(grammar, self._make(grammar))

    def _make(self, grammar: str) -> "Matcher":
        start = time.thread_time()
        matcher = self._grammars.matcher(grammar)
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
