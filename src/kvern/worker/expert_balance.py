"""When experts are placed anew over ranks, and where: decided by the first rank, by the tokens that they have had."""

import logging
import time
from collections.abc import Callable

from kvern.expert_placement import Placement, kept_in_place, place_experts, rank_loads
from kvern.worker.expert_counts import LayerCounts

logger = logging.getLogger("kvern")

LEAST_GAIN = 0.05
"""Of the busiest rank's work over all layers that are moved: what experts are moved for."""


class ExpertBalance:
    """Looks every so many `seconds` at what experts have had since it looked last.

    `count` begins to read, as `ExpertCounts.read`; `placements` are those of the layers whose experts are placed.
    """

    def __init__(
        self,
        count: Callable[[], Callable[[], LayerCounts]],
        placements: dict[int, Placement],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._placements, self._seconds, self._clock = count, placements, seconds, clock
        self._seen: LayerCounts = []
        self._next = clock() + seconds

    def due(self) -> dict[int, Placement]:
        """The layers whose experts are to be placed anew before the next step, which is taken for done; mostly none."""
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + self._seconds
        counts, seen = self._count()(), self._seen
        self._seen = counts
        loads = {layer: _since(counts[layer], seen[layer] if seen else None) for layer in self._placements}
        better = {layer: self._better(layer, load) for layer, load in loads.items()}
        before = sum(max(rank_loads(self._placements[layer], load)) for layer, load in loads.items())
        after = sum(max(rank_loads(better[layer], load)) for layer, load in loads.items())
        if not before or after > (1 - LEAST_GAIN) * before:
            return {}
        moved = {layer: placement for layer, placement in better.items() if placement != self._placements[layer]}
        self._placements |= moved
        logger.info(
            "experts of %d layers change their places: the busiest ranks had %.0f%% more",
            len(moved),
            100 * (before / after - 1),
        )
        return moved

    def _better(self, layer: int, load: list[int]) -> Placement:
        """What suits this load best, or what is."""
        old = self._placements[layer]
        copies = sum(map(len, old)) - len(load)
        new = kept_in_place(old, place_experts(load, len(old), copies))
        return new if max(rank_loads(new, load)) < max(rank_loads(old, load)) else old


def _since(now: list[int], before: list[int] | None) -> list[int]:
    return now if before is None else [later - earlier for later, earlier in zip(now, before, strict=True)]
