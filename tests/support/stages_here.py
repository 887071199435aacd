"""All stages of an engine in one process and thread, whose steps are captured and repeated without a GPU."""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.runner.ranks.rank_executors
from kvern.config import EngineConfig
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.ranks.ranks import Ranks
from kvern.ranks.stages import WHOLE, Stage
from kvern.runner.decode_graphs import DecodeKind
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.kernel_backend import KernelBackend
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.plan import Layout
from kvern.runner.ranks.rank_limits import rank_of
from kvern.runner.ranks.rank_wire import (
    AddAdapter,
    Call,
    Found,
    HasRoom,
    LoadWeights,
    RankMessage,
    RunStep,
    TakeMemory,
)
from kvern.runner.startup import Startup
from kvern.runner.step_graphs import PlannedStep, StepOutputs
from kvern.runner.worker import Worker
from tests.support.kernels.repeated_graphs import RecordedGraphs

CPU = torch.device("cpu")


class NearStage(Stage):
    """Hands rows on within the process, as a GPU does: they are read when the stage behind receives, not before."""

    def __init__(
        self, index: int, layers: Sequence[range], on_their_way: list[deque[torch.Tensor]], of_draft: Stage = WHOLE
    ) -> None:
        super().__init__(index, len(layers), layers[index], embeds=of_draft._embeds, entries=of_draft.entries)
        self._on_their_way = on_their_way

    def send(self, hidden: torch.Tensor) -> None:
        self._on_their_way[self.index].append(hidden)

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        sent = self._on_their_way[self.index - 1].popleft()
        assert sent.shape == hidden.shape, "both sides agree on sizes"
        return hidden.copy_(sent)


class OtherStages:
    """A replacement of `RankProcesses`: stages before the last compute a step at once, the last one later."""

    meeting, listener = "", None

    def __init__(
        self, config: EngineConfig, folder: Path, layers: Sequence[range], draft: Path | None, *_: object
    ) -> None:
        spec = spec_from_config(read_config(folder))
        self._ranks = [rank_here(config, index, layers, draft) for index in range(len(layers) - 1)]
        self.workers = [Worker(config, folder, spec, CPU, Startup(), draft, own) for own in self._ranks]
        self._rooms: list[HasRoom] = []

    def answers(self, kind: type[RankMessage], *_: Any) -> list[Any]:
        if kind is Found:
            return [Found(worker.probe()) for worker in self.workers]
        return self._rooms if kind is HasRoom else []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """None of them ends by itself."""
        yield

    def send(self, message: RankMessage) -> None:
        for worker, ranks in zip(self.workers, self._ranks, strict=True):
            match message:
                case LoadWeights(plan):
                    self._rooms.append(HasRoom(worker.load(plan)))
                case TakeMemory(layout):
                    worker.build(layout)
                case RunStep(output):
                    worker.runner.execute(output).result()
                case Call("forget"):
                    worker.runner.abandon()
                case Call("idle"):
                    worker.runner.idle()
                    ranks.meet(CPU)
                case Call("begin_counting"):
                    worker.begin_counting()
                case Call("count_experts"):
                    worker.count_experts()
                case Call("drop_adapter", (key,)):
                    worker.adapters.drop(key)
                case AddAdapter() as adapter:
                    worker.adapters.add(adapter.key, adapter.adapter())

    def end(self) -> None:
        pass


def rank_here(config: EngineConfig, index: int, layers: Sequence[range], draft: Path | None) -> Ranks:
    """The only rank of a stage."""
    return Ranks(stage=NearStage(index, layers, _ON_THEIR_WAY, rank_of(config, index, layers, draft).stage))


_ON_THEIR_WAY: list[deque[torch.Tensor]] = []


class NotedGraphs(RecordedGraphs):
    """Notes for how many requests it replays."""

    def __init__(self, kind: DecodeKind, replayed: list[int]) -> None:
        super().__init__(kind)
        self._replayed = replayed

    def run(self, step: PlannedStep) -> StepOutputs | None:
        outputs = super().run(step)
        if outputs is not None:
            self._replayed.append(len(step.scheduled))
        return outputs


def capture_here(patch: pytest.MonkeyPatch, stages: int) -> list[list[int]]:
    """Have engines of so many stages that are made now run here; for how many requests each of them replays steps.

    Runners are in order of stages; of a cache in 8 bits there are as many before, which measure scales.
    """
    _ON_THEIR_WAY[:] = [deque() for _ in range(stages - 1)]
    replayed: list[list[int]] = []
    make = KernelBackend.runner

    def runner(backend: KernelBackend, loaded: LoadedModel, layout: Layout) -> DeviceRunner:
        made = make(backend, loaded, layout)
        replayed.append([])
        made.graphs = [NotedGraphs(DecodeKind(made.model, made.model.attention.prefix_members), replayed[-1])]
        return made

    patch.setattr(KernelBackend, "runner", runner)
    patch.setattr(kvern.runner.ranks.rank_executors, "RankProcesses", OtherStages)
    patch.setattr(kvern.runner.ranks.rank_executors, "rank_of", rank_here)
    patch.setattr(Ranks, "connect", lambda *_, **__: None)
    return replayed
