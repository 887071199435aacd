"""The time of the parts and layers of measured steps, as an engine tells it."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

import msgspec


class MeasuredStep(NamedTuple):
    """The seconds of a step by the codes of `device/marks.py`.

    `is_whole`: else it is the share of an earlier pipeline stage.
    """

    step: int
    seconds: Mapping[int, float]
    is_whole: bool = True


class StepTimes(msgspec.Struct, array_like=True, gc=False):
    """Sums over all measured steps of one kind since the engine started.

    `parts`: by name the seconds of each part, and the least that it could take with the whole bandwidth and rate of the
    device; 0: nobody knows. `layers`: the seconds of each layer.
    """

    steps: int = 0
    rows: int = 0
    parts: dict[str, tuple[float, float]] = {}
    layers: list[float] = []

    def since(self, earlier: "StepTimes") -> "StepTimes":
        """Returns what came after earlier sums."""
        parts = {}
        for name in self.parts | earlier.parts:
            seconds, least = self.parts.get(name, (0.0, 0.0))
            before, bound = earlier.parts.get(name, (0.0, 0.0))
            parts[name] = seconds - before, least - bound
        layers = [now - before for now, before in zip_longest(self.layers, earlier.layers, fillvalue=0.0)]
        return StepTimes(self.steps - earlier.steps, self.rows - earlier.rows, parts, layers)

    def plus(self, other: "StepTimes") -> "StepTimes":
        """Returns the sums of both."""
        nothing = StepTimes()
        return self.since(nothing.since(other))


LayerTimes = dict[str, StepTimes]
"""Times by kind of step: `decode`, and `prompt` where tokens of prompts are among them."""
