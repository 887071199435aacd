"""Executors of the first of several ranks: each step is sent to the others, and this process alone answers."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakMethod

from kvern.adapters.peft import Adapter
from kvern.config import EngineConfig
from kvern.errors import ConfigError, EngineDied
from kvern.models.loader import outline_model
from kvern.models.stages import divide
from kvern.ranks.lost_ranks import Release
from kvern.ranks.ranks import DPAttention, Ranks
from kvern.request.layer_times import MeasuredStep
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.request.weights import WeightsFound, WeightSource
from kvern.runner.device import resolve_device
from kvern.runner.executor import Executor, least_of, tiered
from kvern.runner.plan import Layout, agree, lay_out
from kvern.runner.ranks import rank_wire as wire
from kvern.runner.ranks.experts import LayerCounts
from kvern.runner.ranks.rank_limits import rank_of
from kvern.runner.ranks.rank_processes import RANKS_DISAGREE, RankProcesses, watched_steps
from kvern.runner.startup import Startup
from kvern.runner.tier import Tier
from kvern.runner.worker import Worker
from kvern.spec.model import ModelSpec

Done = TypeVar("Done")


class RankedExecutor(Executor):
    """The first of several ranks, in this process, which sends each step to the others and alone answers.

    A step that fails leaves the ranks in different states, so no other can run.
    """

    def __init__(self, worker: Worker, others: RankProcesses, ranks: Ranks, tier: Tier | None = None) -> None:
        super().__init__(worker, tier)
        # Steps run whole: ranks would cut them in different places.
        self._execute = watched_steps(tiered(worker.runner.execute, tier, worker.runner, ranks), others)
        self._others = others
        self._balance = worker.expert_balance()
        self._ranks = ranks
        self._found: list[WeightsFound] = []
        """The findings of ranks about the newest weights."""
        self._measured: list[MeasuredStep] = []
        """The measurements of earlier stages."""
        self._saved: dict[int, int] = {}
        """The last step whose pages each other rank has saved."""
        if tier is not None:
            saved = WeakMethod(self._others_saved)  # the tier must not keep the ranks' processes alive
            tier.others = lambda: method() if (method := saved()) else 0

    def submit(self, output: SchedulerOutput) -> StepResult:
        self._announce(output)
        return self._start(output)

    def _announce(self, output: SchedulerOutput) -> None:
        """Have the others run a step, before which experts may change their places."""
        try:
            due = None if self._balance is None else self._others.watched()(self._balance.due)
            if self._error is None and due and (placements := due(self.count_experts)):
                self._on_all(wire.PlaceExperts(placements), partial(self._worker.place_experts, placements))
        except BaseException as error:
            self._error = error
        if self._error is None:
            self._others.send(wire.RunStep(output))

    def _on_all(self, message: wire.RankMessage, function: Callable[[], Done]) -> Done:
        """Call a function after the steps so far; the message has the other ranks do the same."""
        self._others.send(message)
        self._begin_all()
        try:
            if self._error is not None:
                raise self._error
            return self._others.watched()(function)()
        except BaseException as error:
            raise self._others.give_up() from error

    def _begin_all(self) -> None:
        """Begin the steps that were submitted: they are begun."""

    def begin_counting(self) -> None:
        self._others.send(wire.Call("begin_counting"))
        super().begin_counting()

    def count_experts(self) -> Callable[[], LayerCounts]:
        count = super().count_experts  # without stages this rank knows of all rows
        return self._others.watched()(
            count() if self._ranks.stage.count == 1 else self._on_all(wire.Call("count_experts"), count)
        )

    def abandon(self) -> None:
        cause, self._error = self._error, self._others.give_up()
        raise self._error from cause

    def forget(self) -> None:
        self._others.send(wire.Call("forget"))
        super().forget()

    def idle(self) -> bool:
        self._others.send(wire.Call("idle"))
        prepares = super().idle()
        self._ranks.meet(self._worker.device)  # or the first request would wait for what slower ranks have to do yet
        return prepares

    def sleep(self) -> int:
        self._others.send(wire.Call("sleep"))
        held = super().sleep()
        self._ranks.meet(self._worker.device)
        return held

    def wake(self) -> None:
        self._others.send(wire.Call("wake"))
        super().wake()
        self._ranks.meet(self._worker.device)

    def map_cache(self, blocks: int) -> int:
        self._others.send(wire.Call("map_cache", (blocks,)))
        has = super().map_cache(blocks)
        if self._worker.memory.chunked is None:
            return has
        [least] = least_of(self._ranks, self._worker.runner, [has])
        return least if least == blocks else self.map_cache(least)  # another GPU has no memory for as many

    def release_pages(self, size: int) -> None:
        size = -(-size // self._ranks.processes)
        self._others.send(wire.Call("release_pages", (size,)))
        super().release_pages(size)

    def add_adapter(self, key: int, adapter: Adapter) -> None:
        self._others.send(wire.AddAdapter.of(key, adapter))
        super().add_adapter(key, adapter)

    def drop_adapter(self, key: int) -> None:
        self._others.send(wire.Call("drop_adapter", (key,)))
        super().drop_adapter(key)

    def read_weights(self, version: str, sources: Sequence[WeightSource]) -> None:
        self._found = []
        self._others.send(wire.ReadWeights(version, list(sources)))
        super().read_weights(version, sources)

    def weights_found(self) -> WeightsFound | None:
        """The result of reading new weights, once all ranks have said it: a fault of any is that of all."""
        self._hear()
        if (own := super().weights_found()) is not None:
            self._found.append(own)
        if len(self._found) < self._ranks.processes:
            return None
        found, self._found = self._found, []
        if len({(one.error, one.stamp) for one in found}) > 1 and all(one.error is None for one in found):
            return WeightsFound("the files of the weights have changed while they were read: write them before")
        return next((one for one in found if one.error is not None), found[-1])

    def _hear(self) -> None:
        """Take what other ranks have said."""
        for said in self._others.watched()(self._others.come)():
            if isinstance(said, wire.FoundWeights) and said.version == self.weights.version:
                self._found.append(said.found)
            elif isinstance(said, wire.Saved):
                self._saved[said.rank] = said.step
            elif isinstance(said, wire.Measured):
                self._measured.append(MeasuredStep(said.step, said.seconds, is_whole=False))

    def _others_saved(self) -> int:
        """See `TierIndex`."""
        self._hear()
        return min(self._saved.values()) if len(self._saved) == self._ranks.processes - 1 else 0

    def measured(self) -> list[MeasuredStep]:
        if self._ranks.stage.count > 1:
            self._hear()
        others, self._measured = self._measured, []
        return [*super().measured(), *others]

    def take_weights(self) -> None:
        self._on_all(wire.Call("take_weights"), super().take_weights)

    def drop_weights(self) -> None:
        self._found = []
        self._others.send(wire.Call("drop_weights"))
        super().drop_weights()


class StagedExecutor(RankedExecutor):
    """The last of several stages on CPUs, which begins a step when its result is asked for.

    It has to wait for the stage before, and meanwhile others can begin.
    """

    _dropped: tuple[int, ...] = ()
    """Adapters that steps which have not begun may load."""
    _later: Sequence["_LaterStep"] = ()
    """Steps of which some have not begun."""

    def submit(self, output: SchedulerOutput) -> StepResult:
        self._announce(output)
        dropped, self._dropped = self._dropped, ()
        step = _LaterStep(partial(self._begin, output, dropped))
        self._later = [*(other for other in self._later if not other.has_begun), step]
        return step

    def _begin_all(self) -> None:
        for step in self._later:
            step.begin()

    def drop_adapter(self, key: int) -> None:
        self._others.send(wire.Call("drop_adapter", (key,)))
        self._dropped += (key,)

    def _begin(self, output: SchedulerOutput, dropped: Iterable[int]) -> StepResult:
        for key in dropped:
            self._worker.adapters.drop(key)
        return self._start(output)


class DPAttentionExecutor(Executor):
    """The executor of a rank in DP attention, whose steps are parts of steps of all ranks: one in each turn.

    In a turn the rank starts a step or none, then it ends the turn. If a step fails, no other can run.
    """

    def __init__(
        self, worker: Worker, dp_attention: DPAttention, others: RankProcesses | None, tier: Tier | None
    ) -> None:
        """`others`: those behind the first, which this one is; None: it is one of them. `tier`: of its own blocks."""
        super().__init__(worker, tier)
        self.others = others
        self._dp_attention = dp_attention
        self._has_started = False
        execute = tiered(self._execute_part, tier, worker.runner)
        self._execute = execute if others is None else watched_steps(execute, others)
        self._balance = None if others is None else worker.expert_balance()

    def _execute_part(self, output: SchedulerOutput) -> StepResult:
        self._has_started = True
        self._dp_attention.agree(output.token_count, self._worker.runner.size(output))
        return self._worker.runner.execute(output)

    def begin_turn(self) -> None:
        """Have all ranks place experts anew before the turn that the first is about to call, if that is due."""
        assert self.others is not None
        if self._balance and (placements := self.others.watched()(self._balance.due)(self.count_experts)):
            self.others.send(wire.PlaceExperts(placements))
            self.others.watched()(self._worker.place_experts)(placements)

    def end_turn(self) -> None:
        """Take part in the others' step, if this rank has not started its own part of it."""
        if not self._has_started and self._dp_attention.agree(0, (0, 0, False)):
            self._worker.runner.assist()
        self._has_started = False

    def abandon(self) -> None:
        cause = sys.exception() or self._error  # the first may have come of a step on its way
        if self.others is None and cause is not None:
            raise cause
        self._error = EngineDied(RANKS_DISAGREE) if self.others is None else self.others.give_up()
        raise self._error from cause


class _LaterStep:
    """A step that begins when its result is asked for."""

    def __init__(self, begin: Callable[[], StepResult]) -> None:
        self._begin = begin
        self._step: StepResult | None = None

    @property
    def has_begun(self) -> bool:
        return self._step is not None

    def begin(self) -> StepResult:
        if self._step is None:
            self._step = self._begin()
        return self._step

    def done(self) -> bool:
        return True  # nothing else is to be waited for before it begins

    def result(self) -> ModelRunnerOutput:
        return self.begin().result()


def start_ranks(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    startup: Startup,
    draft: Path | None,
    lost: Callable[[int], None] | None,
) -> tuple[Executor, Layout]:
    """The executor of the first of several ranks, as of `start`; all of them run. `lost`: as in `RankProcesses`."""
    layers = [range(len(spec.layers))]
    device = resolve_device(config, config.first_rank)
    if config.pipeline_parallel_size > 1:
        given = config.dtype, config.load_format, config.quantization
        outline = outline_model(folder, *given, int8_head=config.has_int8_head(device.type))
        layers = divide(outline, config.pipeline_parallel_size)
    ranks = rank_of(config, config.first_rank, layers, draft)
    worker = Worker(config, folder, spec, device, startup, draft, ranks)
    release = Release(ranks, device, worker) if device.type == "cuda" else None
    others = RankProcesses(config, folder, layers, draft, lost, release)
    try:
        begun = time.monotonic()
        findings = worker.probe()
        took = time.monotonic() - begun
        with startup.stage("ranks"):
            others.answers(wire.IsHere, "connected", 0.0)
            # Another machine may have to load them from the hub, which has time limits of its own.
            others.answers(wire.HasFiles, "found its files", math.inf if config.executor == "ray" else took)
            found = others.answers(wire.Found, "looked at its device", took)
            plan = agree([findings, *(answer.findings for answer in found)], config, spec)
            others.send(wire.LoadWeights(plan, others.meeting))
            try:
                ranks.connect(
                    others.meeting,
                    device,
                    config.rank_timeout,
                    plan.kernels,
                    ordered=config.deterministic,
                    listener=others.listener,
                )
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"the ranks cannot meet: {error}") from error
        begun = time.monotonic()
        room = worker.load(plan)
        answers = others.answers(wire.HasRoom, "loaded its weights", time.monotonic() - begun)
        layout = lay_out([room, *(answer.room for answer in answers)], plan, config)
        others.send(wire.TakeMemory(layout))
        begun = time.monotonic()
        worker.build(layout)
        tier = worker.make_tier(layout)
        others.answers(wire.IsReady, "taken its memory", time.monotonic() - begun)
    except BaseException:
        others.end()
        raise
    if ranks.dp_attention is not None:
        return DPAttentionExecutor(worker, ranks.dp_attention, others, tier), layout
    make = StagedExecutor if len(layers) > 1 and device.type == "cpu" else RankedExecutor
    return make(worker, others, ranks, tier), layout
