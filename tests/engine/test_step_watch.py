"""For how long a server hears nothing of an engine whose steps it knows."""

from pathlib import Path

import pytest

from kvern.engine.step_watch import SHORTEST_SILENCE, TIMES, RunningFile, StepWatch, read_running


class Watched:
    """A watch whose clock is set by the test; `told` is what the server hears of it."""

    def __init__(self, folder: Path, longest: float = 60.0, shortest: float = SHORTEST_SILENCE) -> None:
        self.file = folder / "running"
        self.now = 100.0
        self.told: list[float] = []
        self.watch = StepWatch(RunningFile(self.file), self.told.append, longest, shortest)

    def step(self, tokens: int, reach: int, seconds: float) -> float:
        """Make one; the silence that it was allowed."""
        self.watch.began([f"{tokens}"], self.now, tokens, reach)
        allowed = self.watch.silence
        self.now += seconds
        self.watch.ended(self.now)
        return allowed


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_first_step_of_a_size_may_take_long_and_later_ones_what_it_took(watched: Watched) -> None:
    """Something may be compiled for the first, which does not count."""
    assert watched.step(1, 20, 30.0) == 60.0 and watched.told == [60.0]
    assert watched.step(1, 21, 0.02) == 60.0, "all that is known is a step of 30 s"
    assert watched.step(1, 22, 0.02) == SHORTEST_SILENCE
    assert watched.step(512, 512, 2.0) == 60.0, "a prompt of a size that was not there before"
    assert watched.step(512, 1030, 1.0) == 60.0, "and one that reaches further"
    assert watched.step(512, 1100, 1.0) == TIMES * 1.0
    assert watched.step(1, 23, 0.02) == SHORTEST_SILENCE, "steps of other sizes are as quick as before"
    assert watched.watch.silence == SHORTEST_SILENCE


def test_a_slow_step_behind_a_quick_one_keeps_its_time(watched: Watched) -> None:
    for _ in range(2):
        watched.step(1, 20, 0.02)
        watched.step(512, 512, 1.0)
    watched.told.clear()
    watched.watch.began(["a"], watched.now, 1, 20)
    watched.watch.began(["b"], watched.now, 512, 512)
    assert watched.told == [20.0]
    watched.watch.ended(watched.now)
    assert watched.watch.silence == 20.0
    assert read_running(watched.file.read_bytes()) == ["b", "a"]
    watched.watch.forget()
    assert watched.watch.silence == SHORTEST_SILENCE


def test_steps_of_which_no_size_is_known_may_always_take_long(watched: Watched) -> None:
    for _ in range(3):
        watched.watch.began(["a"], watched.now)
        assert watched.watch.silence == 60.0
        watched.watch.ended(watched.now)


def test_a_limit_that_was_asked_for_holds_for_all_steps(tmp_path: Path) -> None:
    watched = Watched(tmp_path, longest=3.0, shortest=3.0)
    assert {watched.step(tokens, 20, 0.5) for tokens in (1, 1, 1, 300)} == {3.0}
    assert watched.told == []
