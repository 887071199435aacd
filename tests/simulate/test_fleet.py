"""Several simulated engines: requests are divided as a server does it, which knows of a step when it has ended."""

import json

import msgspec
import pytest

from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from kvern.simulate.engine import DrivenEngine, Prompts, simulated_engine
from kvern.simulate.fleet import ROUTERS, Fleet
from tests.support.simulation import SIZES, EvenPrice

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
