"""The tier of the first rank decides for all ranks, each of which keeps its part of the same blocks."""

from collections.abc import Callable, Iterable, Sequence

from kvern.cache.tier import TierIndex
from kvern.ranks.ranks import Ranks
from kvern.runner.ranks.rank_wire import TierCall


class NotedTier:
    """A tier that decides for all ranks, and notes what it was asked; `before` is called first each time."""

    def __init__(self, tier: TierIndex, before: Callable[[], None]) -> None:
        self._tier, self._before = tier, before
        self._calls: list[TierCall] = []

    def put(self, key: bytes, block: int) -> bool:
        self._before()
        self._calls.append(TierCall("put", [key], block))
        return self._tier.put(key, block)

    def acquire(self, keys: Iterable[bytes]) -> list[bytes]:
        self._before()
        found = self._tier.acquire(keys)
        self._calls.append(TierCall("acquire", found))
        return found

    def release(self, keys: Sequence[bytes]) -> None:
        self._before()
        self._calls.append(TierCall("release", [*keys]))
        self._tier.release(keys)

    def lose(self, keys: Sequence[bytes]) -> None:
        self._before()
        self._calls.append(TierCall("lose", [*keys]))
        self._tier.lose(keys)

    def taken(self) -> list[TierCall]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        return calls


def follow(tier: TierIndex, ranks: Ranks, calls: Iterable[TierCall]) -> None:
    """Ask a rank's tier what the first one's was asked, about the rank's own keys."""
    for call in calls:
        keys = [ranks.own(key) for key in call.keys]
        if call.method == "put":
            tier.put(keys[0], call.block)
        else:
            getattr(tier, call.method)(keys)
