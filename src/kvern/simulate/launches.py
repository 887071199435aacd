"""Steps that a host launches kernel by kernel, while it cannot see that the step before has ended.

    t    the host begins to launch a step: when the one before the last was seen to have ended
    S    it has launched it: t + the seconds of a launch, or t where a CUDA graph has the step
    D    the device has computed it: its own seconds after the step before, and not before S
    N    the host sees that: at D, or at S of the next step, which it launches meanwhile

A record has N alone. From what costs say of D, times are derived that steps seem to take from one N to the next, and
from those that they seem to have taken what they do take: those between two ends that were seen in time are theirs
together, each as the others of these longer or shorter than thought.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvern.engine.step_load import StepLoad

if TYPE_CHECKING:
    import numpy.typing as npt

USUAL = 25
"""The percentile of times of steps, while the next one was launched, that is the time of a launch: others wait longer,
for the device."""


class StepWork(NamedTuple):
    """The work of a step, on which its time depends."""

    load: StepLoad
    requests: int
    joined: int


class StepSample(NamedTuple):
    """A recorded step: its work, and the seconds from the end of the step before, which it `follows`, or its begin."""

    work: StepWork
    seconds: float
    follows: bool = False


class Launches(NamedTuple):
    """The work of a host while a device computes: the seconds of a step with more than `tokens` of prompts.

    0 tokens: nobody has said which steps these are, and they take no time of their own.
    """

    tokens: int = 0
    seconds: float = 0.0

    def of(self, load: StepLoad) -> float:
        """Returns the seconds in which a step is launched."""
        return self.seconds if 0 < self.tokens < load.prompt else 0.0


def find_launches(samples: Sequence[StepSample], tokens: int) -> Launches:
    """Returns the time of a launch, which is hardly longer than steps seem to take while the next is launched."""
    known = Launches(tokens, 1.0)
    times = [each.seconds for place, each in enumerate(samples[:-1]) if _launched_behind(samples, place, known)]
    return Launches(tokens, float(np.percentile(times, USUAL))) if times else Launches()


def seen(samples: Sequence[StepSample], own: Sequence[float], launches: Launches) -> list[float]:
    """Returns how long steps seem to take that take the device these seconds of their `own`."""
    if not launches.tokens:
        return list(own)
    found = []
    before = last = launched = ended = 0.0  # N of the step before the last and of the last one; S and D of the last one
    for place, (sample, seconds) in enumerate(zip(samples, own, strict=True)):
        begun = max(before, launched)
        if not sample.follows:
            begun = before = last = launched = ended = 0.0
        launched = begun + launches.of(sample.work.load)
        ended = max(max(ended, begun) + seconds, launched)
        now = max(ended, last)
        if _launched_behind(samples, place, launches):
            now = max(now, max(last, launched) + launches.seconds)
        found.append(now - last)
        before, last = last, now
    return found


def scaled(samples: Sequence[StepSample], own: "npt.NDArray[np.float64]", launches: Launches) -> list[float]:
    """Returns what steps have taken the device of their own, as far as the ends that were seen of them tell."""
    found: list[float] = []
    first = 0
    guesses = seen(samples, own.tolist(), launches)
    for place in range(len(samples)):
        if not _launched_behind(samples, place, launches):
            together = slice(first, place + 1)
            ratio = sum(each.seconds for each in samples[together]) / max(sum(guesses[together]), 1e-12)
            found += (own[together] * ratio).tolist()
            first = place + 1
    return found


def _launched_behind(samples: Sequence[StepSample], place: int, launches: Launches) -> bool:
    """The step after one of a record was launched, kernel by kernel, before its end could be seen."""
    later = samples[place + 1] if place + 1 < len(samples) else None
    return later is not None and later.follows and launches.of(later.work.load) > 0
