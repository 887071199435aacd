"""A fleet in groups that are simulated apart: every request is answered once, and the differences are told."""

import msgspec
import pytest

from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from kvern.simulate.shards import divided, together
from kvern.simulate.study import Condition, run_once
from tests.support.simulation import SIZES, EvenPrice

LARGE = msgspec.structs.replace(SIZES, blocks=2048, max_model_len=4096, max_batch_tokens=512)
LOAD = "rate=2,requests=160,input=uniform:10:300,output=uniform:2:20,turns=2,think=5s,seed=3"


def test_conversations_stay_together_and_nothing_is_lost() -> None:
    load = list(read_load(LOAD))
    parts = divided(range(7), load, 3, 1)
    assert [len(part.seeds) for part in parts] == [2, 2, 3]
    sessions = [{request.session for request in part.load} for part in parts]
    assert not sessions[0] & sessions[1] and not (sessions[0] | sessions[1]) & sessions[2]
    joined = together(parts)
    assert sorted(joined.load, key=hash) == sorted(load, key=hash) and joined.seeds == [*range(7)]
    assert [request.arrival for request in joined.load] == sorted(request.arrival for request in load)
    with pytest.raises(ConfigError, match="shards is 3, and there are 2 engines"):
        divided(range(2), load, 3, 1)


def test_groups_answer_all_requests_and_say_what_it_changes() -> None:
    whole = Condition(LARGE, lambda seed: EvenPrice(), replicas=4)
    load = list(read_load(LOAD))
    one = run_once(whole, load, 0, {})
    apart = run_once(msgspec.structs.replace(whole, shards=2), load, 0, {})
    for name in ("requests", "generated_tokens", "prompt_tokens"):
        assert apart[name] == one[name]
    told = apart["shards"]
    assert told["groups"] == 2 and "shards" not in one
    # the two groups are all engines here, so that the differences are those to the whole fleet
    assert told["differences"]["p50_e2e_ms"] == pytest.approx(apart["p50_e2e_ms"] / one["p50_e2e_ms"] - 1)
    assert told["differences"]["use"] == pytest.approx(apart["use"] - one["use"])


def test_engines_of_groups_that_get_no_request_are_idle_and_count() -> None:
    condition = Condition(LARGE, lambda seed: EvenPrice(), replicas=8, shards=8)
    found = run_once(condition, [LoadRequest(0.0, 64, 2)], 0, {}, with_series=True)
    assert found["shards"]["groups"] == 8 and len(found["series"]["use"]) == 8
    assert found["use"] == pytest.approx(1 / 8)


def test_the_command_tells_the_differences_and_refuses_more_groups_than_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["simulate", "kvern-1m", "--roofline", "--hardware", "l4", "--load", "rate=2000,requests=200"]
    assert main([*command, "--seeds", "1", "--replicas", "4", "--shards", "2"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "2 groups apart; two of them differ from the two together by: p50 ttft" in told
    assert main([*command, "--shards", "2"]) == 2
    assert "shards is 2, and there are 1 engines: each group needs one" in capsys.readouterr().err
