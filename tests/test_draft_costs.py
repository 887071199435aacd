"""As many drafts as pay, by what steps took: and none where they would make anything slower."""

import pytest

from kvern.engine.draft_costs import DraftCosts, LeastTimes
from kvern.request import PromptInput, Request, RequestSpec
from kvern.sampling_params import ResolvedParams
from kvern.step import ScheduledTokens


def requests(count: int, prompt: int = 3) -> list[Request]:
    spec = RequestSpec("one", PromptInput([1] * prompt), ResolvedParams(), 100)
    return [Request(spec, generated=[4]) for _ in range(count)]


def learnt(base: float, row: float, one_pass: float, right: int, running: int) -> DraftCosts:
    """What is known behind steps with none to four drafts a request, of which so many were right."""
    costs = DraftCosts(8)
    for drafts in (0, 1, 2, 3, 4) * 5:
        scheduled = [ScheduledTokens(0, 9, 1 + drafts, 1 + drafts, guesses=drafts) for _ in range(running)]
        took = base + row * running * (1 + drafts)
        costs.learn(scheduled, took + one_pass * drafts, one_pass * drafts)
        if drafts:
            costs.verified(min(right, drafts), right < drafts)
    return costs


@pytest.mark.parametrize(
    ("base", "row", "one_pass", "right", "running", "expected"),
    [
        (10.0, 0.1, 0.1, 4, 1, 7),  # they cost next to nothing and are right: as many as there are rows
        (10.0, 0.1, 0.1, 4, 4, 1),
        (10.0, 0.1, 0.1, 4, 5, 0),  # there are no rows left
        (10.0, 0.1, 0.1, 0, 1, 0),  # none is right
        (0.1, 10.0, 0.1, 4, 1, 0),  # a row costs what a token costs
        (10.0, 0.1, 12.0, 4, 1, 0),  # to guess takes longer than not to
    ],
)
def test_drafts_are_as_many_as_pay(
    base: float, row: float, one_pass: float, right: int, running: int, expected: int
) -> None:
    wanted = learnt(base, row, one_pass, right, running).wanted(running)
    assert [wanted(request) for request in requests(running)] == [expected] * running


def test_one_request_finds_out_what_rows_take() -> None:
    costs = DraftCosts(8)
    for _ in range(5):
        costs.learn([ScheduledTokens(0, 9, 1, 1), ScheduledTokens(1, 9, 1, 1)], 1.0, 0.0)
    wanted = costs.wanted(2)
    assert [wanted(request) for request in requests(2)] == [3, 0]


def test_a_drafter_that_makes_a_few_is_asked_for_no_more() -> None:
    """And what they cost is found out behind as many."""
    (request,), costs, wanted = requests(1), DraftCosts(8, 2), list[int]()
    for rows in (1, 1, 1, 1, 3, 3, 3, 3):
        wanted.append(costs.wanted(1)(request))
        costs.learn([ScheduledTokens(0, 9, rows, rows)], float(rows), 0.0)
        costs.verified(0, True)
    assert wanted == [0] * 4 + [2] * 4
    assert costs.wanted(1)(request) == 0


def test_a_long_prompt_is_made_up_for_only_if_answers_are_long() -> None:
    (request,) = requests(1, prompt=20_000)
    costs = learnt(10.0, 0.1, 0.1, 4, 1)
    for _ in range(60):
        costs.answered(5)
    assert costs.wanted(1)(request) == 0
    for _ in range(60):
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
