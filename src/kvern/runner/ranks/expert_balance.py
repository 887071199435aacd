"""When experts are placed anew over ranks, and where: decided by the first rank, by the tokens that they have had."""

import logging
import time
from collections.abc import Callable, Mapping

from kvern.ranks.expert_placement import Placement, kept_in_place, place_experts, rank_loads
from kvern.runner.ranks.expert_counts import LayerCounts

logger = logging.getLogger("kvern")

LEAST_GAIN = 0.05
"""The least share of the busiest rank's work in a layer for which experts are moved."""


class ExpertBalance:
    """Looks every so many `seconds` at what experts have had since it looked last, then has a layer for each step.

    `placements` are those of the layers whose experts are placed.
    """

    def __init__(
        self, placements: Mapping[int, Placement], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._placements = dict(placements)
        self._seconds = seconds
        self._clock = clock
        self._seen: LayerCounts = []
        self._loads: list[tuple[int, list[int]]] = []
        """Layers that were looked at, and not yet decided."""
        self._next = clock() + seconds

    def due(self, count: Callable[[], Callable[[], LayerCounts]]) -> dict[int, Placement]:
        """The layer whose experts are to be placed anew before the next step, which is taken for done; mostly none.

        `count` as `Executor.count_experts`.
        """
        if not self._loads:
            now = self._clock()
            if now < self._next:
                return {}
            self._next = now + self._seconds
            self._look(count())
        layer, load = self._loads.pop()
        old = self._placements[layer]
        new = kept_in_place(old, place_experts(load, len(old), sum(map(len, old)) - len(load)))
        before, after = max(rank_loads(old, load)), max(rank_loads(new, load))
        if not before or after > (1 - LEAST_GAIN) * before:
            return {}
        logger.info("layer %d: experts change their places, the busiest rank has %.0f%%", layer, 100 * after / before)
        self._placements[layer] = new
        return {layer: new}

    def _look(self, read: Callable[[], LayerCounts]) -> None:
        counts, seen = read(), self._seen
        self._seen = counts
        for layer in self._placements:
            earlier = seen[layer] if seen else [0] * len(counts[layer])
            load = [now - before for now, before in zip(counts[layer], earlier, strict=True)]
            self._loads.append((layer, load))
