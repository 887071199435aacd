"""Marks between the parts of a step: a model says which part begins, and who listens in this thread takes the time.

    code of a mark = (1 + layer) * len(PARTS) + part; outside of layers: the part alone

In most steps nobody listens, and a mark is the call of a function.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

PARTS = "other", "embedding", "mixer", "mlp", "collectives", "head", "sampling", "drafting"
OTHER, EMBEDDING, MIXER, MLP, COLLECTIVES, HEAD, SAMPLING, DRAFTING = range(len(PARTS))
OF_LAYERS = frozenset({MIXER, MLP, COLLECTIVES})
"""Parts that belong to the layer in which they begin."""


class Marks:
    """Listens to the marks of a step. `note` is given the code of each.

    `is_usual` is False of a step that does something besides, such as a capture.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self.note = note
        self._layer = 0
        self.part = OTHER
        self.is_usual = True

    def begin(self, part: int) -> None:
        """A part begins here."""
        if part not in OF_LAYERS:
            self._layer = 0
        self.part = part
        self.note(self._layer * len(PARTS) + part)

    def begin_layer(self, index: int) -> None:
        """The layer `index` begins here, with its mixer."""
        self._layer = 1 + index
        self.begin(MIXER)


class TimedMarks(Marks):
    """Takes the host's time at each mark, in nanoseconds."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(self._take)
        self._clock = clock
        self.codes: list[int] = []
        self.times: list[int] = []

    def _take(self, code: int) -> None:
        self.codes.append(code)
        self.times.append(self._clock())

    def add(self, codes: Sequence[int], times: Sequence[int]) -> None:
        """Takes marks of calls that were captured, at which a kernel has taken the time."""
        self.codes += codes
        self.times += times

    def seconds(self) -> dict[int, float]:
        """The seconds from each mark to the next, summed by code; the last mark is the end."""
        found: dict[int, float] = {}
        for code, begun, ended in zip(self.codes, self.times, self.times[1:], strict=False):
            found[code] = found.get(code, 0.0) + (ended - begun) * 1e-9
        return found


class _Listening(threading.local):
    marks: Marks | None = None


_here = _Listening()


def begin(part: int) -> None:
    """Says that a part of the step begins here."""
    if (marks := _here.marks) is not None:
        marks.begin(part)


def begin_layer(index: int) -> None:
    """Says that the layer `index` begins here, with its mixer."""
    if (marks := _here.marks) is not None:
        marks.begin_layer(index)


def enter(part: int) -> int:
    """Says that a part begins here, within another, which is returned; `begin` that one when it goes on."""
    if (marks := _here.marks) is None:
        return OTHER
    outer = marks.part
    marks.begin(part)
    return outer


def is_unusual() -> None:
    """Says that the step does what others of its kind do not, so that its times say nothing about them."""
    if (marks := _here.marks) is not None:
        marks.is_usual = False


def listener() -> Marks | None:
    """Returns who listens in this thread."""
    return _here.marks


@contextmanager
def listened(marks: Marks | None) -> Iterator[None]:
    """Lets `marks` listen in this thread; None: nobody."""
    before, _here.marks = _here.marks, marks
    try:
        yield
    finally:
        _here.marks = before
