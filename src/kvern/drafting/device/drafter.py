"""Drafters on the device, beside the model: draft models, and heads that go on from the states of the model.

    rows --model, sampling, verification--> rows and counts --draft--> rows that go on with drafts, for the next step

The next step may be planned before the drafts are there: the host knows how many it asked for, and never sees them, but
for the first of several stages. It need not: whatever stands in their places, tokens are sampled from the model alone.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

from kvern.device import marks
from kvern.device.transfer import upload
from kvern.models.decoder import LayerInputs
from kvern.ranks.ranks import ALONE, Ranks
from kvern.request.step import ScheduledTokens, SchedulerOutput

if TYPE_CHECKING:
    from kvern.device.device_batch import DeviceBatch
    from kvern.drafting.rejection import Drawn

logger = logging.getLogger("kvern")

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class ComputedStep:
    """A step of R requests and T tokens that was computed: what is kept of its samples stands in the rows.

    `BatchRows.num_computed_tokens` says of each of these rows how many of its tokens are computed. Where something was
    sampled, that is the position of the newest token, which is not.

    scheduled  [R]
    starts     [R] int32: where each began
    kept       [R] int64: how many of the tokens sampled for each are kept; None: all
    hidden     [T, hidden] the model's last states, for a drafter that `reads_hidden`, or what its `inputs` took; for
               others what is at hand
    read       a `StepReader` has read it
    """

    scheduled: Sequence[ScheduledTokens]
    starts: torch.Tensor
    kept: torch.Tensor | None
    hidden: torch.Tensor | None
    read: bool = False

    def last_kept(self) -> torch.Tensor:
        """The last token that is kept of each entry that asks for drafts: indices `[A]` int64 of the T tokens."""
        firsts = accumulate((item.count for item in self.scheduled), initial=0)
        places = [
            (place, first + item.count - 1 - (0 if self.kept is None else item.sampled))
            for place, (item, first) in enumerate(zip(self.scheduled, firsts, strict=False))
            if item.sampled and item.guesses
        ]
        sent = upload([*chain(*zip(*places, strict=True))], torch.int64, self.starts.device).view(2, len(places))
        requests, last = sent.unbind()
        return last if self.kept is None else last + self.kept[requests]


class StepReader(Protocol):
    """The protocol of what reads steps within the graphs that verify drafts, for the drafter that goes on from there.

    inputs      those of a `Drafter`
    tile_sizes  those of an `AttentionBackend`
    """

    inputs: LayerInputs | None

    @property
    def tile_sizes(self) -> Set[int]: ...

    def read(self, batch: "DeviceBatch", hidden: torch.Tensor, sampled: torch.Tensor, kept: torch.Tensor) -> None:
        """Read a step of R runs and T tokens, all of which are sampled behind; without waiting for the device.

        hidden   [T, hidden]  the model's last states; its `inputs` are filled
        sampled  [T] int64    the tokens behind all tokens
        kept     [R] int64    how many of these are kept of each run; of runs that pad anything
        """


class Captures(Protocol):
    """CUDA graphs of one kind, which are captured one by one while nothing runs."""

    missing: deque[Any]
    """The graphs that are not captured yet, the likeliest first."""

    @property
    def priority(self) -> int:
        """When the next one is captured, compared with other kinds: the lowest first."""

    def capture_next(self) -> None:
        """Capture the next one."""


class Drafter(Protocol):
    """One that raises is not asked again: answers go on without drafts."""

    reads_hidden: bool

    @property
    def graphs(self) -> Sequence[Captures]:
        """Its steps as CUDA graphs, by their kinds."""

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """The keys and values of its layers, in the blocks of the first block table."""

    @property
    def inputs(self) -> LayerInputs | None:
        """The inputs of layers that the drafter reads instead of the last states."""

    def prepare(self, output: SchedulerOutput) -> None:
        """The rows have changed as a step says: let what is kept for rows and blocks change with them."""

    def draft(self, step: ComputedStep) -> None:
        """Write drafts into the rows of `step`, without waiting for the device.

        Of an entry that samples as many as its `guesses`, from the position behind the newest token on. Its block table
        has room for keys of all these tokens. A part of a prompt with `guesses` tells that drafts will be wanted behind
        the prompt's end.
        """


@runtime_checkable
class DrawingDrafter(Drafter, Protocol):
    """One that draws its drafts from probabilities, by which more of them can be accepted."""

    drawn: "Drawn | None"
    """The probabilities of the drafts that `draft` has written last; None: they do not count for acceptance."""


@runtime_checkable
class ReadingDrafter(Drafter, Protocol):
    """One that keeps keys of what it reads: it reads prompts and drafts that were right whether or not it is asked."""

    reader: StepReader | None
    """The reader of steps within their graphs; None: the drafter reads after them."""


class GuardedDrafter:
    """A drafter that costs its drafts alone if it raises; None: there is none.

    On several `ranks`, or behind stages, it costs the step: others would compute drafts that it has not written.
    """

    def __init__(
        self, drafter: Drafter | None, clock: Callable[[], float] = time.perf_counter, ranks: Ranks = ALONE
    ) -> None:
        self._drafter = drafter
        self.clock = clock
        self._ranks = ranks
        self.reads_hidden = drafter is not None and drafter.reads_hidden
        self._reads = isinstance(drafter, ReadingDrafter)
        self.caches = () if drafter is None else drafter.caches
        self.inputs = None if drafter is None else drafter.inputs
        self.drawn = drafter.drawn if isinstance(drafter, DrawingDrafter) else None
        """The probabilities that drafts were drawn from, if they are to be used."""
        self.seconds = 0.0
        """The seconds that drafting after the last step took, on a device that the host waits for."""

    @property
    def reader(self) -> StepReader | None:
        return self._drafter.reader if isinstance(self._drafter, ReadingDrafter) else None

    @property
    def graphs(self) -> Sequence[Captures]:
        return () if self._drafter is None else self._drafter.graphs

    def is_asked(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Returns whether something is to be guessed behind a step, or read of it for later."""
        if self._drafter is None:
            return False
        return any(item.guesses or (self._reads and item.count > 1) for item in scheduled)

    def prepare(self, output: SchedulerOutput) -> None:
        if self.drawn is not None:
            self.drawn.forget(slot for slot, *_ in output.drafts)
            self.drawn.forget(item.slot for item in output.joined)
        if self._drafter is not None:
            self._attempt(self._drafter.prepare, output)

    def draft(self, step: ComputedStep) -> None:
        """Draft for a step of which something `is_asked`."""
        begun = self.clock()
        if self._drafter is not None and self.is_asked(step.scheduled):
            marks.begin(marks.DRAFTING)
            with marks.listened(None):  # to the drafter's own parts
                self._attempt(self._drafter.draft, step)
            marks.begin(marks.OTHER)
        self.seconds = self.clock() - begun

    def _attempt(self, call: Callable[[Asked], None], asked: Asked) -> None:
        try:
            if torch.is_inference_mode_enabled():
                call(asked)
                return
            with torch.inference_mode():
                call(asked)
        except Exception:
            if self._ranks.size * self._ranks.stage.count > 1:
                raise
            self._drafter = None
            self.reads_hidden = False
            self.inputs = None
            self.drawn = None
            logger.exception("the drafter fails and is not asked again; answers go on without drafts")
