"""An index of pages that lies, is late and forgets, and the pages that a simulated device keeps with it."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any

from kvern.cache.messages import NO_STATE, PageLoad, PageSave, Part
from kvern.request.store_figures import StoreFigures, StorePrice

Cells = list[list[list[object]]]
"""The contents of the blocks of a page in each block table; of a state one list with what it has seen."""


def part_of(load: PageLoad) -> Part:
    """The only part of a page that a message loads."""
    parts = {
        Part.BLOCKS: any(block >= 0 for block in load.tables[0]),
        Part.WINDOWS: any(block >= 0 for block in chain(*load.tables[1:])),
        Part.STATE: load.state != NO_STATE,
        Part.DRAFT: any(block >= 0 for block in load.draft),
    }
    [part] = (part for part, is_there in parts.items() if is_there)
    return part


class SimulatedTier:
    """Keeps `capacity` parts of pages, the least recently used first out.

    Of the answers the share `lies` is wrong, of the questions to distant stores so many take a few more calls.
    """

    identity = b""
    keeps_drafts = True

    def __init__(self, capacity: int, lies: float = 0.0, seed: int = 0) -> None:
        self.capacity = capacity
        self.lies = lies
        self.pages: OrderedDict[tuple[bytes, Part], Cells] = OrderedDict()
        self.saved = self.loaded = self.asked_early = 0
        self.in_line: list[Sequence[tuple[int, int]]] = []
        """What stands before each request that was the next to run."""
        self._dice = random.Random(seed)
        self._questions: dict[int, int] = {}
        self._numbers = count()

    def wants(self, key: bytes, part: Part) -> bool:
        return (key, part) not in self.pages or self._lies()

    def source(self, key: bytes, part: Part) -> str | None:
        return "simulated" if ((key, part) in self.pages) is not self._lies() else None

    def is_saving(self, key: bytes, part: Part) -> bool:
        return False

    def others_saved(self) -> int:
        return 1 << 62

    def pays(
        self,
        pages: Sequence[tuple[str, Part]],
        start: int,
        end: int,
        ahead: Sequence[tuple[int, int]] = (),
        is_next: bool = True,
    ) -> bool:
        assert pages and start < end
        assert all(first <= last for first, last in ahead)
        if is_next:
            self.in_line.append(ahead)
        else:
            self.asked_early += 1
        return not self._lies()

    def patience(self, start: int, end: int) -> float:
        return 0.0

    def ask(self, pages: Iterable[tuple[bytes, Part]]) -> int | None:
        if not [*pages] or not self._lies():
            return None
        number = next(self._numbers)
        self._questions[number] = self._dice.randint(0, 5)
        return number

    def answered(self, question: int) -> bool:
        self._questions[question] -= 1
        return self._questions[question] < 0

    def figures(self) -> dict[str, StoreFigures]:
        return {"simulated": StoreFigures()}

    def prices(self) -> dict[str, StorePrice] | None:
        return None

    def keep(self, save: PageSave, memory: Sequence[Sequence[object]], states: Sequence[object]) -> None:
        """The device's side: parts of a page are saved."""
        cells = [[list(memory[block]) for block in table] for table in save.tables]
        assert not any(cell is None for table in cells for block in table for cell in block), "saved and not written"
        if cells[0]:
            self._keep(save.key, Part.BLOCKS, cells[:1])
        if any(cells[1:]):
            self._keep(save.key, Part.WINDOWS, cells[1:])
        if save.state != NO_STATE:
            self._keep(save.key, Part.STATE, [[[states[save.state]]]])
        if save.draft:
            self._keep(save.key, Part.DRAFT, [[]])

    def _keep(self, key: bytes, part: Part, cells: Cells) -> None:
        self.saved += 1
        self.pages[key, part] = cells
        self.pages.move_to_end((key, part))
        while len(self.pages) > self.capacity:
            self.pages.popitem(last=False)

    def bring(self, loads: Sequence[PageLoad], most: int, memory: list[list[Any]], states: list[Any]) -> int:
        """The device's side: writes the leading parts of a load that are there, `most` of them; how many."""
        came = 0
        for load in loads[:most]:
            name = load.key, part_of(load)
            if name not in self.pages:
                break
            self.pages.move_to_end(name)
            if name[1] is Part.DRAFT:
                pass  # it would only guess better
            elif name[1] is Part.STATE:
                states[load.state] = self.pages[name][0][0][0]
            else:
                tables = load.tables[:1] if name[1] is Part.BLOCKS else load.tables[1:]
                for blocks, kept in zip(tables, self.pages[name], strict=True):
                    for block, cells in zip(blocks, kept, strict=True):
                        if block >= 0:
                            memory[block] = list(cells)
            self.loaded += 1
            came += 1
        return came

    def begin(self, load: PageLoad, memory: list[list[Any]], states: list[Any]) -> None:
        """The device's side: what is to be loaded may be written from now on."""
        for block in chain(*load.tables):
            if block >= 0:
                memory[block] = [None] * len(memory[block])
        if load.state != NO_STATE:
            states[load.state] = None

    def _lies(self) -> bool:
        return self._dice.random() < self.lies
