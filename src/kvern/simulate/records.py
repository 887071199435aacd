"""Recorded steps of a real engine: a JSONL file with its sizes, the requests, and the work and time of each step.

    {"kvern_steps": 1, ...}           who was measured, and the sizes by which it decides
    {"request": {...}, "answer": []}  a request of the load, with the tokens of its answer
    {"step": [...]}                   a step, with a checksum of all that was decided for it

With them a simulation is fitted, or replayed: the same scheduler, given the same times, decides the same.
"""

import contextlib
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from kvern.cache.messages import TierMessage
from kvern.engine.step_load import StepLoad, load_of
from kvern.errors import ConfigError
from kvern.io.files import reason
from kvern.loads.request import LoadRequest
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.simulate.engine import DrivenEngine, EngineSizes, PaceSizes, Prompts
from kvern.simulate.executor import Observe, Price, SimulatedExecutor, VirtualClock
from kvern.simulate.launches import StepSample, StepWork
from kvern.simulate.tier_answers import RepeatedTier
from kvern.simulate.timeline import Timeline

FORMAT = 1


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that was measured: its version of kvern, model and hardware, and what it decides by."""

    kvern_steps: int = FORMAT
    version: str
    model: str
    hardware: str
    vocabulary: int
    sizes: EngineSizes
    pace: PaceSizes | None = None
    graph_tokens: int = 0
    """The most tokens of prompts of a step that CUDA graphs have; 0: there are no such steps, or no graphs."""


class RecordedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step: its end since the first request could arrive, its seconds since it began or the one before ended."""

    ended: float
    seconds: float
    load: StepLoad
    requests: int
    joined: int
    decisions: int
    answers: list[Any] = []
    """The answers of a tier since the step before ended, and where waits for it ended."""
    rests: list[float] = []
    report: list[tuple[int, int]] | None = None
    """The loads that had ended: (number, leading pages that came)."""


class RecordedRequest(msgspec.Struct, frozen=True):
    """A request of the load, and the tokens that the model answered."""

    request: LoadRequest
    answer: list[int]


class StepRecord(msgspec.Struct, frozen=True):
    """A whole file."""

    header: RecordHeader
    requests: list[RecordedRequest]
    steps: list[RecordedStep]

    @property
    def load(self) -> list[LoadRequest]:
        """The requests without their answers."""
        return [each.request for each in self.requests]

    @property
    def samples(self) -> list[StepSample]:
        """The work and time of each step."""
        found = []
        before = -1.0
        for step in self.steps:
            if step.requests:
                follows = step.ended - step.seconds <= before + 1e-9
                found.append(StepSample(StepWork(step.load, step.requests, step.joined), step.seconds, follows))
            before = step.ended
        return found


def decisions_of(output: SchedulerOutput) -> int:
    """Returns a checksum of all that was decided for a step: rows, tokens, blocks and pages."""
    joined = [(new.slot, new.block_ids, new.num_computed_tokens) for new in output.joined]
    decided: tuple[Any, ...] = output.request_ids, output.scheduled, joined, output.grown, output.copies
    if (pages := output.message(TierMessage)) is not None:
        loads = [(each.load, each.key, each.tables) for each in pages.loads]  # their patience is a prediction
        decided = *decided, pages.saves, loads, pages.ended
    return zlib.crc32(msgspec.msgpack.encode(decided))


def recorded_step(output: SchedulerOutput, begun: float, ended: float) -> RecordedStep:
    """Returns the record of a step."""
    load = load_of(output.scheduled, output.encoding)
    sizes = len(output.scheduled), len(output.joined)
    return RecordedStep(ended, ended - begun, load, *sizes, decisions_of(output))


def write_steps(record: StepRecord, path: Path) -> None:
    """Writes a record. Raises ConfigError."""
    encode = msgspec.json.Encoder().encode
    lines = [encode(record.header), *map(encode, record.requests), *(encode({"step": step}) for step in record.steps)]
    try:
        path.write_bytes(b"\n".join(lines) + b"\n")
    except OSError as error:
        raise ConfigError(f"the record of steps {path} cannot be written: {reason(error)}") from None


class _Line(msgspec.Struct):
    request: LoadRequest | None = None
    answer: list[int] = []
    step: RecordedStep | None = None


def read_steps(path: Path) -> StepRecord:
    """Reads a record. Raises ConfigError for one that cannot be read, or is of another version."""
    try:
        first, *lines = path.read_bytes().splitlines()
        made = msgspec.json.decode(first, type=dict[str, msgspec.Raw]).get("kvern_steps", b"none")
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "its first line is no JSON object"
        raise ConfigError(f"the record of steps {path} cannot be read: {why}") from None
    if bytes(made) != b"%d" % FORMAT:
        raise ConfigError(
            f"{path} is a record of steps of format {bytes(made).decode()}, and this kvern reads {FORMAT}: record anew "
            "with kvern bench steps"
        )
    requests, steps = list[RecordedRequest](), list[RecordedStep]()
    decoder = msgspec.json.Decoder(_Line)
    number = 1
    try:
        header = msgspec.json.decode(first, type=RecordHeader)
        for line in lines:
            number += 1
            found = decoder.decode(line)
            if found.request is not None:
                requests.append(RecordedRequest(found.request, found.answer))
            elif found.step is not None:
                steps.append(found.step)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}, line {number}: it is no record of a step or request: {error}") from None
    return StepRecord(header, requests, steps)


class _ReplayedExecutor(SimulatedExecutor):
    """Takes the recorded time for each step, gives the recorded tokens, and compares what is decided."""

    def __init__(self, clock: VirtualClock, record: StepRecord, observe: Observe) -> None:
        super().__init__(clock, _NoPrice(), observe)
        if (tier := record.header.sizes.tier) is not None:
            answers = chain.from_iterable(step.answers for step in record.steps)
            stores = [store.name for store in tier.stores]
            self.tier = RepeatedTier(bytes.fromhex(tier.identity), stores, answers)
        self.other: int | None = None
        """The number of the first step that was decided otherwise."""
        self.count = 0
        self._record = record

    def submit(self, output: SchedulerOutput) -> StepResult:
        """See `SimulatedExecutor`. Raises _NoMore for steps that the record does not have."""
        if self.count > len(self._record.steps):
            raise _NoMore
        return super().submit(output)

    def end_of(self, output: SchedulerOutput, begun: float) -> float:
        """Returns the recorded end."""
        place = min(self.count, len(self._record.steps) - 1)
        step = self._record.steps[place]
        if self.other is None and (place < self.count or step.decisions != decisions_of(output)):
            self.other = self.count + 1
        self.count += 1
        return step.ended

    def end(self, output: SchedulerOutput, submitted: float) -> ModelRunnerOutput:
        """See `SimulatedExecutor`; the tier reports what it did then."""
        found = super().end(output, submitted)
        report = self._record.steps[min(self.count, len(self._record.steps)) - 1].report
        if report is not None:
            found.reports[TierMessage.extension] = report
        return found

    def sampled(self, output: SchedulerOutput) -> list[list[int]]:
        """Returns the tokens that the model sampled."""
        found = []
        for item, name in zip(output.scheduled, output.request_ids, strict=True):
            asked = self._record.requests[int(name.removesuffix("#0"))]
            place = item.start + item.count - asked.request.prompt_tokens
            found.append([asked.answer[min(place, len(asked.answer) - 1)]] if item.sampled else [])
        return found


class _NoMore(Exception):
    """More steps are decided than there were."""


class _RecordedClock(VirtualClock):
    """Waits for a tier end when they did."""

    def __init__(self, rests: Iterator[float]) -> None:
        super().__init__()
        self._rests = rests

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self.reach(next(self._rests, self.now + seconds))


class _NoPrice(Price):
    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        raise AssertionError("a replayed step has its time")


class Replay(msgspec.Struct, frozen=True):
    """The outcome of a replay: how many steps were decided, and the first that differs, from 1 on; None: none does."""

    steps: int
    recorded: int
    differs: int | None


def replay(record: StepRecord, sizes: EngineSizes | None = None) -> Replay:
    """Runs the requests of a record with the times of its steps; `sizes`: other than those of its engine."""
    clock, timeline = _RecordedClock(chain.from_iterable(step.rests for step in record.steps)), Timeline()
    executor = _ReplayedExecutor(clock, record, timeline.ended)
    engine = DrivenEngine(sizes or record.header.sizes, clock, executor, timeline, record.header.pace)
    with contextlib.suppress(_NoMore):
        engine.run(record.load, Prompts(record.header.vocabulary))
    steps = len(record.steps)
    other = executor.other
    if other is None and executor.count != steps:
        other = min(executor.count, steps) + 1
    return Replay(executor.count, steps, other)
