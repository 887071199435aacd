"""The server's index of cached prefixes: from a name (`cache/prefix_names.py`) to the engines that have it.

CacheChanges 0, 1, 2 ... of an engine --hear--> names that it has
a request is given to an engine ------expect--> names that it will have soon, until `withdraw`: the first of them, and
                                                those that follow once another prompt has it, too
the engine ends ------------------------drop--> it has none

Names that an engine has no more are `left`: its tier probably keeps the pages. They count for the engine if that is
`host`, and for all engines if all of them read a store of the tier, less what the load takes.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from kvern.cache.prefix_names import named_tokens
from kvern.request.store_figures import StorePrice
from kvern.serving.wire import CacheChanges

Level = tuple[int, Set[int]]
"""Cached tokens of a prompt, and the engines that have so many of them or more."""
NOBODY: Set[int] = frozenset()
HOST, DISTANT = "host", "nixl"
"""Stores that engines do not share: one's own, and what engines of another machine keep, of which nothing is known."""
TOKENS_OF_NAME = 128
"""A name stands for 64 tokens of short prompts, and for more where a prompt is long."""
MOST_LEFT = 1 << 16
"""The most names of an engine that has evicted them; those that left first are forgotten."""
MOST_LEVELS = 4
"""Levels of tiers that are looked at, those with the most tokens."""


def cached_tokens(levels: Sequence[Level], number: int) -> int:
    """Tokens of a prompt that an engine has."""
    return next((tokens for tokens, engines in levels if number in engines), 0)


class _Engine:
    """The names of prefixes that one engine has cached (`told`), or will have once running requests are computed
    (`expected`, with the number of these requests)."""

    def __init__(self) -> None:
        self.told: set[bytes] = set()
        self.expected: dict[bytes, int] = {}
        self.left: dict[bytes, None] = {}
        """Names that it has no more, and whose pages its tier probably keeps; the first ones left first."""
        self.next = 0
        """The number of the message that comes next."""


class Expected:
    """Names that an engine will have soon, of one request: those that others asked for, and the rest of them."""

    def __init__(self, engine: _Engine, number: int, rest: Iterator[bytes]) -> None:
        self.engine = engine
        self.number = number
        self.names: list[bytes] = []
        self.rest = rest


class PrefixIndex:
    """Engines are numbers. Of the tiers' prices those hold that the last engine told: they are alike."""

    def __init__(self) -> None:
        self._left: dict[bytes, set[int]] = {}
        self._own: StorePrice | None = None
        self._shared: StorePrice | None = None
        """The prices of loads from an engine's own store, and from one that all read; None: there is none."""
        self._having: dict[bytes, set[int]] = {}
        self._engines: dict[int, _Engine] = {}
        self._growing: dict[bytes, list[Expected]] = {}
        """Expectations by their last names so far, after which they may go on."""

    def __contains__(self, name: bytes) -> bool:
        """True if an engine has a name, or will have it."""
        return name in self._having

    def begin(self, number: int) -> None:
        """An engine was asked to tell what it has: its message number 0 comes next, before which nothing counts."""
        self.drop(number)
        self._engines[number] = _Engine()

    def drop(self, number: int) -> None:
        """An engine has nothing any more, or is gone. What it still tells is not heard."""
        engine = self._engines.pop(number, None)
        if engine is not None:
            for name in engine.told | engine.expected.keys():
                self._leave(name, number)
            for name in [*engine.left]:
                self._forget(engine, name, number)
            for name in engine.expected.keys() & self._growing.keys():
                self._keep_growing(name, lambda expected: expected.engine is not engine)

    def hear(self, number: int, changes: CacheChanges) -> bool:
        """Takes what an engine tells. False: messages are missing, and it must be asked again."""
        engine = self._engines.get(number)
        if engine is None or (changes.number and not engine.next):
            return True  # of before it was asked
        if changes.number != engine.next:
            return False
        engine.next += 1
        if changes.prices is not None:
            self._own = changes.prices.get(HOST)
            shared = [price for store, price in changes.prices.items() if not store.startswith((HOST, DISTANT))]
            self._shared = min(shared, key=lambda price: price.share, default=None)
        for name in changes.removed:
            if name in engine.told:
                engine.told.remove(name)
                if name not in engine.expected:
                    self._leave(name, number)
                if self._own or self._shared:
                    engine.left[name] = None
                    self._left.setdefault(name, set()).add(number)
        for name in engine.left.keys() & changes.stored:
            self._forget(engine, name, number)
        most = MOST_LEFT if self._own is None else min(MOST_LEFT, self._own.capacity // TOKENS_OF_NAME)
        for name in [*itertools.islice(engine.left, max(0, len(engine.left) - most))]:
            self._forget(engine, name, number)
        engine.told.update(changes.stored)
        for name in changes.stored:
            self._having.setdefault(name, set()).add(number)
        return True

    def expect(self, number: int, names: Iterable[bytes]) -> Expected | None:
        """An engine gets a request with these names; returns what to `withdraw` once it has told of them, if any."""
        engine = self._engines.get(number)
        if engine is None:
            return None
        expected = Expected(engine, number, itertools.dropwhile(engine.told.__contains__, names))
        self._grow(expected)
        return expected if expected.names else None

    def withdraw(self, expected: Expected) -> None:
        """The request has begun or ended: what the engine has of it, it has told."""
        engine, number = expected.engine, expected.number
        if self._engines.get(number) is not engine:
            return
        self._keep_growing(expected.names[-1], lambda other: other is not expected)
        for name in expected.names:
            if engine.expected[name] > 1:
                engine.expected[name] -= 1
            else:
                del engine.expected[name]
                if name not in engine.told:
                    self._leave(name, number)

    def levels(self, names: Iterable[bytes]) -> list[Level]:
        """Returns who has how much of a prompt, the most first. No more names are made than there are engines for.

        An engine that has a name has those before it: each set is within the one before. What tiers have counts less,
        see `StorePrice.gain`; of an engine's numbers the first one counts.
        """
        growing = self._growing
        levels: list[Level] = []
        count = 0
        engines: set[int] = set()
        for name in names:
            if name in growing:
                for expected in growing.pop(name):
                    self._grow(expected)
            found = self._having.get(name)
            if found is None:
                break
            if count and len(found) < len(engines):
                levels.append((named_tokens(count), engines))
            engines = found
            count += 1
        if count:
            levels.append((named_tokens(count), engines))
        levels.reverse()
        return self._with_tiers(names, levels) if self._own or self._shared else levels

    def held_tokens(self, names: Iterable[bytes], number: int) -> int:
        """Returns how many tokens of a prompt an engine need not compute: it has them cached, or loads them."""
        is_own, is_shared = (price is not None and price.share < 1 for price in (self._own, self._shared))
        count = 0
        for name in names:
            having, left = self._having.get(name, NOBODY), self._left.get(name, NOBODY)
            if not (number in having or (is_own and number in left) or (is_shared and (having or left))):
                break
            count += 1
        return named_tokens(count)

    def _with_tiers(self, names: Iterable[bytes], levels: list[Level]) -> list[Level]:
        """Returns the levels of a prompt with what engines may load beyond."""
        kept: list[Set[int]] = []
        for name in names:
            left = self._left.get(name)
            if left is None and name not in self._having:
                break
            kept.append(left or NOBODY)
        if len(kept) and self._shared is not None:
            deepest, gain = named_tokens(len(kept)), self._shared.gain
            found = [(cached + gain(deepest - cached), engines) for cached, engines in levels]
            found.append((gain(deepest), self._engines.keys()))
        else:
            found = levels[:]
        if self._own is not None:
            found += self._own_levels(kept, levels, self._own)
        return sorted((level for level in found if level[0]), key=lambda level: -level[0])

    def _own_levels(self, kept: Sequence[Set[int]], levels: Sequence[Level], price: StorePrice) -> Iterator[Level]:
        """The levels of engines whose own store has more of a prompt than their cache: `kept` by the prompt's names."""
        seen: set[int] = set()
        rest = MOST_LEVELS
        for count in range(len(kept), 0, -1):
            if rest and len(kept[count - 1]) > len(seen):
                rest -= 1
                engines, tokens = kept[count - 1] - seen, named_tokens(count)
                seen.update(engines)
                for cached, having in levels[:MOST_LEVELS]:
                    if cached < tokens and (both := engines & having):
                        yield cached + price.gain(tokens - cached), both
                yield price.gain(tokens), engines

    def names_of(self, number: int) -> Set[bytes]:
        """The names that an engine has told."""
        engine = self._engines.get(number)
        return frozenset() if engine is None else engine.told

    def check_integrity(self) -> None:
        """Raise AssertionError unless both directions agree."""
        having: dict[bytes, set[int]] = {}
        for number, engine in self._engines.items():
            assert all(count > 0 for count in engine.expected.values())
            assert not engine.told & engine.left.keys()
            assert all(number in self._left[name] for name in engine.left)
            for name in engine.told | engine.expected.keys():
                having.setdefault(name, set()).add(number)
        assert having == self._having, "the index does not have what the engines have"
        assert sum(map(len, self._left.values())) == sum(len(engine.left) for engine in self._engines.values())
        for name, growing in self._growing.items():
            assert growing
            for expected in growing:
                assert expected.names[-1] == name and self._engines[expected.number] is expected.engine

    def _grow(self, expected: Expected) -> None:
        """The engine will have the next name, too."""
        name = next(expected.rest, None)
        if name is not None:
            expected.names.append(name)
            counts = expected.engine.expected
            counts[name] = counts.get(name, 0) + 1
            self._having.setdefault(name, set()).add(expected.number)
            self._growing.setdefault(name, []).append(expected)

    def _keep_growing(self, name: bytes, which: Callable[[Expected], bool]) -> None:
        kept = [expected for expected in self._growing.pop(name, ()) if which(expected)]
        if kept:
            self._growing[name] = kept

    def _forget(self, engine: _Engine, name: bytes, number: int) -> None:
        """The engine's tier keeps the pages of a name no more, or its cache has them again."""
        del engine.left[name]
        self._left[name].remove(number)
        if not self._left[name]:
            del self._left[name]

    def _leave(self, name: bytes, number: int) -> None:
        having = self._having[name]
        having.remove(number)
        if not having:
            del self._having[name]


class EnginePrefixes:
    """The prefixes of one engine."""

    def __init__(self, index: PrefixIndex, number: int) -> None:
        self._index = index
        self.number = number

    def begin(self) -> None:
        """The engine was asked to tell what it has."""
        self._index.begin(self.number)

    def drop(self) -> None:
        """The engine has none any more, or is gone."""
        self._index.drop(self.number)

    def hear(self, changes: CacheChanges) -> bool:
        """Takes what the engine tells. False: messages are missing, and it must be asked again."""
        return self._index.hear(self.number, changes)

    def expect(self, names: Iterable[bytes]) -> Expected | None:
        """The engine gets a request with these names; see `withdraw`."""
        return self._index.expect(self.number, names)

    def withdraw(self, expected: Expected) -> None:
        """The request has begun or ended: what the engine has of it, it has told."""
        self._index.withdraw(expected)
