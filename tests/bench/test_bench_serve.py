"""Load on a real server, and what is made of what its clients saw."""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvern.bench.http_client import HttpClient, StreamReply
from kvern.bench.record import Record
from kvern.bench.serving import LoadRun, Outcome, Sample, Sender, arrival_times, run_loop
from kvern.bench.serving_data import Prompts, custom_samples, random_samples, repeated_prefixes
from kvern.bench.serving_figures import is_good, read_goodput, summarize
from kvern.bench.serving_workloads import WORKLOADS
from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.version import __version__
from tests.support.served import KEY, Served

Bench = Callable[..., tuple[int, dict[str, Any], str]]
SMALL = ("kvern-1m", "--threads", "1", "--max-model-len", "256")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(*SMALL, "--api-key", KEY)
    yield served
    served.stop()


@pytest.fixture
def bench(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs `kvern bench serve`: its exit code, figures, and what it says on stderr."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        target = tmp_path / "figures.json"
        code = main(["bench", "serve", "--port", str(server.port), "--result-filename", str(target), *arguments])
        report = json.loads(target.read_text()) if target.exists() else {}
        return code, report, capsys.readouterr().err

    return run


def test_arrivals_follow_seed_rate_and_burstiness() -> None:
    times = arrival_times(2000, 50.0, 1.0, random.Random(1))
    assert times == arrival_times(2000, 50.0, 1.0, random.Random(1))
    assert times != arrival_times(2000, 50.0, 1.0, random.Random(2))
    assert times == sorted(times)
    ends = [arrival_times(2000, 50.0, 1.0, random.Random(seed))[-1] for seed in range(20)]
    assert 0.01 < statistics.stdev(ends) / 40 < 0.04  # 1 / sqrt(2000): of a Poisson process, whose end nothing fixes
    assert statistics.fmean(ends) == pytest.approx(40, rel=0.02)
    for burstiness in (0.25, 1.0, 16.0):  # a gamma distribution deviates by 1 / sqrt(shape) of its mean
        times = arrival_times(2000, 50.0, burstiness, random.Random(3))
        gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        assert statistics.stdev(gaps) * 50 == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrival_times(3, float("inf"), 1.0, random.Random(0)) == [0, 0, 0]
    for rate, burstiness, name in ((0.0, 1.0, "request_rate"), (1.0, -1.0, "burstiness")):
        with pytest.raises(ConfigError, match=f"{name} is"):
            arrival_times(3, rate, burstiness, random.Random(0))


def test_figures_of_a_run() -> None:
    outcomes = [
        Outcome("", 0.0, 10, 5, 4, ttft=0.1, e2el=0.5, gaps=[0.1] * 4),
        Outcome("", 0.0, 10, 3, 0, ttft=0.3, e2el=0.7, gaps=[0.1, 0.3]),
        Outcome("", 0.0, 10, 1, 0, ttft=0.2, e2el=0.2),
        Outcome("", 0.0, error_kind="HTTP 500", error="first"),
        Outcome("", 0.0, error_kind="HTTP 500", error="second"),
    ]
    limits = read_goodput(["ttft:250", "tpot:150", "e2el:2000"])
    found = summarize(LoadRun(outcomes, 2.0, 0.1), (50, 99), limits, target_itl=0.2)
    assert (found["completed"], found["failed"]) == (3, 2)
    assert found["errors"] == {"HTTP 500": {"count": 2, "first": "first"}}
    assert (found["total_input_tokens"], found["cached_input_tokens"], found["total_output_tokens"]) == (30, 4, 9)
    assert (found["request_throughput"], found["output_throughput"]) == (1.5, 4.5)
    assert found["median_ttft_ms"] == pytest.approx(200)
    assert found["p99_tpot_ms"] == pytest.approx(199)
    assert found["mean_tpot_ms"] == pytest.approx(150)
    assert found["mean_itl_ms"] == pytest.approx(800 / 6)
    assert found["p99_e2el_ms"] == pytest.approx(696)
    assert found["request_goodput"] == 1.0
    assert found["late_token_share"] == pytest.approx(1 / 6)
    assert [is_good(outcome, limits) for outcome in outcomes] == [True, False, True, False, False]
    nothing = summarize(LoadRun([], 0.0, 0.0))
    assert (nothing["completed"], nothing["p99_ttft_ms"]) == (0, 0.0)
    assert "late_token_share" not in nothing


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "itl:5", ":5"])
def test_goodput_is_a_metric_and_milliseconds(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput is"):
        read_goodput([text])


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "x", "choices": [], **fields}).encode() + b"\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 10000])
def test_streams_may_be_cut_anywhere(size: int) -> None:
    data = b": a comment\n\n" + event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for delta, reason in (({"content": "A"}, None), ({"content": "\u00e4"}, None), ({"reasoning": "B"}, None)):
        data += event(choices=[{"index": 0, "delta": delta, "finish_reason": reason}], usage=None)
    data += event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    data += event(usage={"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}) + b"data: [DONE]\n\n"
    reply = StreamReply()
    reply.status = 200
    for start in range(0, len(data), size):
        reply.feed(data[start : start + size])
    assert reply.finished
    assert reply.error is None
    assert (reply.token_chunks, len(reply.gaps)) == (3, 2)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 3)
    assert reply.last >= reply.first > 0


def test_every_token_is_counted_and_timed(server: Served) -> None:
    async def load() -> LoadRun:
        prompts = Prompts(4096, random.Random(0))
        samples = [prompts.sample(prompts.tokens(9 + number), 5 + number) for number in range(12)]
        async with HttpClient(server.url, {"Authorization": f"Bearer {KEY}"}) as client:
            sender = Sender(client, "/v1/completions", "kvern-1m", {"ignore_eos": True})
            return await sender.run(samples, concurrency=3)

    run = run_loop(load())
    assert [outcome.prompt_tokens for outcome in run.outcomes] == [9 + number for number in range(12)]
    assert [outcome.output_tokens for outcome in run.outcomes] == [5 + number for number in range(12)]
    for outcome in run.outcomes:
        assert outcome.error_kind == ""
        assert 0 < outcome.ttft <= outcome.e2el < run.seconds
        assert len(outcome.gaps) < outcome.output_tokens
        assert sum(outcome.gaps) <= outcome.e2el - outcome.ttft + 1e-9
    assert any(outcome.gaps for outcome in run.outcomes)


def test_the_command_prints_and_writes_what_it_measured(bench: Bench, server: Served) -> None:
    options = [
        "--num-prompts",
        "8",
        "--random-input-len",
        "20",
        "--random-output-len",
        "6",
        "--random-range-ratio",
        "0.5",
    ]
    code, report, _ = bench(
        *options,
        "--ignore-eos",
        "--request-rate",
        "200",
        "--num-warmups",
        "2",
        "--seed",
        "3",
        "--save-detailed",
        "--metadata",
        "mark=a=b",
    )
    assert code == 0
    assert (report["model_id"], report["seed"], report["request_rate"], report["num_prompts"]) == (
        "kvern-1m",
        3,
        200,
        8,
    )
    assert KEY not in json.dumps(report)
    found = report
    assert (found["completed"], found["failed"], found["errors"]) == (8, 0, {})
    drawn = random_samples(Prompts(4096, random.Random(3)), 10, 20, 6, 0.5)[2:]
    assert found["total_input_tokens"] == sum(sample.prompt_tokens for sample in drawn)
    assert found["total_output_tokens"] == sum(sample.output_tokens or 0 for sample in drawn)
    assert len(found["ttfts"]) == len(found["itls"]) == 8
    assert found["mark"] == "a=b"
    assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    record = msgspec.convert(report, Record)
    assert (record.benchmark, record.model, record.conditions["server"]) == (
        "serve",
        "kvern-1m",
        {"version": __version__},
    )
    assert record.conditions["engine_options"]["threads"] == 1 and "api_key" not in record.conditions["engine_options"]
    (case,) = record.cases
    assert case.figures["server_cpu_ms"].main and case.figures["server_cpu_ms"].median > 0
    assert case.figures["engine_cpu_ms"].median > 0 and not case.figures["engine_cpu_ms"].main
    assert case.figures["median_ttft_ms"].runs == [found["median_ttft_ms"]] and case.workload["random_input_len"] == 20

    chat = ("--backend", "openai-chat", "--base-url", server.url, "--max-concurrency", "2", "--temperature", "0")
    limits = "--goodput", "e2e:60000", "--target-itl", "60s"
    code, report, _ = bench(*options, *chat, "--extra-body", '{"ignore_eos": true}', *limits)
    found = report
    assert (code, found["completed"]) == (0, 8)
    assert found["request_goodput"] == found["request_throughput"] and found["late_token_share"] == 0


def test_datasets_of_files(bench: Bench, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Once upon"}\n\n{"prompt": [300, 301, 302], "output_tokens": 2}\n')
    options = ("--dataset-path", str(rows), "--num-prompts", "4", "--ignore-eos")
    code, report, _ = bench("--dataset-name", "custom", *options, "--custom-output-len", "3")
    assert (code, report["total_output_tokens"]) == (0, 3 + 2 + 3 + 2)

    shared = tmp_path / "sharegpt.json"
    turns = [["What is a paged cache?", "It is made of blocks."], ["short"], ["Too long " * 300, "x" * 40]]
    shared.write_text(
        json.dumps([{"conversations": [{"from": "human", "value": text} for text in row]} for row in turns])
    )
    options = ("--dataset-path", str(shared), "--num-prompts", "2", "--backend", "openai-chat")
    code, report, _ = bench("--dataset-name", "sharegpt", *options, "--sharegpt-output-len", "4")
    assert (code, report["completed"]) == (0, 2)

    samples = repeated_prefixes(Prompts(300, random.Random(0)), 6, 5, 2, 2, 1)
    heads = [tuple(sample.prompt[:5]) for sample in samples]
    assert sorted(heads.count(head) for head in set(heads)) == [3, 3]
    assert all(150 <= token < 300 for sample in samples for token in sample.prompt)
    for text, reason in (("nonsense", "line 1"), ('{"prompt": ""}', "line 1"), ("", "no prompts")):
        rows.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            custom_samples(rows, 1, 1, len)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads(bench: Bench, name: str) -> None:
    code, report, said = bench("--workload", name, "--num-prompts", "4", "--request-rate", "100", "--disable-tqdm")
    assert (code, said.count("\n")) == (0, 1)
    parts = report["results"]
    assert all((part["completed"], part["failed"]) == (4, 0) for part in parts.values())
    if name == "chunked_prefill":
        assert list(parts) == ["decodes alone", "decodes", "long prompts"]
        assert parts["long prompts"]["total_input_tokens"] == 4 * 192
    if name == "prefix_caching":
        assert parts["cold"]["cached_input_tokens"] < 64 < 4 * 112 <= parts["warm"]["cached_input_tokens"]


def test_requests_that_all_fail_are_counted_and_end_with_one(
    bench: Bench,
) -> None:
    code, report, said = bench("--num-prompts", "3", "--random-input-len", "300")
    errors = report["errors"]
    assert (code, errors["HTTP 400"]["count"]) == (1, 3)
    assert "random: 3 requests failed: HTTP 400: the prompt has 300 tokens" in said
    code, report, said = bench("--num-prompts", "2", "--random-input-len", "4", "--timeout", "0.0001")
    assert (code, report["errors"]["timeout"]["count"]) == (1, 2)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--base-url", "ftp://x"), "base_url must look like http://host"),
        (("--base-url", "http://me:secret@x"), "base_url must look like http://host"),
        (("--tokenizer", "."), "tokenizer . has no tokenizer.json"),
        (("--result-filename", "absent/figures.json"), "cannot be written"),
        (("--num-warmups", "-1"), "num_warmups is -1"),
        (("--base-url", "http://127.0.0.1:1"), "does not answer"),
        (("--api-key", "wrong"), "answers 401: the API key"),
        (("--header", "nothing"), "header is 'nothing'"),
        (("--header", "a=b\r\nc: d"), "a header is one line"),
        (("--extra-body", "[]"), "extra_body is '[]'"),
        (("--metadata", "nothing"), "metadata is 'nothing'"),
        (("--goodput", "ttft:0"), "goodput is 'ttft:0'"),
        (("--target-itl", "15"), "target_itl is '15'"),
        (("--percentile-metrics", "ttft,speed"), "percentile_metrics has 'speed'"),
        (("--metric-percentiles", "101"), "metric_percentiles is '101'"),
        (("--num-prompts", "0"), "num_prompts is 0"),
        (("--request-rate", "0"), "request_rate is 0"),
        (("--random-range-ratio", "1"), "random_range_ratio is 1"),
        (("--dataset-name", "custom"), "give --dataset-path"),
        (("--dataset-name", "custom", "--dataset-path", "absent"), "dataset absent cannot be read"),
        (("--workload", "baseline", "--max-concurrency", "2"), "max_concurrency is 2"),
    ],
    ids=range(21),
)
def test_bad_options_are_one_line(bench: Bench, options: tuple[str, ...], reason: str) -> None:
    code, _, said = bench(*options)
    assert code == 2
    assert said.startswith("kvern bench serve: error: ") and reason in said
    assert said.count("\n") == 1


@pytest.mark.nightly
def test_a_server_that_dies_midway_is_counted() -> None:
    served = Served("kvern-12m", *SMALL[1:], "--max-model-len", "2048")
    engine = served.engine_pid()

    def stop_after_one(done: int, tokens: int) -> None:
        if done == 1:
            served.stop(signal.SIGKILL)
            os.kill(engine, signal.SIGKILL)

    @contextlib.contextmanager
    def progress(total: int) -> Iterator[Callable[[int, int], None]]:
        yield stop_after_one

    async def load() -> LoadRun:
        samples = [Sample([300 + number] * 4, 2 if number == 0 else 2000) for number in range(6)]
        async with HttpClient(served.url) as client:
            sender = Sender(client, "/v1/completions", "kvern-12m", {"ignore_eos": True}, progress=progress)
            return await sender.run(samples, concurrency=3)

    found = summarize(run_loop(load()))
    assert (found["completed"], found["failed"]) == (1, 5)
    assert found["total_output_tokens"] == 2
    counts = {kind: error["count"] for kind, error in found["errors"].items()}
    assert counts.pop("no connection") == 3
    assert set(counts) <= {"broken stream", "no answer"} and sum(counts.values()) == 2


ANSWERS = {
    b"HTTP/1.1 200 OK\r\n\r\n" + event(choices=[{"text": "a"}]) + b"data: [DONE]\n\n": "",
    b"HTTP/1.1 200 OK\r\n\r\n" + event(choices=[{"text": "a"}]): "broken stream",
    b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\ndata: [DONE]\n\n": "empty stream",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}": "broken stream",
    b"HTTP/1.1 200 OK\r\n\r\n" + event(error={"message": "engine lost"}) + b"data: [DONE]\n\n": "error in stream",
    b"HTTP/1.1 200 OK\r\n\r\ndata: {nonsense\n\ndata: [DONE]\n\n": "error in stream",
    b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy": "HTTP 503",
    b"SSH-2.0\r\n": "no answer",
    b"": "no answer",
}


@pytest.mark.parametrize("answer", list(ANSWERS), ids=range(len(ANSWERS)))
def test_answers_of_broken_servers(answer: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def load() -> Outcome:
        async with await asyncio.start_server(speak, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            async with HttpClient(f"http://127.0.0.1:{port}") as client:
                run = await Sender(client, "/v1/completions", "m", {}).run([Sample("text", 1)])
                return run.outcomes[0]

    outcome = run_loop(load())
    assert outcome.error_kind == ANSWERS[answer]
    assert bool(outcome.error) == bool(outcome.error_kind)


def test_paths_keep_their_prefix_and_one_v1() -> None:
    for url, endpoint, path in (
        ("http://x", "/v1/models", "/v1/models"),
        ("http://x:1/v1/", "/v1/models", "/v1/models"),
        ("http://x/team/a/", "/v1/models", "/team/a/v1/models"),
        ("http://x/team/v1", "/health", "/team/v1/health"),
    ):
        assert HttpClient(url).path(endpoint) == path
