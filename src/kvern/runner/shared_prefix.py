"""Groups of decodes that begin with the same blocks, which attention then reads once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvern.kernels.attention_prefix import tiles_for

LEAST_KEYS = 256
LEAST_REQUESTS = 4
"""Below, a pass of its own for the prefix costs more than it saves."""


@dataclass
class PrefixGroups:
    """Tiles of at most `members` requests with a common prefix, as lists for a `SharedPrefix`."""

    members: list[list[int]] = field(default_factory=list)
    tile_keys: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)


def common_length(tables: Sequence[list[int]]) -> int:
    """Returns how many first entries all lists have in common: as many as the least and the greatest of them."""
    least, greatest = min(tables), max(tables)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(least), len(greatest)))


def find_shared_prefixes(
    tables: Sequence[list[int]], starts: Sequence[int], block_size: int, members: int
) -> PrefixGroups | None:
    """Group decodes by the blocks they begin with. None if no group is worth it.

    tables  the blocks of each request, of which it may have more by now
    starts  the position of each request's query: what it shares lies before
    """
    by_first: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        if table:
            by_first.setdefault(table[0], []).append(index)
    groups = PrefixGroups(keys=[0] * len(tables))
    most = tiles_for(len(tables), members)
    for requests in sorted(by_first.values(), key=len, reverse=True):
        needed = -(-len(requests) // members)
        if len(requests) < LEAST_REQUESTS or len(groups.members) + needed > most:
            break
        common = common_length([tables[index] for index in requests])
        keys = min(common * block_size, min(starts[index] for index in requests) // block_size * block_size)
        if keys < LEAST_KEYS:
            continue
        for first in range(0, len(requests), members):
            groups.members.append(requests[first : first + members])
            groups.tile_keys.append(keys)
        for index in requests:
            groups.keys[index] = keys
    return groups if groups.members else None
