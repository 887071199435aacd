"""What guesses on the device, beside the model: draft models, and heads that go on from the model's own states.

    rows --model, sampling, verification--> rows and counts --draft--> rows that go on with drafts, for the next step

The next step may be planned before the drafts are there: the host knows how many it asked for, and never sees them. It
need not: whatever stands in their places, tokens are sampled from the model alone.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from kvern.models.decoder import LayerInputs
from kvern.sample.rejection import Drawn
from kvern.step import ScheduledTokens, SchedulerOutput

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
    """

    scheduled: Sequence[ScheduledTokens]
    starts: torch.Tensor
    kept: torch.Tensor | None
    hidden: torch.Tensor | None


class Captures(Protocol):
    """CUDA graphs of one kind; those that are `missing` are captured one after another."""

    @property
    def missing(self) -> deque[Any]:
        """The likeliest first."""
        ...

    def capture_next(self) -> None:
        """Capture the first of them."""
        ...


class Drafter(Protocol):
    """One that raises is not asked again: answers go on without drafts."""

    reads_hidden: bool

    @property
    def graphs(self) -> Captures | None:
        """Its steps as CUDA graphs, which are captured while nothing runs; None: there are none."""
        ...

    @property
    def inputs(self) -> LayerInputs | None:
        """Those of layers that it reads instead of the last states."""

    def prepare(self, output: SchedulerOutput) -> None:
        """The rows have changed as a step says: let what is kept for rows and blocks change with them."""
        ...

    def draft(self, step: ComputedStep) -> None:
        """Write drafts into the rows of `step`, without waiting for the device.

        Of an entry that samples as many as its `guesses`, from the position behind the newest token on. Its block table
        has room for keys of all these tokens. A part of a prompt with `guesses` tells that drafts will be wanted behind
        the prompt's end.
        """
        ...


@runtime_checkable
class DrawingDrafter(Drafter, Protocol):
    """One that draws its drafts from probabilities, by which more of them can be accepted."""

    drawn: Drawn | None
    """Of the drafts that `draft` has written last; None: they are to be accepted as those of others."""


class GuardedDrafter:
    """A drafter that costs its drafts alone if it raises; None: there is none."""

    def __init__(self, drafter: Drafter | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafter, self.clock = drafter, clock
        self.reads_hidden = drafter is not None and drafter.reads_hidden
        self.inputs = None if drafter is None else drafter.inputs
        self.seconds = 0.0
        """What it took to guess behind the last step, on a device that the host waits for."""

    @property
    def drawn(self) -> Drawn | None:
        """What drafts were drawn from, if it is to be used."""
        return self._drafter.drawn if isinstance(self._drafter, DrawingDrafter) else None

    @property
    def graphs(self) -> Captures | None:
        """As of a `Drafter`."""
        return None if self._drafter is None else self._drafter.graphs

    def is_asked(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Whether something is to be guessed behind a step."""
        return self._drafter is not None and any(item.guesses for item in scheduled)

    def prepare(self, output: SchedulerOutput) -> None:
        """What `Drafter` does."""
        if self._drafter is not None:
            self._attempt(self._drafter.prepare, output)

    def draft(self, step: ComputedStep) -> None:
        """What `Drafter` does, for a step behind which something is to be guessed."""
        begun = self.clock()
        if self._drafter is not None and self.is_asked(step.scheduled):
            self._attempt(self._drafter.draft, step)
        self.seconds = self.clock() - begun

    def _attempt(self, call: Callable[[Asked], None], asked: Asked) -> None:
        try:
            with torch.inference_mode():
                call(asked)
        except Exception:
            self._drafter, self.reads_hidden, self.inputs = None, False, None
            logger.exception("the drafter fails and is not asked again; answers go on without drafts")
