"""Where steps run. The engine core submits them and collects their results in the same order."""

from concurrent.futures import Future
from typing import Protocol

from kvern.step import ModelRunnerOutput, SchedulerOutput, StepResult


class Runner(Protocol):
    """Runs steps on a device; the result may still be on its way."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start one step."""
        ...

    def abandon(self) -> None:
        """Wait for the device, then forget all steps: every request joins anew. Raises if the device is broken."""
        ...


class Executor(Protocol):
    """Runs steps in the order of their submission."""

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Start a step; the result may arrive later, an exception is the result's."""
        ...

    def abandon(self) -> None:
        """Forget all steps, one of which failed: every request joins anew. Raises if no other step can run."""
        ...


class InProcessExecutor:
    """Starts each step at once, in the calling thread; none after one that could not be started, until `abandon`.

    It would run on rows that lack what that one was to bring, and write to blocks of others.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._error: BaseException | None = None

    def submit(self, output: SchedulerOutput) -> StepResult:
        if self._error is None:
            try:
                return self._runner.execute(output)
            except BaseException as error:
                self._error = error
        failed: Future[ModelRunnerOutput] = Future()
        failed.set_exception(self._error)
        return failed

    def abandon(self) -> None:
        self._error = None
        self._runner.abandon()
