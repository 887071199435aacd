"""Where steps run. The engine core submits them and collects their results in the same order."""

from concurrent.futures import Future
from typing import Protocol

from kvern.step import ModelRunnerOutput, SchedulerOutput
from kvern.worker.runner import ModelRunner


class Executor(Protocol):
    """Runs steps in the order of their submission."""

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """Start a step; the result may arrive later, an exception is the future's."""
        ...


class InProcessExecutor:
    """Runs each step at once, in the calling thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self._runner.execute(output))
        except BaseException as error:
            future.set_exception(error)
        return future
