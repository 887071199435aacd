"""An index of pages that lies, is late and forgets, and the pages that a simulated device keeps with it."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

from kvern.cache.messages import PageLoad, PageSave
from kvern.request.store_figures import StoreFigures

Cells = list[list[object]]
"""The contents of the blocks of a page."""


class SimulatedTier:
    """Keeps `capacity` pages, the least recently used first out.

    Of the answers the share `lies` is wrong, of the questions to distant stores so many take a few more calls.
    """

    identity = b""

    def __init__(self, capacity: int, lies: float = 0.0, seed: int = 0) -> None:
        self.capacity = capacity
        self.lies = lies
        self.pages: OrderedDict[bytes, Cells] = OrderedDict()
        self.saved = self.loaded = 0
        self._dice = random.Random(seed)
        self._questions: dict[int, int] = {}
        self._numbers = count()

    def wants(self, key: bytes) -> bool:
        return key not in self.pages or self._lies()

    def source(self, key: bytes) -> str | None:
        return "simulated" if (key in self.pages) is not self._lies() else None

    def pays(self, keys: Sequence[bytes], start: int, end: int) -> bool:
        assert keys and start < end
        return not self._lies()

    def ask(self, keys: Iterable[bytes]) -> int | None:
        if not [*keys] or not self._lies():
            return None
        number = next(self._numbers)
        self._questions[number] = self._dice.randint(0, 5)
        return number

    def answered(self, question: int) -> bool:
        self._questions[question] -= 1
        return self._questions[question] < 0

    def figures(self) -> dict[str, StoreFigures]:
        return {"simulated": StoreFigures()}

    def keep(self, save: PageSave, cells: Cells) -> None:
        """The device's side: a page is saved."""
        self.saved += 1
        self.pages[save.key] = cells
        self.pages.move_to_end(save.key)
        while len(self.pages) > self.capacity:
            self.pages.popitem(last=False)

    def bring(self, loads: Sequence[PageLoad], most: int) -> list[Cells]:
        """The device's side: the leading pages of a load that are there, `most` of them."""
        found: list[Cells] = []
        for load in loads[:most]:
            if load.key not in self.pages:
                break
            self.pages.move_to_end(load.key)
            found.append(self.pages[load.key])
        self.loaded += len(found)
        return found

    def _lies(self) -> bool:
        return self._dice.random() < self.lies
