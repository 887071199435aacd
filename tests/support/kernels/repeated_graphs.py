"""Graphs of steps where there is no GPU to capture them: a replay computes the step again, into the same memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvern.runner.step_graphs import PlannedStep, StepGraphs, StepOutputs


class RepeatedSteps:
    """A replacement of `GraphMemory`; `before` is called before each replay, which is recorded by its shape."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before
        self.replayed: list[Any] = []

    def capture(self, step: "partial[StepOutputs]") -> tuple[Callable[[], None], StepOutputs]:
        outputs = step()

        def replay() -> None:
            self._before()
            self.replayed.append(step.args[0])
            for target, source in zip(outputs, step(), strict=True):
                if isinstance(target, torch.Tensor):
                    target.copy_(source)

        return replay, outputs


class RecordedGraphs(StepGraphs[Any, Any]):
    """Graphs of a kind, all of them captured, which note the steps that they replay."""

    def __init__(self, kind: Any, memory: Any = None, wanted: Callable[[Any], bool] = lambda shape: True) -> None:
        self.memory = memory or RepeatedSteps()
        super().__init__(kind, self.memory)
        self.used: list[PlannedStep] = []
        with torch.inference_mode():
            while self.missing and wanted(self.missing[0]):
                self.capture_next()

    def run(self, step: PlannedStep, captured: Mapping[Any, Any] | None = None) -> StepOutputs | None:
        outputs = super().run(step, captured)
        if outputs is None:
            return None
        self.used.append(step)
        # Results are copied from a GPU before the next replay; here they would be read after it.
        return StepOutputs(*map(_copied, outputs))


def _copied(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.clone()
    return tuple(map(_copied, part)) if isinstance(part, Sequence) else part
