"""Step graphs that compute a step again in place of a replay, for devices without CUDA graphs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvern.request.step import ScheduledTokens
from kvern.runner.cuda_graph import DecodedStep
from kvern.runner.prompt_graphs import PromptGraphs
from kvern.runner.verify_graphs import VerifiedStep, VerifyGraphs, VerifyStep
from kvern.sample.logprobs import DeviceLogprobs


class RepeatedPromptGraphs(PromptGraphs):
    """Repeats steps by computing them again, where there is no device that could."""

    used: list[bool]
    """Of each step, whether it had decodes."""

    def _record(self, step: Callable[[], DecodedStep | None]) -> tuple[Callable[[], None], DecodedStep | None]:
        outputs = step()
        assert (outputs is not None) == self._samples

        def replay() -> None:
            for target, source in zip(outputs or (), step() or (), strict=True):
                target.copy_(source)

        return replay, outputs

    def run(self, scheduled: Any, room: Any) -> Any:
        replayed = super().run(scheduled, room)
        if replayed is None:
            return None
        self.used.append(any(item.count == 1 for item in scheduled))
        graph, count = replayed
        if graph.outputs is None:
            return replayed
        # Results are copied from a GPU before the next replay; here they would be read behind it.
        return dataclasses.replace(graph, outputs=DecodedStep(*(output.clone() for output in graph.outputs))), count


class RepeatedVerifyGraphs(VerifyGraphs):
    """Repeats steps by computing them again, where there is no device that could."""

    used: list[tuple[VerifyStep, Sequence[ScheduledTokens]]]

    def _record(self, step: Callable[[], DecodedStep]) -> tuple[Callable[[], None], DecodedStep]:
        outputs = step()

        def replay() -> None:
            for target, source in zip(outputs, step(), strict=True):
                target.copy_(source)

        return replay, outputs

    def run(self, scheduled: Sequence[ScheduledTokens], options: bool, adapted: bool) -> VerifiedStep | None:
        verified = super().run(scheduled, options, adapted)
        if verified is None:
            return None
        self.used.append((VerifyStep(0, 0, options, adapted), scheduled))
        # Results are copied from a GPU before the next replay; here they would be read behind it.
        return VerifiedStep(*(part.clone() for part in verified))

    def logprobs(self, count: int, most: int) -> DeviceLogprobs:
        found = super().logprobs(count, most)
        return DeviceLogprobs(*(part.clone() for part in (found.chosen, found.ranks, found.best_ids, found.best)))
