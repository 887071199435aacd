"""Steps that are made at once: all that is seen of them, and decided after them, is as with single steps."""

import random

import msgspec
import pytest

from kvern.cli.main import main
from kvern.engine.queues import POLICIES
from kvern.loads.request import LoadRequest
from kvern.simulate.engine import DrivenEngine, EngineSizes, PaceSizes, Prompts, simulated_engine
from kvern.simulate.launches import Launches
from tests.support.simulation import DrawnPrice


def drawn(seed: int) -> tuple[EngineSizes, list[LoadRequest]]:
    """Sizes that run out, and a load for them."""
    dice = random.Random(seed)
    sizes = EngineSizes(
        blocks=dice.choice((60, 90, 400)),
        block_size=dice.choice((4, 8, 16)),
        max_model_len=240,
        max_batch_requests=dice.choice((2, 5, 9)),
        max_batch_tokens=dice.choice((16, 64, 256)),
        policy=dice.choice(sorted(POLICIES)),
        aging_steps=dice.choice((5, 100)),
        prefix_cache=dice.random() < 0.8,
    )
    now = 0.0
    load = []
    for _ in range(25):
        now += dice.expovariate(dice.choice((1.0, 20.0)))
        blocks = (dice.randrange(3),) if dice.random() < 0.6 else ()
        load.append(LoadRequest(now, dice.randint(1, 140), dice.randint(1, 100), blocks, dice.choice("ab")))
    return sizes, load


PACE = PaceSizes(0.03, True, (1, 16, 256), (0.011, 0.03, 0.28), 1e-6, 1e-6)


def run(
    sizes: EngineSizes, load: list[LoadRequest], seed: int, leaps: bool, pace: PaceSizes | None = None
) -> DrivenEngine:
    price = DrawnPrice(seed)
    price.launches = Launches(20, 0.05) if seed % 2 else Launches()
    engine = simulated_engine(sizes, price, pace, leaps=leaps)
    engine.run(load, Prompts())
    engine.scheduler.check_integrity()
    return engine


@pytest.mark.parametrize(("depth", "pace"), [(1, None), (2, None), (1, PACE), (2, PACE)])
@pytest.mark.parametrize("seed", range(8))
def test_leaps_change_nothing(seed: int, depth: int, pace: PaceSizes | None) -> None:
    sizes, load = drawn(seed)
    if sizes.blocks * sizes.block_size < sizes.max_model_len:
        sizes = msgspec.structs.replace(sizes, blocks=120)
    sizes = msgspec.structs.replace(sizes, depth=depth)
    single, leaping = (run(sizes, load, seed, leaps, pace) for leaps in (False, True))
    assert leaping.leaps is not None and leaping.leaps.steps > 20

    def seen(engine: DrivenEngine) -> object:
        answers = [(each.first, each.last, each.tokens) for each in engine.timeline.answers.values()]
        return (
            answers,
            engine.timeline.gaps,
            engine.hit_tokens,
            engine.scheduler.preemption_count,
            engine.scheduler.step,
            None if engine.pace is None or engine.pace.costs is None else engine.pace.costs.told,
        )

    assert seen(single) == seen(leaping)
    assert single.executor.busy == pytest.approx(leaping.executor.busy)


def test_a_turn_that_runs_before_the_answer_that_it_continues_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """Its prompt has the blocks of the answer already, which then need no memory of their own."""
    load = "rate=2000,requests=200,input=uniform:1:40,output=uniform:1:60,turns=uniform:2:4,think=5ms,seed=739"
    options = ["--roofline", "--hardware", "l4", "--kv-cache-tokens", "640", "--seeds", "1", "--load", load]
    assert main(["simulate", "kvern-1m", *options]) == 0
    assert "Based on an estimate" in capsys.readouterr().out
