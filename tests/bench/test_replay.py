"""Recorded and drawn loads on a real server: the same lengths, arrivals and shared blocks."""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern.bench.http_client import HttpClient
from kvern.bench.replay import Replay
from kvern.bench.serving import LoadRun, Sample, Sender
from kvern.bench.serving_data import Prompts
from kvern.cli.main import main
from kvern.loads.file import as_line, read_file
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from tests.support.served import KEY, Served, eventually

DRAWN = "rate=40,requests=16,input=uniform:20:400,output=uniform:2:9,prefix=512:2,turns=uniform:1:2,think=100ms,seed=3"


def replay(requests: list[LoadRequest], folder: Path, vocabulary: int | None, seed: int = 0) -> list[Any]:
    """The prompts of a load."""
    file = folder / "load.jsonl"
    file.write_bytes(b"".join(as_line(request) for request in requests))
    made = Replay(str(file), None, Prompts(vocabulary, random.Random(0)), seed, None)
    return [made.sample(number).prompt for number in range(len(requests))]


def test_equal_blocks_are_equal_tokens(tmp_path: Path) -> None:
    load = [
        LoadRequest(0.0, 600, 5, (7, 8)),
        LoadRequest(0.1, 1024, 5, (7, 8)),
        LoadRequest(0.2, 1000, 5, (7, 9)),
        LoadRequest(0.3, 600, 5),
        LoadRequest(0.4, 600, 5),
    ]
    prompts = replay(load, tmp_path, 4096)
    assert [len(prompt) for prompt in prompts] == [600, 1024, 1000, 600, 600]
    first, longer, third, fourth, fifth = prompts
    assert longer[:600] == first
    assert third[:512] == first[:512] and third[512] != first[512]
    assert not {tuple(prompt[:9]) for prompt in (fourth, fifth)} & {tuple(first[:9])} and fourth != fifth
    assert all(1000 <= token < 4096 for prompt in prompts for token in prompt)
    assert replay(load, tmp_path, 4096) == prompts
    assert replay(load, tmp_path, 4096, seed=1)[0][:9] != first[:9]
    assert first[:3] == [3243, 1322, 2143]  # on every machine


def test_without_token_ids_blocks_are_words(tmp_path: Path) -> None:
    first, second = replay([LoadRequest(0.0, 9, 5, (7,)), LoadRequest(0.0, 20, 5, (7,))], tmp_path, None)
    assert len(first.split()) == 9
    assert second.startswith(f"{first} ")


def test_answers_are_read_while_requests_are_late() -> None:
    """Each body is made off the event loop, and each send lets it run, also if all requests come at once."""
    made: list[int] = []
    turns = 0

    class Samples(list[Sample]):
        def __getitem__(self, number: int) -> Sample:  # type: ignore[override]
            assert threading.current_thread() is not threading.main_thread()
            made.append(number)
            return Sample([1], 1)

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def work() -> LoadRun:
        other = asyncio.create_task(count())
        async with HttpClient("http://127.0.0.1:9") as client:
            sender = Sender(client, "/v1/completions", "m", {})
            run = await sender.run(Samples([Sample([1], 1)] * 5), [0.0] * 5, ahead=False)
        other.cancel()
        return run

    run = asyncio.run(work())
    assert made == [0, 1, 2, 3, 4] and turns >= 5
    assert run.latest_send is not None and len(run.outcomes) == 5


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "load.jsonl"


@pytest.fixture(scope="module")
def server(record: Path) -> Iterator[Served]:
    options = ("kvern-1m", "--threads", "1", "--max-model-len", "1600", "--api-key", KEY, "--record", str(record))
    served = Served(*options)
    yield served
    served.stop()


def bench(server: Served, target: Path, *arguments: str) -> dict[str, Any]:
    code = main(
        ["bench", "serve", "--port", str(server.port), "--api-key", KEY, "--result-filename", str(target), *arguments]
    )
    assert code == 0
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def common(load: list[LoadRequest]) -> dict[tuple[int, int], int]:
    """The number of blocks with which each two requests begin alike; their prompts have lengths of their own."""
    requests = sorted(load, key=lambda one: one.prompt_tokens)
    return {
        (one.prompt_tokens, other.prompt_tokens): sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.blocks, other.blocks, strict=False))
        )
        for one, other in itertools.combinations(requests, 2)
    }


def test_what_is_recorded_replayed_and_recorded_again_is_the_same(server: Served, record: Path, tmp_path: Path) -> None:
    drawn = list(read_load(DRAWN))
    lengths = {(one.prompt_tokens, one.output_tokens) for one in drawn}
    assert len(lengths) == len(drawn) == 16
    assert sum(common(drawn).values()) > 30
    first = bench(server, tmp_path / "first.json", "--replay", DRAWN)
    eventually(lambda: record.read_bytes().count(b"\n") == 16)
    assert (first["completed"], first["failed"]) == (16, 0)
    assert first["total_input_tokens"] == sum(one.prompt_tokens for one in drawn)
    assert first["total_output_tokens"] == sum(one.output_tokens for one in drawn)
    assert first["cached_input_tokens"] > 0
    recorded = list(read_file(record))
    assert {(one.prompt_tokens, one.output_tokens) for one in recorded} == lengths
    for pair, count in common(recorded).items():
        # of a block that is not full in the shorter of two turns a hash does not say that both begin alike
        assert count == common(drawn)[pair] or count == min(pair) // 512 < common(drawn)[pair]

    saved = tmp_path / "recorded.jsonl"
    saved.write_bytes(record.read_bytes())
    second = bench(server, tmp_path / "second.json", "--replay", str(saved), "--speed", "2")
    eventually(lambda: record.read_bytes().count(b"\n") == 32)
    assert (second["completed"], second["benchmark"]) == (16, "serve")
    again = list(read_file(record))[16:]
    assert {(one.prompt_tokens, one.output_tokens) for one in again} == lengths
    assert common(again) == common(recorded)
    assert not {one.blocks[0] for one in again} & {one.blocks[0] for one in recorded}  # another seed, another text


def test_each_tenant_has_figures(server: Served, tmp_path: Path) -> None:
    found = bench(
        server,
        tmp_path / "figures.json",
        *("--replay", "rate=inf,requests=9,input=9,output=2,tenants=2", "--num-prompts", "8", "--seed", "1"),
    )
    assert found["completed"] == 8
    assert [case["name"] for case in found["cases"]] == ["replay", "tenant 1", "tenant 2"]
    counts = [case["details"]["completed"] for case in found["cases"]]
    assert counts[0] == 8 == counts[1] + counts[2]
    replayed = found["cases"][0]["workload"]
    assert replayed["replay"].startswith("rate=inf")
    assert not {"request_rate", "burstiness", "dataset_name", "random_input_len"} & (replayed.keys() | found.keys())
    assert found["latest_send_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--replay", "absent.jsonl"), "load absent.jsonl cannot be read: No such file"),
        (
            ("--replay", "rate=1,input=5000"),
            "request 1 of load rate=1,input=5000 has 5128 tokens, prompt and answer, and",
        ),
        (("--replay", "rate=1,inputs=5"), "which is no property: did you mean input?"),
        (("--replay", "rate=1", "--speed", "0"), "speed is 0: it must be above 0"),
        (("--speed", "2"), "speed is 2: it must be above 0, and needs --replay"),
        (("--replay", "rate=1", "--workload", "baseline"), "workload is baseline: --replay has its own requests"),
        (("--replay", "rate=1", "--request-rate", "3"), "request_rate is 3.0: --replay has its own requests"),
        (("--replay", "rate=1", "--burstiness", "3"), "burstiness is 3.0: --replay has its own requests"),
        (("--replay", "rate=1", "--dataset-name", "custom"), "dataset_name is custom: --replay has its own requests"),
        (("--replay", "rate=1", "--random-input-len", "9"), "random_input_len is 9: --replay has its own requests"),
    ],
)
def test_a_wrong_replay_is_one_line(
    server: Served, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["bench", "serve", "--port", str(server.port), "--api-key", KEY, *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
