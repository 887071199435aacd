"""A runner whose steps raise where marked prompts come to a certain length."""

from typing import Any

from kvern import LLM, AsyncLLM
from kvern.step import ModelRunnerOutput, SchedulerOutput
from kvern.worker.executor import InProcessExecutor

MARKS = {250: 0, 251: 1, 252: 3}
"""By token id that marks a prompt: beyond so many generated tokens, its steps fail."""


def unreadable() -> ModelRunnerOutput:
    raise RuntimeError("as\nplanned")


class FailingRunner:
    """Runs steps through the engine's own runner; `where` they fail: "before", "behind" or in the "result"."""

    def __init__(self, llm: LLM | AsyncLLM, where: str = "behind") -> None:
        core: Any = llm._engine.core
        worker = core.executor._worker
        self._runner, worker.runner = worker.runner, self
        core.executor = InProcessExecutor(worker, core.executor.tier)
        self._where = where
        self._limits: dict[int, int] = {}
        self.failures = 0

    def execute(self, output: SchedulerOutput) -> Any:
        limits = dict(self._limits)
        for fork in output.forked:
            self._limits[fork.slot] = limits[fork.source]
        for request in output.joined:
            prompt = request.spec.prompt.token_ids
            self._limits[request.slot] = min(
                (len(prompt) + MARKS[mark] for mark in MARKS if mark in prompt), default=999
            )
        fails = any(item.start + item.count > self._limits[item.slot] - 1 for item in output.scheduled)
        self.failures += fails
        if fails and self._where == "before":
            raise RuntimeError("as\nplanned")
        result = self._runner.execute(output)
        if fails and self._where == "behind":
            raise RuntimeError("as\nplanned")
        for part in getattr(result, "_parts", [result]) if fails else ():
            part.result = unreadable
        return result

    def idle(self) -> bool:
        return self._runner.idle()

    def abandon(self) -> None:
        self._runner.abandon()
