"""When the tokens of each request came, and the figures of that."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvern.request.request import RequestSpec
from kvern.request.step import ScheduledTokens

if TYPE_CHECKING:
    import numpy.typing as npt

PER_SECOND = 1e6
"""Times between tokens are counted in microseconds, so that those of millions of requests take little memory."""


class Answer:
    """The times of a request's answer, in seconds."""

    __slots__ = ("arrival", "first", "last", "prompt", "tenant", "tokens", "wanted")

    def __init__(self, spec: RequestSpec, arrival: float) -> None:
        self.arrival = arrival
        self.first = self.last = 0.0
        self.prompt, self.wanted = spec.prompt_length, spec.max_tokens
        self.tokens = 0
        self.tenant = spec.owner

    @property
    def ttft(self) -> float:
        """The time to the first token."""
        return self.first - self.arrival

    @property
    def itl(self) -> float:
        """The mean time between tokens; 0 for a single one."""
        return (self.last - self.first) / max(1, self.tokens - 1)

    @property
    def e2e(self) -> float:
        """The time to the last token."""
        return self.last - self.arrival

    @property
    def ended(self) -> bool:
        """All tokens have come."""
        return self.tokens == self.wanted


class Timeline:
    """Is told of arrivals and steps."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.gaps: Counter[int] = Counter()
        """The microseconds between two tokens of a request, with how often each was seen."""
        self.steps = 0
        self._begun: list[str] = []
        self._finished: list[str] = []

    def arrived(self, spec: RequestSpec, moment: float) -> None:
        """Takes note of a request, of one sequence."""
        self.answers[f"{spec.request_id}#0"] = Answer(spec, moment)

    def news(self) -> tuple[list[str], list[str]]:
        """Returns the requests that have had their first and their last token since the call before."""
        found = self._begun, self._finished
        self._begun, self._finished = [], []
        return found

    def ended(self, moment: float, scheduled: Sequence[ScheduledTokens], request_ids: Sequence[str]) -> None:
        """Takes note of the end of a step."""
        answers = self.answers
        before: dict[float, int] = {}
        for item, name in zip(scheduled, request_ids, strict=True):
            if not item.sampled:
                continue
            answer = answers[name]
            if answer.tokens == answer.wanted:
                continue  # a step in flight has ended it
            if answer.tokens:
                last = answer.last
                before[last] = before.get(last, 0) + 1
            else:
                answer.first = moment
                self._begun.append(name)
            answer.last = moment
            answer.tokens += 1
            if answer.tokens == answer.wanted:
                self._finished.append(name)
        for last, count in before.items():
            self.gaps[int((moment - last) * PER_SECOND + 0.5)] += count
        self.steps += 1

    def leapt(self, first: float, last: float, between: "npt.NDArray[np.float64]", request_ids: Sequence[str]) -> None:
        """Takes note of steps that gave each of these requests a token, neither its first nor its last.

        `first`, `last`: the ends of the first and last step; `between`: the seconds from each end to the next.
        """
        answers, gaps = self.answers, self.gaps
        count, rows = 1 + len(between), len(request_ids)
        for name in request_ids:
            answer = answers[name]
            gaps[int((first - answer.last) * PER_SECOND + 0.5)] += 1
            answer.last = last
            answer.tokens += count
        for gap, steps in Counter((between * PER_SECOND + 0.5).astype(np.int64).tolist()).items():
            gaps[gap] += steps * rows
        self.steps += count


def weighted_percentiles(values: Mapping[int, int], percents: Sequence[float]) -> list[float]:
    """Returns percentiles of values, at least one, that were seen several times each, as `np.percentile` does."""
    ordered = np.array(sorted(values))
    ends = np.cumsum([values[value] for value in ordered.tolist()])
    found = []
    for percent in percents:
        place = percent / 100 * (int(ends[-1]) - 1)
        low = int(place)
        first, second = ordered[np.searchsorted(ends, [low, min(low + 1, int(ends[-1]) - 1)], side="right")]
        found.append(float(first + (place - low) * (second - first)))
    return found


def all_gaps(timelines: Iterable[Timeline]) -> Counter[int]:
    """Returns the microseconds between tokens of several engines."""
    found: Counter[int] = Counter()
    for timeline in timelines:
        found.update(timeline.gaps)
    return found
