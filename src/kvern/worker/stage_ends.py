"""The ends of a stage whose steps are CUDA graphs, which hold no messages: rows come before a replay and go behind it.

    received --> rows --replay--> what the graph leaves --copied--> sent

All follows the order of the steps on the device: rows are received once the step before has read its own, and copied
before the step behind may overwrite them, so that a message is on its way as long as it takes.
"""

import torch
from torch import Tensor

from kvern.models.decoder import Decoder


class StageEnds:
    """Those of the stage that `decoder` is, for steps of at most `most` rows."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        build = decoder.build
        self._decoder, self._stage = decoder, build.ranks.stage
        self._rows: Tensor | None = None
        if not self._stage.is_first:
            self._rows = torch.zeros(most, decoder.spec.hidden_size, dtype=build.dtype, device=build.device)

    def entered(self, token_ids: Tensor) -> Tensor:
        """What the stage's layers begin with, `[T, width]`: the part of a graph."""
        return self._decoder.entry(token_ids) if self._rows is None else self._rows[: len(token_ids)]

    def receive(self, count: int, size: int) -> None:
        """Have what a graph of `size` rows begins with, the first `count` of them those of the step."""
        if self._rows is None:
            return
        self._stage.receive(self._rows[:count])
        if count < size:  # what the layers left in the others would grow from step to step
            self._rows[count:size] = self._rows[0]

    def hand_on(self, hidden: Tensor) -> None:
        """Send `hidden [T, width]`, which is good until the next step, to the stage behind."""
        self._stage.send(hidden.clone())
