"""Where steps run. The engine core submits them and collects their results in the same order."""

from concurrent.futures import Future
from typing import Protocol

from kvern.step import ModelRunnerOutput, SchedulerOutput


class StepResult(Protocol):
    """What a step will have computed; a Future is one."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Runs steps on a device; the result may still be on its way."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start one step."""
        ...


class Executor(Protocol):
    """Runs steps in the order of their submission."""

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Start a step; the result may arrive later, an exception is the result's."""
        ...


class InProcessExecutor:
    """Starts each step at once, in the calling thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, output: SchedulerOutput) -> StepResult:
        try:
            return self._runner.execute(output)
        except BaseException as error:
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed
