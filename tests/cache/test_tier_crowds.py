"""Many requests whose prefixes a tier has, over a cache with blocks for few of them."""

import random

import pytest

from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

PAGE = 4
LONG = 60


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("spare_budget", [20, 300])
def test_what_was_loaded_is_there_when_its_request_is_admitted(delay: int, spare_budget: int) -> None:
    """Loads begin for as many requests as fit with all that they still need: none takes the blocks of another."""
    setup = Setup(
        block_size=2,
        max_model_len=96,
        spare_blocks=100,
        spare_budget=spare_budget,
        slots=6,
        tier_pages=1000,
        page_blocks=2,
        tier_delay=delay,
    )
    found = SimulatedEngine(setup)
    dice = random.Random(0)
    talks = [[dice.randrange(3) for _ in range(LONG)] for _ in range(12)]
    least = 0
    for turn in range(3):
        requests = [found.add(talk, 2)[0] for talk in talks]
        found.run_requests()
        assert found.tier is not None
        for talk, request in zip(talks, requests, strict=True):
            assert request.answer.cached_tokens >= least
            talk[:] = [*request.token_ids, *(dice.randrange(3) for _ in range(8))]
        least = LONG + 10 * turn - 2 * PAGE


def test_a_load_in_line_behind_others_has_the_time_in_which_their_requests_compute() -> None:
    setup = Setup(
        block_size=2, max_model_len=96, spare_blocks=200, slots=6, tier_pages=1000, page_blocks=2, tier_delay=3
    )
    found = SimulatedEngine(setup)
    assert found.tier is not None
    talks = [[talk, *[1] * LONG] for talk in range(3)]
    for _ in range(2):
        found.cache.tree.clear()
        found.tier.in_line.clear()
        for talk in talks:
            found.add(talk, 2)
        found.run_requests()
    assert [len(ahead) for ahead in found.tier.in_line] == [0, 1, 2]
    assert set(found.tier.in_line[-1]) == {(LONG, LONG + 1)}, "the rest is computed"
