"""The memory for KV caches, on which models that are awake agree: who has how many chunks of it.

It is what no model holds for certain: `Residency` counts each with the least that its cache has. A model first gets the
chunks that its requests hold and will probably need, then keeps those that it has, whose prefixes are cached, and then
gets what is left. What lacks at one of these is missing to those that want most of it: all others get it whole. So
memory moves only if somebody needs it. Nothing here has a clock or knows an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheShare:
    """The KV cache of a model, in chunks."""

    chunk_bytes: int
    least: int
    most: int
    has: int
    wanted: int
    """The chunks that its requests hold or will need, by a forecast."""

    @property
    def needed(self) -> int:
        """The chunks that its requests need, as far as it may have them."""
        return min(max(self.wanted, self.least), self.most)

    def above_least(self, chunks: int) -> int:
        """Returns the bytes of so many chunks beyond the least that it has."""
        return max(0, chunks - self.least) * self.chunk_bytes


def agreed(shares: Mapping[str, CacheShare], spare: int, *, needed_alone: bool = False) -> dict[str, int]:
    """Returns the chunks of each model, if caches may take `spare` bytes beyond the least of each.

    `needed_alone`: they get no more than their requests need.
    """
    found = {name: share.least for name, share in shares.items()}
    spare = _pour(shares, found, {name: share.needed for name, share in shares.items()}, spare)
    if not needed_alone:
        had = {name: min(share.has, share.most) for name, share in shares.items()}
        spare = _pour(shares, found, had, spare)
        _pour(shares, found, {name: share.most for name, share in shares.items()}, spare)
    return found


def _pour(shares: Mapping[str, CacheShare], found: dict[str, int], wanted: Mapping[str, int], spare: int) -> int:
    """Gives models as many chunks as they want, or equal parts of `spare` bytes; returns the bytes that are left."""
    lacks = {name: (wanted[name] - has) * shares[name].chunk_bytes for name, has in found.items() if wanted[name] > has}
    ordered = sorted(lacks, key=lambda name: (lacks[name], name))
    for place, name in enumerate(ordered):
        size = shares[name].chunk_bytes
        chunks = min(lacks[name], max(0, spare) // (len(ordered) - place)) // size
        found[name] += chunks
        lacks[name] -= chunks * size
        spare -= chunks * size
    for name in ordered:  # what is too little to be divided
        size = shares[name].chunk_bytes
        chunks = max(0, min(lacks[name], spare)) // size
        found[name] += chunks
        spare -= chunks * size
    return spare


def next_sizes(shares: Mapping[str, CacheShare], spare: int, agreement: Mapping[str, int]) -> dict[str, int]:
    """Returns the new sizes that may be taken now: those that shrink, and of those that grow as many as fit beside what
    others still have."""
    left = spare - sum(share.above_least(max(share.has, share.least)) for share in shares.values())
    found = {}
    for name, share in shares.items():
        chunks = agreement[name]
        if chunks > share.has:
            more = share.above_least(chunks) - share.above_least(share.has)
            if more > left:
                chunks = share.has + max(0, left) // share.chunk_bytes
                more = share.above_least(chunks) - share.above_least(share.has)
            left -= more
        if chunks != share.has:
            found[name] = chunks
    return found
