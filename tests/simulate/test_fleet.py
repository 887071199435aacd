"""Several simulated engines: requests are divided as a server does it, which knows of a step when it has ended."""

import gc
import json
import random
from collections.abc import Iterable

import msgspec
import pytest

from kvern.cache.radix import Node
from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from kvern.serving.prefix_index import Level, PrefixIndex
from kvern.simulate.engine import DrivenEngine, Prompts, simulated_engine
from kvern.simulate.fleet import ROUTERS, Fleet
from kvern.simulate.study import Condition, run_once
from tests.support.simulation import SIZES, DrawnPrice, EvenPrice

LARGE = msgspec.structs.replace(SIZES, blocks=2048, max_model_len=4096, max_batch_tokens=512)


def fleet(count: int, load: list[LoadRequest], router: str = "server") -> list[DrivenEngine]:
    engines = [simulated_engine(LARGE, EvenPrice()) for _ in range(count)]
    group = Fleet(engines, router)
    group.run(load, Prompts())
    for engine in engines:
        engine.scheduler.check_integrity()
        assert all(answer.ended for answer in engine.timeline.answers.values())
    group.check_integrity()
    return engines


@pytest.mark.parametrize("router", ["server", "least"])
@pytest.mark.parametrize("seed", range(6))
def test_engines_that_look_ahead_do_what_single_steps_do(
    seed: int, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    blocks, depth, requests = dice.choice((150, 400, 2048)), dice.choice((1, 2)), 90
    sizes = msgspec.structs.replace(LARGE, blocks=blocks, max_model_len=1600, max_batch_requests=12, depth=depth)
    # turns of conversations arrive while the answer before is computed, and caches are full
    rate, think = dice.choice((0.02, 0.1)), dice.choice((5, 60, 400))
    load = list(
        read_load(
            f"rate={rate},requests={requests},input=uniform:1:300,output=uniform:1:150,prefix=512:3:1,"
            f"turns=uniform:1:3,think={think}s,tenants=2,seed={seed}"
        )
    )
    load = [each for each in load if each.prompt_tokens + each.output_tokens <= 1600]

    found = PrefixIndex.levels
    seen: list[object] = []

    def levels(index: PrefixIndex, names: Iterable[bytes]) -> list[Level]:
        known = found(index, names)
        seen.append([(tokens, sorted(engines)) for tokens, engines in known])
        return known

    monkeypatch.setattr(PrefixIndex, "levels", levels)

    def run(leaps: bool) -> list[object]:
        seen.clear()
        engines = [simulated_engine(sizes, DrawnPrice(seed + number), leaps=leaps) for number in range(3)]
        group = Fleet(engines, router)
        group.run(load, Prompts())
        group.check_integrity()
        assert not leaps or sum(each.leaps.steps for each in engines if each.leaps is not None) > 500
        return [*seen, *map(state, engines)]

    def state(engine: DrivenEngine) -> object:
        counts = engine.hit_tokens, engine.scheduler.preemption_count, engine.scheduler.step
        return times(engine), list(engine.timeline.answers), engine.timeline.gaps, counts

    assert run(True) == run(False)


def times(engine: DrivenEngine) -> list[tuple[float, float]]:
    return [(answer.first, answer.last) for answer in engine.timeline.answers.values()]


def test_a_fleet_of_one_is_that_engine() -> None:
    load = list(read_load("rate=0.4,requests=60,input=uniform:10:600,output=uniform:1:30,prefix=512:3:1"))
    alone = simulated_engine(LARGE, EvenPrice())
    alone.run(load, Prompts())
    (one,) = fleet(1, load)
    assert times(one) == times(alone) and one.hit_tokens == alone.hit_tokens > 0


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_answered_by_one_engine(router: str) -> None:
    load = list(read_load("rate=2,requests=80,input=uniform:10:300,output=uniform:1:20,tenants=3:1"))
    engines = fleet(3, load, router)
    names = [name for engine in engines for name in engine.timeline.answers]
    assert sorted(names) == sorted(f"{number}#0" for number in range(80))
    assert all(len(engine.timeline.answers) > 10 for engine in engines)


def test_the_server_s_choice_finds_what_is_cached_and_others_do_not() -> None:
    load = list(read_load("rate=0.2,requests=80,input=40,output=4,prefix=2048:8:0"))
    hits = {router: sum(engine.hit_tokens for engine in fleet(4, load, router)) for router in ROUTERS}
    assert hits["server"] > 1.2 * max(hits["random"], hits["round-robin"])


def test_two_that_come_at_once_go_to_two_engines() -> None:
    one, other = fleet(2, [LoadRequest(0.0, 300, 5), LoadRequest(0.0, 300, 5)])
    assert times(one) == times(other)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="router is 'best'"):
        Fleet([], "best")


def test_the_command_compares_numbers_of_engines(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "kvern-1m", "--roofline", "--hardware", "l4", "--load", "rate=2000,requests=300", "--json"]
    assert main([*command, "--seeds", "1", "--compare", "replicas=1,4"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"]
    assert told["replicas=4"][0]["p99_e2e_ms"] < told["replicas=1"][0]["p99_e2e_ms"]
    assert main([*command, "--router", "best"]) == 2
    assert "router is 'best'" in capsys.readouterr().err


def test_a_simulation_that_has_ended_leaves_no_blocks_for_the_collector() -> None:
    def nodes() -> int:
        return sum(type(each) is Node for each in gc.get_objects())

    gc.collect()
    load = list(read_load("rate=2,requests=30,input=100,output=40"))
    gc.disable()
    try:
        before = nodes()
        run_once(Condition(SIZES, lambda seed: EvenPrice(), replicas=2), load, 0, {})
        assert nodes() == before
    finally:
        gc.enable()
