"""KV tiers over a virtual clock: what a store has is loaded where that is faster, and takes its time."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from kvern.cli.main import main
from kvern.engine.step_load import StepLoad
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from kvern.simulate.engine import DrivenEngine, EngineSizes, Prompts, simulated_engine
from kvern.simulate.executor import Price
from kvern.simulate.prediction import predicted
from kvern.simulate.records import RecordedRequest, RecordedStep, RecordHeader, StepRecord, write_steps
from kvern.simulate.tiers import SimulatedHost, StoreSizes, ThreadedClock, TierSizes
from kvern.tiers.host import HostStore
from kvern.tiers.pages import HEADER_BYTES
from kvern.version import __version__
from tests.support.simulation import SIZES, EvenPrice

EVEN = EvenPrice()
TOKEN_BYTES = 1000
PAGE_BYTES = 64 * TOKEN_BYTES + HEADER_BYTES
SMALL = msgspec.structs.replace(SIZES, blocks=48, max_model_len=700, token_bytes=TOKEN_BYTES)


def store(name: str = "host", size: int = 1 << 30, latency: float = 0.25, bandwidth: float = 1e6) -> StoreSizes:
    return StoreSizes(name, size, latency, bandwidth, "")


def tiered(*stores: StoreSizes, on_device: bool = False) -> EngineSizes:
    return msgspec.structs.replace(SMALL, tier=TierSizes(stores), on_device=on_device)


def run(sizes: EngineSizes, load: list[LoadRequest], price: Price = EVEN) -> DrivenEngine:
    engine = simulated_engine(sizes, price, predicted(price, has_target=False))
    engine.run(load, Prompts())
    engine.scheduler.check_integrity()
    assert all(answer.ended for answer in engine.timeline.answers.values())
    return engine


def visits(*prompts: int) -> list[LoadRequest]:
    """Requests of 513 tokens, one after the other; equal numbers are equal but for the last token."""
    return [LoadRequest(100.0 * place, 513, 1, (prompt, 1000 + place)) for place, prompt in enumerate(prompts)]


@pytest.mark.parametrize("on_device", [False, True])
def test_what_left_the_cache_is_loaded_and_that_takes_its_time(on_device: bool) -> None:
    engine = run(tiered(store(), on_device=on_device), visits(1, 2, 1))
    first, _, again = engine.timeline.answers.values()
    assert engine.hit_tokens == 512 and engine.loaded_tokens > 256  # some blocks are left
    assert first.ttft == pytest.approx(8 * 1.64 + 1.01)
    moved = 0.25 + engine.loaded_tokens // 64 * PAGE_BYTES / 1e6
    assert moved + 1.01 <= again.ttft < moved + 1.01 + 0.003  # an engine that waits looks each millisecond


def test_a_store_forgets_what_was_not_used_for_the_longest() -> None:
    prompts = (1, 2, 3, 1, 3)
    many, few = (run(tiered(store(size=count * PAGE_BYTES)), visits(*prompts)).hit_tokens for count in (40, 18))
    assert many == 2 * 512 and few == 512  # the first is gone when it comes again


def test_pages_that_left_the_host_s_memory_come_from_a_disk() -> None:
    both = tiered(store(size=9 * PAGE_BYTES), store("disk", bandwidth=0.5e6))
    engine = run(both, visits(1, 2, 3, 1))
    assert engine.executor.tier is not None
    figures = engine.executor.tier.figures()
    assert figures["disk"].hit_tokens > 256 and figures["host"].hit_tokens == 0
    assert figures["host"].evicted_pages and not figures["disk"].evicted_pages


class QuickPrice(Price):
    """Steps that take less than the latency of a store."""

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        return 1e-5


def test_what_is_slower_than_computing_is_computed() -> None:
    engine = run(tiered(store()), visits(1, 2, 1), QuickPrice())
    assert engine.executor.tier is not None
    assert engine.loaded_tokens == 0 < engine.executor.tier.figures()["host"].refused_tokens


def test_conversations_over_a_small_cache_are_answered_earlier_with_a_tier() -> None:
    load = list(read_load("rate=0.02,requests=60,input=100,output=20,turns=uniform:3:4,think=50s"))
    load = [request for request in load if request.prompt_tokens + request.output_tokens <= 700]
    plain, with_store = run(SMALL, load), run(tiered(store()), load)
    assert with_store.hit_tokens > 1.5 * plain.hit_tokens
    first, second = (sum(one.ttft for one in each.timeline.answers.values()) for each in (plain, with_store))
    assert second < 0.8 * first


def test_a_run_is_the_same_each_time() -> None:
    load = list(read_load("rate=0.3,requests=40,input=uniform:100:500,output=20,prefix=512:3:1"))
    load = [msgspec.structs.replace(each, prompt_tokens=min(600, each.prompt_tokens)) for each in load]
    load = [msgspec.structs.replace(each, blocks=each.blocks[: -(-each.prompt_tokens // 512)]) for each in load]
    for sizes in (
        tiered(store(latency=0.01, bandwidth=1e8)),
        tiered(store("host", 20 * PAGE_BYTES, 0.01, 1e8), store("disk", 1 << 30, 0.01, 1e8), on_device=True),
    ):
        one, other = (run(sizes, load) for _ in range(2))
        assert [answer.last for answer in one.timeline.answers.values()] == [
            answer.last for answer in other.timeline.answers.values()
        ]
        assert one.loaded_tokens == other.loaded_tokens > 0


@pytest.mark.parametrize("seed", range(3))
def test_the_simulated_memory_keeps_what_a_host_s_memory_keeps(seed: int) -> None:
    dice = random.Random(seed)
    real = HostStore(90_000)
    length = 2000
    simulated = SimulatedHost(real._layout.cells // -(-length // real._layout.cell), length, ThreadedClock())
    names = [bytes([number] * 32) for number in range(60)]
    page = memoryview(bytearray(length))
    for _ in range(600):
        name = dice.choice(names)
        if dice.random() < 0.5:
            assert real.put([name], [page]) == simulated.put([name], [page])
        else:
            lent = real.lend([name], [length]), simulated.lend([name], [length])
            assert (lent[0] == [None]) == (lent[1] == [None])
            real.give_back([place for place in lent[0] if place is not None])
            simulated.give_back([place for place in lent[1] if place is not None])
    assert real.has(names) == simulated.has(names) and real.evicted == simulated.evicted > 0


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A record of steps whose prompts are dear."""
    file = tmp_path / "steps.jsonl"
    header = RecordHeader(version=__version__, model="m", hardware="h", vocabulary=100, sizes=SMALL)
    loads = [StepLoad(1 + place * 7 % 41, 100 * (place % 13)) for place in range(300)]
    steps = [RecordedStep(0.0, 0.1 + 0.01 * each.rows, each, each.rows, 0, 0) for each in loads]
    write_steps(StepRecord(header, [RecordedRequest(LoadRequest(0.0, 4, 1), [1])], steps), file)
    return file


LOAD = "rate=0.2,requests=40,input=100,output=20,turns=3,think=20s"


def test_the_command_compares_tiers(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--record", str(record), "--load", LOAD, "--seeds", "1"]
    assert main([*command, "--json", "--compare", "tier=none,host:1GB,host:1MB+disk:1GB"]) == 0
    told = json.loads(capsys.readouterr().out)
    none, host, both = (run for [run] in told["runs"].values())
    assert host["cache_hit_share"] > none["cache_hit_share"] and "tier_hit_share" not in none
    assert host["tier_hit_share"] > 0 < both["tier_hit_share"]
    assert "host moves 0.85 GB/s after 1.2 ms, as it was measured on a CPU" in told["basis"]
    assert main([*command, "--kv-tier", "host:1GB?bandwidth=2GB&latency=3ms"]) == 0
    assert "host moves 2 GB/s after 3 ms, as given" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("valkey://host", "simulated are host:SIZE and disk:SIZE"),
        ("host", "the size '' must be"),
        ("host:1GB?speed=3", "'speed' is not bandwidth or latency"),
        ("host:1GB?latency=3", "latency is '3'"),
        ("host:30KB", "a page takes 64064"),
        ("disk:30KB", "a page takes 64064"),
    ],
)
def test_what_is_not_simulated_is_refused_in_a_line(
    record: Path, option: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--record", str(record), "--load", LOAD, "--kv-tier", option]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_tier_needs_the_bytes_of_tokens_and_a_prefix_cache(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for change, told in (({"token_bytes": 0}, "record anew"), ({"prefix_cache": False}, "the prefix cache is off")):
        header = {"version": __version__, "model": "m", "hardware": "h", "vocabulary": 100}
        lines = record.read_bytes().splitlines()
        changed = RecordHeader(sizes=msgspec.structs.replace(SMALL, **change), **header)  # type: ignore[arg-type]
        record.write_bytes(b"\n".join([msgspec.json.encode(changed), *lines[1:]]))
        assert main(["simulate", "--record", str(record), "--load", LOAD, "--kv-tier", "host:1GB"]) == 2
        assert told in capsys.readouterr().err
