"""Stages of a model (pipeline parallelism, GPipe, https://arxiv.org/abs/1811.06965): each has some of its layers.

tokens --> stage 0: embeddings, layers --> stage 1: layers --> ... --> last stage: layers, norm, scores
"""

import weakref
from collections import deque
from collections.abc import Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from kvern.ranks.process_group import Meeting


class Stage:
    """Number `index` of `count`, which has the model's layers at the places `layers`; None: all.

    `embeds`: a draft head behind the last stage reads embeddings, too. `entries`: the layers of the model whose inputs
    it begins with.
    All stages run the same steps in the same order. A method raises RuntimeError where another stage has ended, or on a
    CPU does not come within the time of the `Meeting`.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        layers: range | None = None,
        *,
        embeds: bool = False,
        entries: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.count = count
        self.layers = layers
        self._embeds = embeds
        self.entries = entries
        self.is_first, self.is_last = index == 0, index == count - 1
        self._groups: list[Any] = []
        self._sending: deque[Any] = deque()

    @property
    def first_layer(self) -> int:
        """The place in the model of the first layer that is here."""
        return 0 if self.layers is None else self.layers.start

    @property
    def earlier_entries(self) -> list[int]:
        """The `entries` that lie in earlier stages, in order: each row comes with the inputs of these layers."""
        return sorted({entry for entry in self.entries if entry < self.first_layer})

    def has_embeddings(self, *, tied: bool) -> bool:
        """Returns whether a table of embeddings is here, which is `tied` to the output layer, or is not."""
        return self.is_first or (self.is_last and (tied or self._embeds))

    def connect(self, meeting: "Meeting", name: str) -> None:
        """Meet the other stages, whose processes call their group by the same name."""
        if self.count > 1:
            from kvern.ranks.process_group import end_with

            self._groups.append(meeting.group(name, self.index, self.count))
            weakref.finalize(self, self._sending.clear)  # they hold the group
            end_with(self, self._groups)

    def abort(self) -> list[Thread]:
        from kvern.ranks.process_group import abort

        return abort(self._groups, awaited=False)

    def send(self, hidden: Tensor) -> None:
        """Hand rows `hidden [T, ...]` to the next stage, without waiting until that takes them."""
        while len(self._sending) >= self.count:  # no more steps are in flight
            self._sending.popleft().wait()
        self._sending.append(self._groups[0].send([hidden.contiguous()], self.index + 1, 0))

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden [T, ...]` with what the stage before sent; a CPU waits for it."""
        self._groups[0].recv([hidden], self.index - 1, 0).wait()
        return hidden


WHOLE = Stage()
