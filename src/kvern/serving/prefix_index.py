"""The server's index of cached prefixes: from a name (`cache/prefix_names.py`) to the engines that have it.

CacheChanges 0, 1, 2 ... of an engine --hear--> names that it has
a request is given to an engine ------expect--> names that it will have soon, until `withdraw`
the engine ends ------------------------drop--> it has none
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

from kvern.cache.prefix_names import named_tokens
from kvern.serving.wire import CacheChanges

Level = tuple[int, Set[int]]
"""Cached tokens of a prompt, and the engines that have so many of them or more."""


class _Engine:
    """The names of one engine: `told` by it, and `expected` of it for so many requests."""

    def __init__(self) -> None:
        self.told: set[bytes] = set()
        self.expected: Counter[bytes] = Counter()
        self.next = 0
        """The number of the message that comes next."""


class Expected(NamedTuple):
    """Names that an engine will have soon, of one request."""

    engine: _Engine
    names: Sequence[bytes]


class PrefixIndex:
    """Engines are numbers."""

    def __init__(self) -> None:
        self._having: dict[bytes, set[int]] = {}
        self._engines: dict[int, _Engine] = {}

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

    def hear(self, number: int, changes: CacheChanges) -> bool:
        """Takes what an engine tells. False: messages are missing, and it must be asked again."""
        engine = self._engines.get(number)
        if engine is None or (changes.number and not engine.next):
            return True  # of before it was asked
        if changes.number != engine.next:
            return False
        engine.next += 1
        for name in changes.removed:
            if name in engine.told:
                engine.told.remove(name)
                if name not in engine.expected:
                    self._leave(name, number)
        engine.told.update(changes.stored)
        for name in changes.stored:
            self._having.setdefault(name, set()).add(number)
        return True

    def expect(self, number: int, names: Sequence[bytes]) -> Expected | None:
        """An engine gets a request with these names; returns what to `withdraw` once it has told of them, if any."""
        engine = self._engines.get(number)
        coming = [] if engine is None else [name for name in names if name not in engine.told]
        if engine is None or not coming:
            return None
        engine.expected.update(coming)
        for name in coming:
            self._having.setdefault(name, set()).add(number)
        return Expected(engine, coming)

    def withdraw(self, number: int, expected: Expected) -> None:
        """The request has begun or ended: what the engine has of it, it has told."""
        engine = expected.engine
        if self._engines.get(number) is not engine:
            return
        for name in expected.names:
            engine.expected[name] -= 1
            if not engine.expected[name]:
                del engine.expected[name]
                if name not in engine.told:
                    self._leave(name, number)

    def levels(self, names: Sequence[bytes]) -> list[Level]:
        """Returns who has how much of a prompt, the most first.

        An engine that has a name has those before it: each set is within the next one, and few names are looked at.
        """
        having, levels = self._having, list[Level]()
        count = bisect_left(names, True, key=lambda name: name not in having)
        while count:
            engines = having[names[count - 1]]
            levels.append((named_tokens(count), engines))
            size = len(engines)
            count = bisect_left(names, True, 0, count - 1, key=lambda name: len(having.get(name, ())) <= size)
        return levels

    def cached_tokens(self, number: int, names: Sequence[bytes]) -> int:
        """Tokens of a prompt that an engine has."""
        return next((tokens for tokens, having in self.levels(names) if number in having), 0)

    def names_of(self, number: int) -> Set[bytes]:
        """The names that an engine has told."""
        engine = self._engines.get(number)
        return frozenset() if engine is None else engine.told

    def check_integrity(self) -> None:
        """Raise AssertionError unless both directions agree."""
        having: dict[bytes, set[int]] = {}
        for number, engine in self._engines.items():
            assert all(count > 0 for count in engine.expected.values())
            for name in engine.told | engine.expected.keys():
                having.setdefault(name, set()).add(number)
        assert having == self._having, "the index does not have what the engines have"

    def _leave(self, name: bytes, number: int) -> None:
        having = self._having[name]
        having.remove(number)
        if not having:
            del self._having[name]


class EnginePrefixes:
    """The prefixes of one engine."""

    def __init__(self, index: PrefixIndex, number: int) -> None:
        self._index = index
        self._number = number

    def begin(self) -> None:
        """The engine was asked to tell what it has."""
        self._index.begin(self._number)

    def drop(self) -> None:
        """The engine has none any more, or is gone."""
        self._index.drop(self._number)

    def hear(self, changes: CacheChanges) -> bool:
        """Takes what the engine tells. False: messages are missing, and it must be asked again."""
        return self._index.hear(self._number, changes)

    def cached_tokens(self, names: Sequence[bytes]) -> int:
        """Tokens of a prompt that the engine has."""
        return self._index.cached_tokens(self._number, names)

    def expect(self, names: Sequence[bytes]) -> Expected | None:
        """The engine gets a request with these names; see `withdraw`."""
        return self._index.expect(self._number, names)

    def withdraw(self, expected: Expected) -> None:
        """The request has begun or ended: what the engine has of it, it has told."""
        self._index.withdraw(self._number, expected)
