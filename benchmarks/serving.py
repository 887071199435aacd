"""kvern serve under load: beside the same work offline, with many connections, and on the five workloads.

    python benchmarks/serving.py                         # the embedded model; a quiet machine, please
    python benchmarks/serving.py --threads 1             # every other option goes to the engine, here and offline
    python benchmarks/serving.py --only http --model FOLDER --load-format dummy --max-batch-requests 512

    offline     requests over HTTP, and the same ones through kvern.LLM: both are loaded and take turns, so that a GPU
                needs a --kv-cache-tokens that fits twice
    memory      what 1000 idle connections and 1000 waiting streams add to the server's resident memory (Linux)
    workloads   those of `kvern bench serve --workload`
    http        512 tokens in and 128 out: 512 requests at once, then 256 at 16 a second; only if it is asked for

Every round measures all of it, in turns, with prompts of its own. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tyro

import kvern
from kvern.bench.http_client import HttpClient, Reply, StreamReply
from kvern.bench.record import Case, figure, keep
from kvern.bench.serving import LoadRun, Sample, Sender, arrival_times, fetch, run_loop
from kvern.bench.serving_data import Prompts, random_samples
from kvern.bench.serving_figures import case_of, summarize
from kvern.bench.serving_workloads import WORKLOADS, LoadSettings
from kvern.config import DEFAULT_MODEL, EngineConfig
from serving_tables import CONNECTIONS, Figures, show, tell

CASES = ("offline", "memory", "workloads", "http")
BODY: dict[str, Any] = {"ignore_eos": True, "temperature": 0.6}
RUNNING = 8
"""Requests that the engine runs while all other streams wait."""


@dataclass
class Server:
    """A running `kvern serve`."""

    process: subprocess.Popen[str]
    url: str

    def megabytes(self) -> tuple[float, float]:
        """Resident memory of the server's process and of its engine's."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return _resident(self.process.pid), sum(_resident(int(pid)) for pid in children)


def _resident(pid: int) -> float:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@contextmanager
def serving(options: Sequence[str]) -> Iterator[Server]:
    """Start a server on a free port of loopback and end it."""
    command = [sys.executable, "-m", "kvern", "serve", "--host", "127.0.0.1", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"on (http://[\d.]+:\d+)", line):
                threading.Thread(target=shutil.copyfileobj, args=(process.stderr, sys.stderr), daemon=True).start()
                yield Server(process, found[1])
                return
        raise SystemExit(f"the server did not start:\n{''.join(said)}")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def offline(options: Sequence[str]) -> Iterator[Callable[[Sequence[Sample]], float]]:
    """Start this script as a worker with kvern.LLM; give a function from samples to the seconds they take there."""
    command = [sys.executable, __file__, "--worker", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(samples: Sequence[Sample]) -> float:
        work = {"prompts": [each.prompt for each in samples], "lengths": [each.output_tokens for each in samples]}
        stdin.write(json.dumps(work) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit("kvern.LLM failed; its error is above")
        return float(line)

    try:
        yield ask
    finally:
        stdin.close()
        process.wait()


def work_offline(config: EngineConfig) -> None:
    """The worker: prompts and lengths a line on stdin, seconds a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not reach the answers
    llm = kvern.LLM(**dataclasses.asdict(config))
    for line in sys.stdin:
        work = json.loads(line)
        params = [kvern.SamplingParams(max_tokens=length, **BODY) for length in work["lengths"]]
        began = time.perf_counter()
        outputs = llm.generate(work["prompts"], params)
        seconds = time.perf_counter() - began
        assert [len(output.outputs[0].token_ids) for output in outputs] == work["lengths"]
        answers.write(f"{seconds}\n")
        answers.flush()


class Bench:
    """Measures one round at a time."""

    def __init__(self, options: Sequence[str], requests: int) -> None:
        from kvern.models.hub import resolve_model
        from kvern.models.registry import spec_from_config
        from kvern.text.tokenizer import read_json

        self.options = list(options)
        self.config = tyro.cli(EngineConfig, args=self.options)
        folder = resolve_model(self.config.model, revision=self.config.revision)
        self.vocabulary = spec_from_config(read_json(folder / "config.json")).vocab_size
        self.requests = requests

    def prompts(self, seed: object) -> Prompts:
        return Prompts(self.vocabulary, random.Random(str(seed)))

    def work(self, seed: object, count: int = 0) -> list[Sample]:
        """128 tokens in, 128 out."""
        return random_samples(self.prompts(seed), count or self.requests, 128, 128)

    # --- the cases -----------------------------------------------------------------------------------------------

    def beside_offline(self, server: Server, ask: Callable[[Sequence[Sample]], float], number: int) -> Figures:
        """Tokens/s of the same requests over HTTP, streamed and at once, and through kvern.LLM, each warmed up."""

        async def load() -> Figures:
            async with HttpClient(server.url) as client:
                sender, _ = await connect(client)
                await sender.run(self.work(f"warm {number}", 16))
                return checked(await sender.run(self.work(number)))

        async def load_at_once() -> float:
            async with HttpClient(server.url) as client:
                bodies = [BODY | {"prompt": sample.prompt, "max_tokens": 128} for sample in self.work(f"once {number}")]
                replies = [Reply() for _ in bodies]
                began = time.perf_counter()
                sent = (
                    client.send("POST", "/v1/completions", msgspec.json.encode(body), reply)
                    for body, reply in zip(bodies, replies, strict=True)
                )
                await asyncio.gather(*sent)
                seconds = time.perf_counter() - began
            tokens: list[int] = [msgspec.json.decode(reply.content)["usage"]["completion_tokens"] for reply in replies]
            return sum(tokens) / seconds

        def over_http() -> tuple[float, float]:
            streamed = float(run_loop(load())["output_throughput"])
            return streamed, run_loop(load_at_once())

        def alone() -> float:
            ask(self.work(f"warm {number}", 16))
            return 128 * self.requests / ask(self.work(number))

        if number % 2:  # who goes first changes with the rounds
            offline, (http, at_once) = alone(), over_http()
        else:
            (http, at_once), offline = over_http(), alone()
        return {
            "http": http,
            "at_once": at_once,
            "offline": offline,
            "ratio": http / offline,
            "at_once_ratio": at_once / offline,
        }

    def memory(self) -> Figures:
        """Megabytes that connections and waiting streams add."""
        with serving([*self.options, "--max-batch-requests", str(RUNNING)]) as server:
            return run_loop(self._memory(server))

    async def _memory(self, server: Server) -> Figures:
        async with HttpClient(server.url) as client:
            sender, entry = await connect(client)
            await sender.run(self.work("warm", 16))
        before = server.megabytes()
        async with HttpClient(server.url) as client:
            await asyncio.gather(*(client.send("GET", "/health", b"", Reply()) for _ in range(CONNECTIONS)))
            idle = server.megabytes()
        body = BODY | {"model": entry["id"], "stream": True, "max_tokens": entry["max_model_len"] - 16}
        async with HttpClient(server.url) as client:
            replies = [StreamReply() for _ in range(CONNECTIONS + RUNNING)]
            draw = self.prompts("streams")
            streams = [
                asyncio.create_task(
                    client.send(
                        "POST", "/v1/completions", msgspec.json.encode(body | {"prompt": draw.tokens(16)}), reply
                    )
                )
                for reply in replies
            ]
            async with asyncio.timeout(60):
                while not all(reply.status for reply in replies):
                    await asyncio.sleep(0.05)
            streaming = server.megabytes()
            waiting = sum(reply.status == 200 and not reply.first for reply in replies)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return {
            "idle_connections": CONNECTIONS,
            "idle_megabytes": idle[0] - before[0],
            "waiting_streams": waiting,
            "waiting_megabytes": streaming[0] - before[0],
            "engine_megabytes": streaming[1] - before[1],
            "server_megabytes_before": before[0],
        }

    def workloads(self, server: Server, number: int) -> dict[str, Figures]:
        """The figures of every part of every workload."""

        async def load() -> dict[str, Figures]:
            found: dict[str, Figures] = {}
            async with HttpClient(server.url) as client:
                sender, entry = await connect(client)
                for name, workload in WORKLOADS.items():
                    parts = await workload(LoadSettings(sender, self.prompts((name, number)), entry["max_model_len"]))
                    found |= {f"{name}: {part}": checked(run) for part, run in parts.items()}
            return found

        return run_loop(load())

    def http(self, rounds: int) -> dict[str, list[Figures]]:
        """512 tokens in and 128 out, at once and at a rate; one server for all rounds."""
        found: dict[str, list[Figures]] = {"512 at once": [], "16 requests/s": []}

        async def load(server: Server) -> None:
            async with HttpClient(server.url) as client:
                sender, _ = await connect(client)
                for number in range(-1, rounds):  # the first is to warm up
                    for name, count, rate in (("512 at once", 512, float("inf")), ("16 requests/s", 256, 16.0)):
                        samples = random_samples(self.prompts((name, number)), count, 512, 128)
                        times = arrival_times(count, rate, 1.0, random.Random(f"{name} {number}"))
                        if number >= 0:
                            found[name].append(checked(await sender.run(samples, times)))
                            tell(number, name, found[name][-1])
                        elif rate > count:
                            checked(await sender.run(samples, times))

        with serving(self.options) as server:
            run_loop(load(server))
        return found


async def connect(client: HttpClient) -> tuple[Sender, Figures]:
    """A sender to the server's model, and the model's entry."""
    entry = (await fetch(client, "/v1/models"))["data"][0]
    return Sender(client, "/v1/completions", entry["id"], BODY), entry


def checked(run: LoadRun) -> Figures:
    """The figures of a run in which no request failed."""
    found = summarize(run)
    if found["failed"]:
        raise SystemExit(f"{found['failed']} requests failed: {found['errors']}")
    return found


def measured(report: Figures, requests: int) -> list[Case]:
    """The cases of a record."""
    found = []
    if rounds := report.get("offline"):
        figures = {key: figure([each[key] for each in rounds], _unit(key), "higher") for key in rounds[0]}
        found.append(Case("offline", figures, {"requests": requests}))
    if rounds := report.get("memory"):
        values = {key: [each[key] for each in rounds] for key in rounds[0]}
        figures = {key: figure(runs, "MB") for key, runs in values.items() if "megabytes" in key}
        found.append(Case("memory", figures, details={key: values[key] for key in values if key not in figures}))
    loads = {**report.get("workloads", {}), **report.get("http", {})}
    return found + [case_of(name, rounds, {}) for name, rounds in loads.items()]


def _unit(key: str) -> str:
    return "of offline" if key.endswith("ratio") else "tokens/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", help="these cases only; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--requests", type=int, default=64, help="of the case offline, all at once (default 64)")
    parser.add_argument("--output", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    if arguments.worker:
        work_offline(tyro.cli(EngineConfig, args=options))
        return
    cases = arguments.only or CASES[:3]
    bench = Bench(options, arguments.requests)
    report: Figures = {case: {} if case == "workloads" else [] for case in cases if case != "http"}
    with contextlib.ExitStack() as stack:
        if "offline" in cases or "workloads" in cases:
            server = stack.enter_context(serving(options))
        if "offline" in cases:
            ask = stack.enter_context(offline(options))
        for number in range(arguments.rounds):
            if "offline" in cases:
                report["offline"].append(bench.beside_offline(server, ask, number))
                print(f"round {number + 1}: {report['offline'][-1]}", file=sys.stderr)
            if "workloads" in cases:
                for name, figures in bench.workloads(server, number).items():
                    report["workloads"].setdefault(name, []).append(figures)
                    tell(number, name, figures)
    for number in range(arguments.rounds if "memory" in cases else 0):
        report["memory"].append(bench.memory())
        print(f"round {number + 1}: {report['memory'][-1]}", file=sys.stderr)
    if "http" in cases:
        report["http"] = bench.http(arguments.rounds)
    show(report)
    given = {"requests": arguments.requests, "server": options}
    model = dict(itertools.pairwise(options)).get("--model", DEFAULT_MODEL)
    keep(arguments.output, "serving", model, given, measured(report, arguments.requests))


if __name__ == "__main__":
    main()
