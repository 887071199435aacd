"""Loads drawn by chance: what their properties mean, that they are the same everywhere, and what is refused."""

import hashlib
import itertools
import math
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvern.errors import ConfigError
from kvern.loads.file import as_line, read_file
from kvern.loads.request import BLOCK_TOKENS, LoadRequest
from kvern.loads.source import read_load

RICH = (
    "rate=2..8:60s,burstiness=0.5,requests=400,input=lognormal:700:0.8:4000,output=uniform:8:64,"
    "prefix=1024:3:1,turns=uniform:1:5,think=4s,tenants=4:1.2,seed=7"
)


def load(text: str) -> list[LoadRequest]:
    return list(read_load(text))


def digest(requests: list[LoadRequest]) -> str:
    return hashlib.sha256(b"".join(as_line(request) for request in requests)).hexdigest()


def test_a_line_is_the_same_load_on_every_machine() -> None:
    """The digest was made on one machine, and holds for others and for every seed of hashes."""
    known = "c5c13e1d634b05b9524d0a379495713b988c2a8ad39d625c842f10acda3a1602"
    assert digest(load(RICH)) == known
    code = f"from tests.loads.test_drawn_loads import *; print(digest(load({RICH!r})))"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        assert run.stdout.decode().strip() == known
    assert digest(load(RICH.replace("seed=7", "seed=8"))) != known


def test_a_drawn_load_is_a_valid_file(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    requests = load(RICH)
    assert len(requests) == 400
    file.write_bytes(b"".join(as_line(request) for request in requests))
    assert list(read_file(file)) == requests
    assert load(str(file)) == requests


def test_a_long_line_is_no_name_of_a_file() -> None:
    assert len(load(f"rate=1,requests=3,{'seed=1':>300}")) == 3


def test_another_rate_changes_arrivals_alone() -> None:
    slow, fast = load("rate=1,input=lognormal:500:1"), load("rate=9,input=lognormal:500:1")
    assert [one.prompt_tokens for one in slow] == [one.prompt_tokens for one in fast]
    assert slow[-1].arrival == pytest.approx(9 * fast[-1].arrival, rel=1e-5)


def test_lengths_have_their_distributions() -> None:
    assert {(one.prompt_tokens, one.output_tokens) for one in load("rate=1,input=300,output=20")} == {(300, 20)}
    even = [one.prompt_tokens for one in load("rate=1,input=uniform:100:300,requests=4000")]
    assert (min(even), max(even)) == (100, 300)
    assert statistics.fmean(even) == pytest.approx(200, rel=0.03)
    skewed = [one.output_tokens for one in load("rate=1,output=lognormal:500:0.8,requests=4000")]
    assert statistics.fmean(skewed) == pytest.approx(500, rel=0.06)
    assert statistics.stdev(math.log(one) for one in skewed) == pytest.approx(0.8, rel=0.05)
    assert max(one.output_tokens for one in load("rate=1,output=lognormal:500:0.8:600")) == 600


def test_arrivals_follow_rate_burstiness_and_ramp() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        times = [one.arrival for one in load(f"rate=20,burstiness={burstiness},requests=4000")]
        gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
        assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.1)
        assert statistics.stdev(gaps) == pytest.approx(0.05 * burstiness**-0.5, rel=0.15)
    times = [one.arrival for one in load("rate=10..50:100s,requests=5000")]
    within = [sum(start <= at < start + 10 for at in times) / 10 for start in (0, 45, 90, 120)]
    assert within == [pytest.approx(expected, rel=0.2) for expected in (12, 30, 48, 50)]
    assert {one.arrival for one in load("rate=inf,requests=9")} == {0.0}


def test_prompts_share_prefixes_and_nothing_else() -> None:
    requests = load("rate=1,prefix=1024:4:1,input=600,requests=500")
    assert {len(one.blocks) for one in requests} == {4}
    prefixes = Counter(one.blocks[:2] for one in requests)
    assert len(prefixes) == 4
    counts = [count for _, count in prefixes.most_common()]
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.25)  # a power of 1: the second is half as frequent
    own = [block for one in requests for block in one.blocks[2:]]
    assert len(set(own)) == len(own)
    assert not set(own) & {block for prefix in prefixes for block in prefix}


def test_tenants_have_prefixes_of_their_own() -> None:
    requests = load("rate=1,prefix=512:2,tenants=3,requests=300")
    assert {one.tenant for one in requests} == {"1", "2", "3"}
    owners = {one.blocks[0]: one.tenant for one in requests}
    assert Counter(owners.values()) == {"1": 2, "2": 2, "3": 2}
    assert all(owners[one.blocks[0]] == one.tenant for one in requests)


def test_a_turn_begins_with_prompt_and_answer_of_the_one_before() -> None:
    requests = load("rate=5,turns=4,think=2s,input=700,output=100,prefix=512,requests=402")
    assert [one.arrival for one in requests] == sorted(one.arrival for one in requests)
    talks: dict[str, list[LoadRequest]] = {}
    for one in requests:
        talks.setdefault(one.session, []).append(one)
    assert sorted(len(turns) for turns in talks.values()) == [2] + [4] * 100
    pauses = []
    for turns in talks.values():
        assert turns[0].prompt_tokens == 512 + 700
        for before, after in itertools.pairwise(turns):
            assert after.prompt_tokens == before.prompt_tokens + before.output_tokens + 700
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert len(after.blocks) == math.ceil(after.prompt_tokens / BLOCK_TOKENS)
            pauses.append(after.arrival - before.arrival)
    assert statistics.fmean(pauses) == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("requests=5", "load has no rate: give the requests a second"),
        ("rate=0", "load's rate is 0: it must be at least 1e-06, or inf"),
        ("rate=-2", "load's rate is -2: it must be at least 1e-06, or inf"),
        ("rate=1e-320", "load's rate is 9.99989e-321: it must be at least"),
        ("rate=1..0:9s", "load's rate is 0: it must be at least"),
        ("rate=x", "load has rate='x': it must be a number"),
        ("rate=nan", "load has rate='nan': it must be a number"),
        ("rate=1..2", r"load has rate=1..2: it must be like 16, inf, or 4..32:60s"),
        ("rate=1..inf:5s", "a rate that changes must be finite"),
        ("rate=1..2:5", "load's rate is '5': it must be a time"),
        ("rate=1,", "load has '': it must be NAME=VALUE"),
        ("rate=1,inputs=5", r"load has 'inputs', which is no property: did you mean input\?"),
        ("rate=1,rate=2", "load has rate twice: 1 and 2"),
        *[(f"rate=1,burstiness={value}", "it must be between 0.001 and 1e") for value in ("0", "inf", "1e-320", "-1")],
        ("rate=1,input=0", "load has input='0': it must be a whole number from 1 to"),
        ("rate=1,input=normal:5:1", "load has input='normal:5:1': it must be a number, uniform:LOW:HIGH or"),
        ("rate=1,input=uniform:9:3", "9 must not be above 3"),
        ("rate=1,output=lognormal:9:-1", "sigma must be between 0 and 4"),
        ("rate=1,prefix=1000", "load has prefix=1000: its tokens must be a multiple of 512"),
        ("rate=1,prefix=512:2:1:1", "it ends with COUNT or COUNT:ZIPF"),
        ("rate=1,tenants=-1", "load has tenants='-1': it must be a whole number from 0 to 1000000"),
        ("rate=1,tenants=2:-1", "the exponent must be between 0 and 10"),
        ("rate=1,turns=2000", "a conversation of 2000 turns: 1000 are the limit"),
        ("rate=1,turns=20,input=1000000", "a conversation of 17002176 tokens: 16777216 are the limit"),
        ("rate=1,think=5", "load's think is '5': it must be a time"),
        ("rate=1,seed=-1", "load has seed='-1': it must be a whole number from 0"),
    ],
)
def test_wrong_properties_are_named_with_value_and_limit(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("burstiness", ["1e-3", "1e6"])
@pytest.mark.parametrize("rate", ["1e-6", "1e300", "inf", "1e-6..1:60s"])
def test_arrivals_are_numbers_that_grow_at_the_limits(rate: str, burstiness: str) -> None:
    times = [one.arrival for one in read_load(f"rate={rate},burstiness={burstiness},requests=200")]
    assert times == sorted(times) and all(math.isfinite(one) and one >= 0 for one in times)
