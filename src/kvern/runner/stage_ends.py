"""The ends of a stage whose steps are CUDA graphs, which hold no messages: rows come before a replay and go behind it.

    received --> rows --replay--> what the graph leaves --copied--> sent

All follows the order of the steps on the device: rows are received once the step before has read its own, and copied
before the step behind may overwrite them, so that a message is on its way as long as it takes.
"""

from torch import Tensor

from kvern.layers.stages import ReceivedRows
from kvern.models.decoder import Decoder


class StageEnds:
    """The ends of the stage that `decoder` is, for steps of at most `most` rows."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        self._entry, self._stage = decoder.entry, decoder.build.ranks.stage
        self._rows = self._entry.room(most).zero_() if isinstance(self._entry, ReceivedRows) else None

    def entered(self, token_ids: Tensor) -> Tensor:
        """The rows that the layers of the stage begin with, `[T, width]`: this is part of a graph."""
        if isinstance(self._entry, ReceivedRows) and self._rows is not None:
            # A kernel that waits for the one that describes the batch, as those behind read that before they wait.
            return self._entry.taken(self._rows[: len(token_ids)].mul(1))
        embedded: Tensor = self._entry(token_ids)
        return embedded

    def receive(self, count: int, size: int) -> None:
        """Have what a graph of `size` rows begins with, the first `count` of them those of the step."""
        if self._rows is None:
            return
        self._stage.receive(self._rows[:count])
        if count < size:  # they ask for no other experts
            self._rows[count:size] = self._rows[0]

    def hand_on(self, hidden: Tensor) -> None:
        """Send rows `hidden [T, ...]`, which are good until the next step, to the stage behind."""
        self._stage.send(hidden.clone())
