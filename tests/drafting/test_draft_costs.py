"""As many drafts as pay, by what steps took: and none where they would make anything slower."""

from collections.abc import Callable
from typing import Any

import pytest

from kvern.drafting.costs import ALLOWED, EXPLORED, FIRST_BALANCE, MOST, DraftCosts, LeastTimes, TimedStep
from kvern.drafting.drafting import Drafting
from kvern.request.request import PromptInput, Request, RequestSpec, State
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput
from tests.support.simulated_drafts import Acceptance, SimulatedSteps, begun


def requests(count: int, prompt: int = 3) -> list[Request]:
    spec = RequestSpec("one", PromptInput([1] * prompt), ResolvedParams(), 100)
    return [begun(spec, [4]) for _ in range(count)]


def learnt(base: float, row: float, one_pass: float, right: int, running: int, most: int = MOST) -> DraftCosts:
    """What is known behind steps with none to five drafts a request, of which so many were right."""
    costs = DraftCosts(8, most, on_device=True)
    for drafts in [*range(EXPLORED + 1)] * 5:
        scheduled = [ScheduledTokens(0, 9, 1 + drafts, 1 + drafts, guesses=drafts) for _ in range(running)]
        accepted, guessing = min(right, drafts) * running, one_pass * drafts
        seconds = base + row * running * (1 + drafts) + guessing
        costs.learn(TimedStep(scheduled, seconds, accepted, guessing, scheduled))
        if drafts:
            costs.verified(min(right, drafts), right < drafts)
    return costs


def counts(costs: DraftCosts, asked: list[Request]) -> list[int]:
    wanted = costs.wanted(len(asked))
    return [0 if wanted is None else wanted(request) for request in asked]


@pytest.mark.parametrize(
    ("base", "row", "one_pass", "right", "running", "expected"),
    [
        (10.0, 0.1, 0.1, 5, 1, 7),  # they cost next to nothing and are right: as many as there are rows
        (10.0, 0.1, 0.1, 5, 4, 1),
        (10.0, 0.1, 0.1, 5, 5, 0),  # there are no rows left
        (10.0, 0.1, 0.1, 0, 1, 0),  # none is right
        (0.1, 10.0, 0.1, 5, 1, 0),  # a row costs what a token costs
        (10.0, 0.1, 12.0, 5, 1, 0),  # to guess takes longer than not to
    ],
)
def test_drafts_are_as_many_as_pay(
    base: float, row: float, one_pass: float, right: int, running: int, expected: int
) -> None:
    assert counts(learnt(base, row, one_pass, right, running), requests(running)) == [expected] * running


def test_one_request_finds_out_what_rows_take() -> None:
    costs = DraftCosts(8, on_device=True)
    for _ in range(5):
        costs.learn(TimedStep([ScheduledTokens(0, 9, 1, 1), ScheduledTokens(1, 9, 1, 1)], 1.0))
    assert counts(costs, requests(2)) == [3, 0]


def test_more_rows_than_any_step_had_take_what_rows_took_beside_the_first() -> None:
    """Of plain steps of one row and of those with five drafts: what a step takes whatever its rows is paid once."""
    costs = DraftCosts(8, on_device=True)
    for drafts in (0, EXPLORED) * 5:
        scheduled = [ScheduledTokens(0, 9, 1 + drafts, 1 + drafts, guesses=drafts)]
        costs.learn(TimedStep(scheduled, 10.0 + 0.1 * drafts, drafts, 0.1 * drafts, scheduled))
        costs.verified(drafts, False)
    assert counts(costs, requests(1)) == [7]


def test_a_drafter_that_makes_a_few_is_asked_for_no_more() -> None:
    assert counts(learnt(10.0, 0.1, 0.1, 5, 1, most=2), requests(1)) == [2]


def test_a_request_is_tried_again_however_long_its_text_is() -> None:
    spec = RequestSpec("one", PromptInput([1] * 200), ResolvedParams(), 1000)
    request = begun(spec, [4] * 60)
    costs = learnt(10.0, 0.1, 0.1, 0, 1)
    assert counts(costs, [request]) == [1]


def test_who_has_read_the_text_has_nothing_to_catch_up_with() -> None:
    costs = {catches_up: DraftCosts(8, on_device=True, catches_up=catches_up) for catches_up in (True, False)}
    for one in costs.values():
        for _ in range(5):
            one.learn(TimedStep([ScheduledTokens(0, 9, 1, 1)], 1.0))
    asked = requests(1, prompt=2_000)
    assert [counts(one, asked)[0] > 0 for one in costs.values()] == [False, True]


def test_reading_prompts_costs_drafts_nothing() -> None:
    """A head reads them whether or not drafts are wanted."""
    costs = learnt(10.0, 0.1, 0.1, 5, 1)
    wanted = counts(costs, requests(1))
    for _ in range(1000):
        costs.learn(TimedStep([ScheduledTokens(0, 0, 500, 1)], 30.0, drafting=10.0))
    assert counts(costs, requests(1)) == wanted


def test_a_long_prompt_is_made_up_for_only_if_answers_are_long() -> None:
    (request,) = requests(1, prompt=2_000)
    costs = learnt(10.0, 0.1, 0.1, 5, 1)
    for _ in range(60):
        costs.answered(5)
    assert costs.wanted(1)(request) == 0
    for _ in range(60):
        costs.answered(90)
    assert costs.wanted(1)(request) == 7


def test_what_a_drafter_takes_for_a_prompt_is_learnt() -> None:
    """Reading it takes a card next to nothing, and a CPU as long as all passes behind it."""
    (request,) = requests(1, prompt=20_000)
    costs = learnt(10.0, 0.1, 0.1, 5, 1)
    assert costs.wanted(1)(request) == 0
    prompt = [ScheduledTokens(0, 0, 1000, 1, guesses=1)]
    costs.learn(TimedStep(prompt, 80.0, 0, 0.5, prompt))
    costs.answered(90)
    assert costs.wanted(1)(request) == 7


def test_times_are_the_least_of_late() -> None:
    times = LeastTimes()
    for rows, seconds in [(1, 9.0), (1, 2.0), (1, 3.0), (1, 2.5), (5, 50.0), (5, 4.0), (5, 8.0)]:
        times.add(rows, seconds)
    assert times.of(5) == pytest.approx(5 * times.of(1)), "nothing is known of more rows: each takes as long"
    times.add(5, 7.0)
    assert times.of(1) == pytest.approx(2.0, rel=0.05) and times.of(5) == pytest.approx(4.0, rel=0.05)
    assert times.of(3) == pytest.approx(3.0, rel=0.05) and times.of(9) == pytest.approx(6.0, rel=0.05)


def test_fewer_rows_than_any_step_had_take_less() -> None:
    """Or nobody would find out that a single draft pays where five, of which half are right, do not."""
    times = LeastTimes()
    for _ in range(4):
        times.add(6, 1.0)
    assert [times.of(rows, (1, 0.4)) for rows in (2, 6, 7)] == [pytest.approx(x, rel=0.05) for x in (0.52, 1.0, 1.12)]


def reads_weights(rows: int, verifying: bool) -> float:
    """As of a GPU, or a large model."""
    return 4.0 + 0.05 * rows


def computes(rows: int, verifying: bool) -> float:
    """As of a CPU: behind some rows each takes its time."""
    return 1.0 + 0.15 * rows + 0.3 * max(0, rows - 8)


def in_tiles(rows: int, verifying: bool) -> float:
    """Steps that verify are others than those of as many requests."""
    return 4.0 * -(-rows // 8) + verifying


ACCEPTANCES: dict[str, Acceptance] = {
    "never": lambda request, token: 0.0,
    "half": lambda request, token: 0.5,
    "falls": lambda request, token: 1.0 if token < 3000 else 0.0,
    "mixed": lambda request, token: 0.9 if request % 4 == 0 else 0.0,
    "waves": lambda request, token: float(token // 600 % 2),
}
GUESSING: dict[str, dict[str, Any]] = {
    "proposer": {"asked": 0.02},
    "seldom": {"asked": 0.3, "share": 0.1},
    "device": {"one_pass": 0.5},
    "slow": {"one_pass": 1.5, "first": 2.0},
}


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize("seconds", [computes, *(pytest.param(f, marks=NIGHTLY) for f in (reads_weights, in_tiles))])
@pytest.mark.parametrize(
    ("guessing", "acceptance"),
    [
        pytest.param(
            guessing,
            acceptance,
            id=f"{name}-{how}",
            marks=[NIGHTLY] if (number + place) % min(len(GUESSING), len(ACCEPTANCES)) else [],
        )
        for number, (name, guessing) in enumerate(GUESSING.items())
        for place, (how, acceptance) in enumerate(ACCEPTANCES.items())
    ],
)
@pytest.mark.parametrize("running", [1, *(pytest.param(n, marks=NIGHTLY) for n in (4, 16, 64))])
def test_nothing_is_slower(
    seconds: Callable[[int, bool], float], guessing: dict[str, Any], acceptance: Acceptance, running: int
) -> None:
    """By more than two in a hundred, whatever steps take and drafts come to."""
    steps = SimulatedSteps(running, seconds, acceptance, **guessing)
    steps.run(2500)
    assert steps.now < 1.02 * steps.without


@pytest.mark.sample(1)
@pytest.mark.parametrize(("running", "least"), [(1, 3.0), (8, 2.0), (64, 1.1)])
def test_right_drafts_pay_in_every_batch(running: int, least: float) -> None:
    steps = SimulatedSteps(running, reads_weights, lambda request, token: 0.9)
    steps.run(600)
    assert steps.now * least < steps.without


def test_drafts_are_tried_again() -> None:
    """Where none was right for long, they are soon many again if they become right."""
    steps = SimulatedSteps(1, reads_weights, lambda request, token: float(token > 3000))
    steps.run(3500)
    assert steps.tokens > 5000, "drafts were given up"


def test_the_balance_of_all_drafts_bounds_what_they_lose() -> None:
    """Drafts that are always thought to be right, and are not."""
    steps = SimulatedSteps(1, reads_weights, lambda request, token: 0.0)
    steps.drafting._costs._best = lambda request, costs: (MOST, 2.0)  # type: ignore[method-assign]
    steps.run(4000)
    assert steps.drafts > 0 and steps.now < 1.02 * steps.without


@pytest.mark.sample(1)
@pytest.mark.parametrize(("seconds", "running"), [(computes, 1), (in_tiles, 4), (reads_weights, 16)])
def test_steps_in_flight_lose_no_more(seconds: Callable[[int, bool], float], running: int) -> None:
    """A step takes no longer because the one before it, which it waits for, is not looked at."""
    depths = [SimulatedSteps(running, seconds, lambda *_: 0.0, depth=depth) for depth in (1, 2)]
    for steps in depths:
        steps.run(4000)
        lost = steps.now - (1 + ALLOWED) * steps.without
        assert lost < (FIRST_BALANCE + 2) * seconds(running, False), "more than was allowed"
    one, two = (steps.drafts for steps in depths)
    assert 0 < two < 1.1 * one


@pytest.mark.sample(2)
@pytest.mark.parametrize("before", [0, 9, 40])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_that_is_held_up_stops_drafts_for_a_moment(before: int, device: str) -> None:
    """As by a kernel that is compiled, or a machine that sleeps, for 800 steps' time."""
    stall = 800 * reads_weights(1, False)
    stalls = [0.0] * before + [stall]
    steps = SimulatedSteps(1, reads_weights, lambda *_: 0.9, one_pass=0.1, device=device, stalls=stalls)
    steps.run(300)
    begun, without = steps.now, steps.without
    steps.run(500)
    assert 2.5 * (steps.now - begun) < steps.without - without


@pytest.mark.nightly
def test_steps_that_are_held_up_again_and_again_are_paid_for() -> None:
    """For 100 steps' time whenever it guesses: that is what it takes, and nothing that happens to it."""
    stalls = [100 * reads_weights(1, False)] * 2000
    steps = SimulatedSteps(1, reads_weights, lambda *_: 0.9, one_pass=0.1, device="cuda", stalls=stalls)
    steps.run(60_000)
    assert steps.now < 1.02 * steps.without


def test_drafts_behind_the_end_of_an_answer_are_of_no_use() -> None:
    """However right they are: a short answer gains no more than its tokens."""
    drafting, noted = Drafting(None, 100, device="cpu"), list[TimedStep]()
    drafting._costs.learn = noted.append  # type: ignore[method-assign]
    spec = RequestSpec("one", PromptInput([1] * 3), ResolvedParams(), 100, stop_token_ids=frozenset({9}))
    ends, goes_on, ended = (begun(spec, [4]) for _ in range(3))
    ended.state = State.FINISHED
    output = SchedulerOutput(1, scheduled=[ScheduledTokens(slot, 3, 6, 6) for slot in range(3)])
    drafting.began(output, [])
    drafting.ended(output, [ends, goes_on, ended], ModelRunnerOutput([[5, 9, 6, 7, 8, 9], [5, 6, 7], [5, 6]], [], []))
    assert noted[0].right == 1 + 2
    assert drafting.positions.drafts == [2] * 5 and drafting.positions.accepted == [2, 1, 0, 0, 0]
    assert (ends.drafts.right, ends.drafts.wrong) == (1, 1)


def test_what_guessing_took_is_that_of_the_step_which_waited_for_it() -> None:
    """On a GPU a result either has its drafts or comes before they are made."""
    drafting, noted = Drafting(None, 100, device="cuda"), list[TimedStep]()
    drafting._costs.learn = noted.append  # type: ignore[method-assign]
    outputs = [SchedulerOutput(step, scheduled=[ScheduledTokens(0, step, 2, 2, guesses=1)]) for step in range(4)]
    for output, guessed in zip(outputs, ({0: [7]}, {}, {}, {0: [7]}), strict=True):
        drafting.began(output, [])
        result = ModelRunnerOutput([[4]], [None], [None], guessed=guessed, drafting_seconds=0.1)
        drafting.ended(output, requests(1), result)
    assert [step.guessed for step in noted] == [outputs[0].scheduled, (), outputs[1].scheduled, outputs[3].scheduled]
