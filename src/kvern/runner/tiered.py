"""Steps with what goes on beside them: pages of a tier are saved before a step and loaded after it, images encoded."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvern.cache.messages import ImageMessage, TierMessage
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.runner.tier import Tier

if TYPE_CHECKING:
    from kvern.ranks.ranks import Ranks
    from kvern.runner.cached_model import EmbeddingSource

Agree = Callable[[list[int]], list[int]]
"""Returns the least of what all ranks have at each place of a list."""

NOT_ENDED = -1
"""A number in the place of the count of a load that is on its way."""


class TieredSteps:
    """Runs steps through `execute`, with their messages to a tier and its reports."""

    def __init__(
        self, execute: Callable[[SchedulerOutput], StepResult], tier: Tier, agree: Agree | None = None
    ) -> None:
        """`agree`: None for a rank that is alone."""
        self._execute = execute
        self._tier = tier
        self._agree = agree
        self._counts: dict[int, int] = {}
        """Returns how many leading pages of each load have arrived; NOT_ENDED while it is on its way.

        The loads and their order are the same on all ranks, since steps alone change them.
        """

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start a step, which may have nothing to compute. Raises what `execute` raises."""
        message = output.message(TierMessage)
        if message is None and not self._counts:
            return self._execute(output)
        for number in () if message is None else message.ended:
            self._counts.pop(number, None)
        if message is not None and message.saves:
            self._tier.save(message.saves)
        try:
            step = self._execute(output)
        finally:
            self._tier.put()
        if message is not None and message.written:
            self._tier.save(message.written)
            self._tier.put()
        if message is not None and message.loads:
            self._counts |= {load.load: NOT_ENDED for load in message.loads}
            self._tier.load(message.loads)
        if not self._counts:
            return step
        if self._agree is None:  # loads that end while the step computes are reported with it
            return Reported(step, TierMessage.extension, self._finished)
        finished = self._finished()
        return Reported(step, TierMessage.extension, lambda: finished)

    def _finished(self) -> list[tuple[int, int]]:
        """The loads that have ended on all ranks, with the least of their counts."""
        self._counts |= {number: count for number, count in self._tier.finished() if number in self._counts}
        counts = list(self._counts.values())
        if self._agree is not None:
            counts = self._agree(counts)
        return [pair for pair in zip(self._counts, counts, strict=True) if pair[1] != NOT_ENDED]


class EncodedSteps:
    """Runs steps through `execute`, after what they encode, and reports what has been."""

    def __init__(
        self, execute: Callable[[SchedulerOutput], StepResult], source: "EmbeddingSource", ranks: "Ranks"
    ) -> None:
        self._execute = execute
        self._source = source
        self._ranks = ranks

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start a step, which may have nothing to compute. Raises what `execute` raises."""
        message = output.message(ImageMessage)
        if message is None:
            return self._execute(output)
        ended = self._source.prepare(message)
        if self._ranks.rank and (failed := [error for _, error in ended if error]):
            raise RuntimeError(failed[0])  # the first rank, which reports, does not know of it
        return Reported(self._execute(output), ImageMessage.extension, lambda: ended)


class Reported:
    """A step's result, with the report of an extension as it is then."""

    def __init__(self, step: StepResult, extension: str, report: Callable[[], object]) -> None:
        self._step = step
        self._extension = extension
        self._report = report

    def done(self) -> bool:
        return self._step.done()

    def result(self) -> ModelRunnerOutput:
        output = self._step.result()
        output.reports[self._extension] = self._report()
        return output


def computing(execute: Callable[[SchedulerOutput], StepResult]) -> Callable[[SchedulerOutput], StepResult]:
    """`execute`, unless there is nothing to compute."""

    def compute(output: SchedulerOutput) -> StepResult:
        return execute(output) if output.scheduled else _Nothing()

    return compute


class _Nothing:
    """The result of a step that computed nothing."""

    def done(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput([], [], [])
