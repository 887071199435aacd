"""Requests of an encoder whose images are decoded first: a few at a time, in any order, and each by itself."""

import io
import random
from collections.abc import Sequence

import pytest

import kvern.engine.picture_queue
from kvern import EngineConfig
from kvern.engine.encoder_core import EncoderCore
from kvern.engine.picture_queue import PictureQueue
from kvern.request.events import TokenEvent
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.runner.pictures import Picture
from tests.support.simulated_images import BROKEN, SimulatedDecoder
from tests.support.vision_models import picture

MOST = 3
FAULTY = 13


class Result:
    def __init__(self, found: list[bytes]) -> None:
        self._found = found

    def result(self) -> list[bytes]:
        return self._found


class Reader:
    """Gives back the widths of pictures and the first tokens of texts; a picture of the width FAULTY fails."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def start(self, inputs: Sequence[PromptInput | Picture]) -> Result:
        found = [one.width if isinstance(one, Picture) else one.token_ids[0] for one in inputs]
        self.steps.append(found)
        if FAULTY in found:
            raise RuntimeError("this picture cannot be encoded")
        return Result([bytes([number]) for number in found])

    def abandon(self) -> None:
        pass


class Loop:
    """A core with its reader; texts are named by their first token, pictures by their width."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, **options: int) -> None:
        monkeypatch.setattr(kvern.engine.picture_queue, "MOST", MOST)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        self.reader, self.decoder = Reader(), SimulatedDecoder(seed)
        self.pictures, self.events = PictureQueue(self.decoder), dict[str, TokenEvent]()
        self.core = EncoderCore(self.reader, EngineConfig(), 10, 4, pictures=self.pictures, **options)  # type: ignore[arg-type]

    def add(self, number: int, *, is_picture: bool = True, end: bytes = b"") -> None:
        stream = io.BytesIO()
        picture(number, 9).save(stream, "PNG")
        prompt = PromptInput([0] * 4, (stream.getvalue() + end,)) if is_picture else PromptInput([number])
        self.core.add(RequestSpec(str(number), prompt, SamplingParams().resolved({}), 1))

    def run(self) -> dict[str, TokenEvent]:
        while self.core.has_work:
            self.step()
        assert not len(self.pictures)
        return self.events

    def step(self) -> None:
        for event in self.core.step():
            assert event.request_id not in self.events
            self.events[event.request_id] = event


@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_its_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, dice = Loop(monkeypatch, seed), random.Random(seed)
    kinds = {number: dice.choice(["picture", "text", "broken", "gone"]) for number in range(20, 50)}
    for number, kind in kinds.items():
        loop.add(number, is_picture=kind != "text", end=BROKEN if kind == "broken" else b"")
        if dice.random() < 0.3:
            loop.step()
        if kind == "gone":
            loop.core.finish([f"{number}#0"])
    waiting = loop.core.statistics().waiting
    assert waiting >= len(loop.pictures)
    events = loop.run()
    for number, kind in kinds.items():
        event = events.get(f"{number}#0")
        if kind == "gone":
            assert event is None or event.embedding == bytes([number]), "it had run before"
        elif kind == "broken":
            assert event is not None and event.finish_reason == "abort"
            assert str(event.stop_reason).startswith("its content cannot be read: ")
        else:
            assert event is not None and event.embedding == bytes([number])
    assert loop.core.statistics().encoded_images == sum(
        event.embedding is not None and kinds[int(name[:-2])] in ("picture", "gone") for name, event in events.items()
    )
    assert loop.core.statistics().waiting == 0


def test_few_pictures_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while those that are decoded wait for a step."""
    loop = Loop(monkeypatch)
    for number in range(20, 30):
        loop.add(number)
    assert len(loop.decoder.begun) == MOST
    ready, _ = loop.pictures.finished()
    while len(ready) < MOST:
        ready += loop.pictures.finished()[0]
    assert loop.decoder.count == MOST and len(loop.pictures) == 10 - MOST
    loop.pictures.taken([ready[0].name])
    assert loop.decoder.count == MOST + 1
    assert not loop.pictures.remove(ready[1].name) and loop.decoder.count == MOST + 2


def test_a_picture_that_cannot_be_encoded_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    for number in (30, FAULTY, 31):
        loop.add(number)
    loop.add(40, is_picture=False)
    events = loop.run()
    assert events.pop(f"{FAULTY}#0").stop_reason == "its step failed: RuntimeError: this picture cannot be encoded"
    assert sorted(events) == ["30#0", "31#0", "40#0"]
    assert all(event.finish_reason == "stop" for event in events.values())


def test_texts_do_not_wait_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    monkeypatch.setattr(loop.decoder, "finished", list)
    loop.add(30)
    loop.add(40, is_picture=False)
    assert [event.request_id for event in loop.core.step()] == ["40#0"]
    assert loop.core.has_work and loop.core.step() == []
    loop.core.finish(["30#0"])
    assert not loop.core.has_work
