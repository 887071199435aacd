"""The loop of an encoder: who goes first, what shares a step, and whose fault a failing step is."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import EngineConfig
from kvern.engine.encoder_core import EncoderCore
from kvern.engine.step_watch import SHORTEST_SILENCE, RunningFile, StepWatch
from kvern.errors import InvalidAdapter
from kvern.request.events import TokenEvent
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.runner.encoder_runner import largest_step

BUDGET, MOST_TEXTS = 10, 4
FAULTY, LATE_FAULTY = 666, 667


class Read:
    """What a reader has read; a fault of the device shows here."""

    def __init__(self, texts: Sequence[PromptInput]) -> None:
        self.texts = texts

    def result(self) -> list[bytes]:
        if any(LATE_FAULTY in text.token_ids for text in self.texts):
            raise RuntimeError("this token was not read")
        return [bytes(text.token_ids) for text in self.texts]


class Reader:
    """Gives back the tokens of texts, and cannot read one token; `abandoned` counts the faults."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.abandoned, self.broken = 0, False

    def start(self, texts: Sequence[PromptInput]) -> Read:
        self.steps.append([text.token_ids[0] for text in texts])
        if any(FAULTY in text.token_ids for text in texts):
            raise RuntimeError("this token cannot be read")
        return Read(texts)

    def abandon(self) -> None:
        self.abandoned += 1
        if self.broken:
            raise RuntimeError("the device is broken")


class Noted(StepWatch):
    """Notes who is in which step; as many end as begin."""

    def __init__(self) -> None:
        super().__init__(RunningFile(Path(os.devnull)), lambda _: None, 60.0)
        self.steps: list[list[str]] = []

    def began(self, request_ids: Sequence[str], now: float, tokens: int | None = None, reach: int = 0) -> None:
        super().began(request_ids, now, tokens, reach)
        assert tokens is not None and tokens >= reach > 0
        self.steps.append(list(request_ids))


class Loop:
    """A core with its reader; texts are named by their first token."""

    def __init__(self, depth: int = 1, **options: Any) -> None:
        self.reader = Reader()
        self.noted = Noted()
        self.core = EncoderCore(self.reader, EngineConfig(**options), BUDGET, MOST_TEXTS, depth, self.noted)

    def add(self, number: int, length: int = 1, *, last: int = 0, **fields: Any) -> None:
        prompt = PromptInput([number] * (length - 1) + [last or number])
        self.core.add(RequestSpec(str(number), prompt, SamplingParams().resolved({}), 1, **fields))

    def run(self) -> list[TokenEvent]:
        events = []
        while self.core.has_work:
            events += self.core.step()
        return events


def test_steps_are_filled_in_the_order_of_arrival() -> None:
    loop = Loop()
    for number, length in enumerate([4, 5, 2, 8, 30, 1, 1, 1, 1, 1]):
        loop.add(number, length)
    events = loop.run()
    assert loop.reader.steps == [[0, 1], [2, 3], [4], [5, 6, 7, 8], [9]]
    assert [event.request_id for event in events] == [f"{number}#0" for number in range(10)]
    assert all(event.finish_reason == "stop" and event.embedding and event.queue_seconds >= 0 for event in events)
    assert events[3].embedding == bytes([3] * 8)
    assert loop.noted.silence == SHORTEST_SILENCE
    assert loop.noted.steps == [[f"{number}#0" for number in step] for step in loop.reader.steps]
    statistics = loop.core.statistics()
    assert (statistics.requests, statistics.prompt_tokens, statistics.computed_tokens, statistics.steps) == (
        10,
        54,
        54,
        5,
    )
    assert statistics.waiting == 0 and not loop.core.step()
    assert statistics.scheduled == 10 and statistics.running == 0


@pytest.mark.parametrize(
    ("policy", "expected"), [("priority", [3, 1, 0, 2]), ("sjf", [2, 1, 0, 3]), ("prefix", [0, 1, 2, 3])]
)
def test_the_policy_decides(policy: Any, expected: list[int]) -> None:
    loop = Loop(policy=policy)
    for number, (length, priority) in enumerate([(8, 0), (7, -1), (6, 5), (9, -2)]):
        loop.add(number, length, priority=priority)
    loop.run()
    assert [step[0] for step in loop.reader.steps] == expected


def test_users_take_turns() -> None:
    loop = Loop()
    for number, turn in enumerate([1, 2, 3, 1]):
        loop.add(number, 6, turn=turn)
    loop.run()
    assert loop.reader.steps == [[0], [3], [1], [2]]


def test_who_waits_for_long_goes_first() -> None:
    loop = Loop(policy="sjf", aging_steps=3)
    loop.add(0, 9)
    for number in range(1, 8):
        loop.add(number, 8)
        loop.core.step()
    assert loop.reader.steps[:5] == [[1], [2], [3], [0], [4]]


def test_what_is_aborted_is_not_read() -> None:
    loop = Loop()
    for number in range(3):
        loop.add(number)
    loop.core.finish(["1#0", "unknown"])
    assert [event.request_id for event in loop.run()] == ["0#0", "2#0"]
    assert loop.reader.steps == [[0, 2]]


def test_a_text_that_cannot_be_read_ends_alone() -> None:
    loop = Loop()
    for number in range(4):
        loop.add(number, 2, last=FAULTY if number == 2 else 0)
    loop.core.step()
    loop.add(4)
    loop.core.finish(["3#0"])
    events = {event.request_id: event for event in loop.run()}
    assert loop.reader.steps == [[0, 1, 2, 3], [0, 1], [2], [4]]
    assert list(events) == ["0#0", "1#0", "2#0", "4#0"]
    assert events.pop("2#0").stop_reason == "its step failed: RuntimeError: this token cannot be read"
    assert all(event.finish_reason == "stop" for event in events.values())


def test_there_are_no_adapters() -> None:
    with pytest.raises(InvalidAdapter, match="the model is an encoder, which takes no adapters"):
        Loop().core.read_adapter("folder")


def test_the_next_step_begins_before_the_result_of_one_is_awaited() -> None:
    loop = Loop(depth=2)
    for number in range(3):
        loop.add(number, 8)
    assert loop.core.step() == [] and loop.reader.steps == [[0]]
    statistics = loop.core.statistics()
    assert (statistics.running, statistics.waiting) == (1, 2)
    assert [event.request_id for event in loop.core.step()] == ["0#0"] and loop.reader.steps == [[0], [1]]
    loop.core.finish(["1#0"])
    assert loop.core.step() == [] and loop.reader.steps == [[0], [1], [2]]
    assert [event.request_id for event in loop.run()] == ["2#0"]
    assert not loop.core.has_work


@pytest.mark.parametrize("fault", [FAULTY, LATE_FAULTY])
def test_steps_in_flight_outlive_one_that_fails(fault: int) -> None:
    loop = Loop(depth=2)
    for number in range(6):
        loop.add(number, 4, last=fault if number == 2 else 0)
    events = {event.request_id: event for event in loop.run()}
    assert sorted(events) == [f"{number}#0" for number in range(6)] and loop.reader.abandoned == 2
    assert events.pop("2#0").finish_reason == "abort"
    assert all(event.finish_reason == "stop" for event in events.values())


def test_a_broken_device_ends_the_engine() -> None:
    loop = Loop()
    loop.reader.broken = True
    loop.add(0, 2, last=FAULTY)
    with pytest.raises(RuntimeError, match="the device is broken"):
        loop.core.step()


class SmallCard:
    """Runs steps of so many tokens at most."""

    def __init__(self, room: int) -> None:
        self.room, self.steps = room, list[int]()

    def start(self, texts: Sequence[PromptInput]) -> Read:
        self.steps.append(sum(map(len, texts)))
        if self.steps[-1] > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return Read(texts)


@pytest.mark.parametrize(
    ("room", "estimate", "most", "steps", "found"),
    [
        (100, 80, 1000, [80], 80),
        (50, 80, 1000, [80, 40], 40),
        (19, 80, 1000, [80, 40, 20], 10),
        (100, 5, 1000, [], 10),
        (100, 80, 8, [], 8),
    ],
)
def test_steps_are_as_large_as_those_that_ran(
    room: int, estimate: int, most: int, steps: list[int], found: int
) -> None:
    """Where an estimate was too high, the start goes on with smaller steps; one text of 10 tokens has run."""
    card = SmallCard(room)
    assert largest_step(card, 10, estimate, most) == found
    assert card.steps == steps


def test_each_text_has_a_record() -> None:
    loop = Loop()
    for number in range(4):
        loop.add(number, 2, last=FAULTY if number == 2 else 0)
    loop.core.step()
    (aborted,) = loop.core.finish(["3#0", "unknown"])
    assert aborted.record is not None and aborted.record.finish_reason == "abort" and not aborted.finish_reason
    records = {event.request_id: event.record for event in loop.run()}
    assert all(record is not None for record in records.values())
    for name, record in records.items():
        assert record is not None and record.request_id == name and record.prompt_tokens == 2
        assert (record.steps, record.undone, set(record.waits)) == (2, 1, {"queue", "trial"})
        assert record.first_step == record.waits["queue"] and sum(record.waits.values()) < record.ended
        assert (record.finish_reason, record.chunk_count) == (("abort", 0) if name == "2#0" else ("stop", 1))


def test_records_of_texts_can_be_left_out() -> None:
    loop = Loop(request_records=False)
    loop.add(0)
    (event,) = loop.run()
    assert event.record is None and loop.core.finish(["0#0"]) == []
