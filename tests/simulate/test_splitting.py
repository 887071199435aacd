"""Prefill and decode engines over a virtual clock: long prompts are handed over by a server's rule, and pages move."""

import json

import msgspec
import pytest

from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from kvern.serving.choice import LEAST_HANDED_OVER, MOST_AHEAD, hands_over
from kvern.simulate.engine import DrivenEngine, EngineSizes, Prompts, simulated_engine
from kvern.simulate.prediction import predicted
from kvern.simulate.splitting import SplitFleet, read_split, with_peers
from kvern.simulate.study import Condition, read_compared, resolved, run_once
from kvern.simulate.tiers import StoreSizes, TierSizes
from tests.support.simulation import SIZES, EvenPrice

HOST = TierSizes((StoreSizes("host", 1 << 30, 0.05, 1e7, ""),))
LARGE = with_peers(
    msgspec.structs.replace(
        SIZES, blocks=2048, max_model_len=4096, max_batch_tokens=512, token_bytes=1000, tier=HOST, on_device=True
    )
)


def run(
    load: list[LoadRequest], prefill: int = 1, decode: int = 1, sizes: EngineSizes = LARGE
) -> tuple[SplitFleet, list[DrivenEngine]]:
    pace = predicted(EvenPrice(), has_target=False)
    engines = [simulated_engine(sizes, EvenPrice(), pace) for _ in range(prefill + decode)]
    fleet = SplitFleet(engines, prefill)
    fleet.run(load, Prompts())
    fleet.check_integrity()
    for engine in engines:
        engine.scheduler.check_integrity()
        assert all(answer.ended for answer in engine.timeline.answers.values())
    return fleet, engines


def computed(engine: DrivenEngine) -> int:
    """Returns the tokens of all steps, of which each takes a hundredth of a second and a step one more."""
    return round(100 * (engine.executor.busy - engine.timeline.steps))


def test_long_prompts_are_handed_over_and_short_ones_stay() -> None:
    lengths = [100, 255, 600, LEAST_HANDED_OVER, 2000, 64]
    fleet, (before, usual) = run([LoadRequest(100.0 * place, tokens, 5) for place, tokens in enumerate(lengths)])
    assert fleet.handed == 3 and not before.timeline.answers
    assert [answer.prompt for answer in usual.timeline.answers.values()] == lengths
    assert computed(before) == 600 + LEAST_HANDED_OVER + 2000
    rest = [(tokens - 1) % 64 + 1 for tokens in lengths if tokens >= LEAST_HANDED_OVER]  # no page has the last token
    assert computed(usual) == 100 + 255 + 64 + sum(rest) + len(lengths) * 4


@pytest.mark.parametrize(("tokens", "pages"), [(513, 0), (1000, 7)])
def test_a_prompt_takes_the_prefill_two_transfers_of_its_last_pages_and_a_step(tokens: int, pages: int) -> None:
    """Those of the first step are saved and loaded beside the second."""
    _, (_, usual) = run([LoadRequest(0.0, tokens, 2)])
    [answer] = usual.timeline.answers.values()
    transfer = 0.05 + pages * 64 * 1000 / 1e7 if pages else 0
    least = (1 + 5.12) + (1 + 0.01 * (tokens - 512)) + 2 * transfer + (1 + 0.01 * (tokens - 512 - pages * 64))
    assert least <= answer.ttft < least + 0.01
    assert answer.e2e == pytest.approx(answer.ttft + 1.01)


def test_pages_that_come_too_slowly_are_waited_for() -> None:
    """Those of the first step have not come when the second ends."""
    slow = with_peers(msgspec.structs.replace(LARGE, tier=TierSizes((StoreSizes("host", 1 << 30, 0.05, 6e5, ""),))))
    _, (_, usual) = run([LoadRequest(0.0, 513, 2)], sizes=slow)
    [answer] = usual.timeline.answers.values()
    transfer = 0.05 + 8 * 64 * 1000 / 6e5
    least = (1 + 5.12) + 2 * transfer + 1.01
    assert least <= answer.ttft < least + 0.01


def test_the_next_turn_of_a_conversation_stays_where_its_prompt_is() -> None:
    turns = [
        LoadRequest(0.0, 600, 8, (1, 2)),
        LoadRequest(100.0, 700, 8, (1, 2)),
        LoadRequest(200.0, 1400, 8, (1, 2, 3)),
    ]
    fleet, _ = run(turns, 1, 3)
    assert fleet.handed == 2  # 600 and 800 tokens were new, and 100


def test_prompts_are_computed_where_they_are_answered_while_many_wait_for_the_prefill_engine() -> None:
    assert hands_over(300, 300 * MOST_AHEAD, 0) and not hands_over(300, 300 * MOST_AHEAD + 1, 0)
    assert hands_over(300, 300 * MOST_AHEAD + 1, 1) and not hands_over(LEAST_HANDED_OVER - 1, 0, 0)
    fleet, _ = run([LoadRequest(0.0, 1000, 1) for _ in range(40)], 1, 2)
    assert 8 < fleet.handed < 40


def test_a_run_is_the_same_each_time() -> None:
    load = list(read_load("rate=0.3,requests=60,input=uniform:10:1200,output=uniform:1:20,prefix=512:4:1"))
    one, other = (
        [
            (name, answer.first, answer.last)
            for engine in run(load, 2, 2)[1]
            for name, answer in engine.timeline.answers.items()
        ]
        for _ in range(2)
    )
    assert one == other and len(one) == 60


def test_answers_come_more_evenly_beside_long_prompts() -> None:
    load = list(read_load("rate=0.06,requests=40,input=lognormal:900:0.8:3000,output=40"))
    base = Condition(msgspec.structs.replace(LARGE, tier=HOST), lambda seed: EvenPrice(), replicas=3)
    mixed = run_once(base, load, 0, {})
    split = run_once(resolved(base, {"split": "1+2"}), load, 0, {})
    assert split["p99_itl_ms"] < 0.5 * mixed["p99_itl_ms"] and split["handed_share"] > 0.5
    assert split["generated_tokens"] == mixed["generated_tokens"] and split["cache_hit_share"] == 0


def test_tokens_of_a_prompt_that_is_handed_over_are_counted_once() -> None:
    """Both engines have the beginning in their caches, and the decode engine gets the rest of what was computed."""
    fleet, _ = run([LoadRequest(1000.0 * place, 1100, 4, (1, 2, 10 + place)) for place in range(2)])
    assert fleet.handed == 1 and fleet.hit_tokens == 1024  # the second stays: the decode engine has its beginning
    load = [LoadRequest(1000.0 * place, 1600, 4, (1, 10 + place, 20 + place)) for place in range(4)]
    base = Condition(msgspec.structs.replace(LARGE, tier=HOST), lambda seed: EvenPrice())
    found = run_once(resolved(base, {"split": "1+1"}), load, 0, {})
    assert found["handed_share"] == 1 and found["cache_hit_share"] == 3 * 512 / (4 * 1600)


def test_options_take_effect_in_one_order_and_none_is_as_if_it_was_not_given() -> None:
    base = Condition(msgspec.structs.replace(LARGE, tier=None), lambda seed: EvenPrice())
    given = {"split": "1+3", "tier": "host:1GB", "block_size": "32"}
    one = resolved(base, given)
    assert one == resolved(base, dict(reversed(given.items()))) and one.replicas == 4
    assert one.sizes.tier is not None and [store.name for store in one.sizes.tier.stores] == ["host", "peer"]
    compared = read_compared("split=none,2+2", base, given)
    whole, divided = compared.values()
    assert whole == resolved(base, {"tier": "host:1GB", "block_size": "32"}) and whole.split is None
    assert whole.sizes.tier is not None and [store.name for store in whole.sizes.tier.stores] == ["host"]
    assert divided.split == (2, 2) and divided.sizes == one.sizes
    assert resolved(base, {"tier": "none", "split": "none"}) == base
    recorded = msgspec.structs.replace(base, sizes=msgspec.structs.replace(base.sizes, tier=HOST))
    assert resolved(recorded, {"tier": "none"}) == base
    with pytest.raises(ConfigError, match="kv_tier is 'host' and the prefix cache is off"):
        resolved(recorded, {"prefix_cache": "off"})


COMMAND = ["simulate", "kvern-1m", "--roofline", "--hardware", "l4", "--load", "rate=200,requests=30", "--seeds", "1"]


def test_the_command_compares_divisions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--replicas", "3", "--compare", "split=none,1+2", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert "handed_share" not in runs["split=none"][0] and runs["split=1+2"][0]["handed_share"] == 1
    assert main([*COMMAND, "--compare", "split=none,1+2"]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if "handed share" in line]
    assert row == ["handed", "share", "–", "100.0%"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--split", "4"], "split is '4': it must be"),
        (["--split", "0+4"], "at least 1 of each"),
        (["--split", "1+1", "--kv-tier", "disk:1GB"], "split needs a kv_tier host"),
        (["--split", "1+1", "--router", "least"], "leave router and shards out"),
        (["--compare", "split=1+1,x"], "split is 'x'"),
        (["--split", "1+3", "--replicas", "8"], "split is 1+3, and replicas is 8: leave it out, or make it 4"),
        (["--split", "1+3", "--compare", "replicas=1,4"], "split is 1+3, and replicas is 1"),
        (["--split", "1+3", "--compare", "replicas=4,8"], "split is 1+3, and replicas is 8"),
        (["--split", "1+3", "--compare", "tier=none,host:1GB"], "split is 1+3, and the tier is none"),
        (["--split", "1+3", "--compare", "prefix_cache=on,off"], "needs the prefix cache, which is off"),
        (["--kv-tier", "host:1GB", "--compare", "prefix_cache=on,off"], "'host:1GB' and the prefix cache is off"),
    ],
)
def test_wrong_input_is_refused_in_a_line(more: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *more]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_division_is_read() -> None:
    assert read_split("2+16") == (2, 16)
    with pytest.raises(ConfigError, match="like 1"):
        read_split("2+16+1")
