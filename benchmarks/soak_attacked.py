"""Eight honest streams beside attackers: byte-identical texts, a small request's time, and the server's memory.

    python benchmarks/soak_attacked.py --seconds 1800 --output benchmarks/results/soak-attacked-cpu.json

First nobody attacks, which tells how long a small request takes beside eight streams. Then `attack_load.py` sends
everything hostile from another process, and an engine is killed from outside every five minutes, at least once.
Streams and small requests come from one process all the time, whose own delay is told, too.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from soak import MODEL, OPTIONS, alone, resident

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.served import ENGINE, child_of

from kvern.bench.record import keep

STREAMS = 8
ROWS = 32
"""Of a batch: on a CPU the time of a step grows with its rows, and a crowd of another key takes all that are free."""
KILL_SECONDS = 300.0
"""Between two kills."""
MOST_SLOWER = 3.0
"""The p99 of small requests, attacked over quiet."""
MOST_GROWTH = 128 << 20
"""Bytes that server and engine may each have more in the last quarter than before."""
QUIET_SHARE = 0.1
"""Of the time, before the attack."""
WARM_SECONDS = 5.0
"""At the beginning, which count for nothing."""
PAUSE = 0.25
"""Seconds between two small requests."""
LOOK_SECONDS = 0.05
BUSY = "503"
"""The status that says when to come again."""
TOLD_SECONDS = 15.0
"""Between two lines that say how it goes."""
KEYS = ("honest:soak-honest", "hostile:soak-hostile", "crowd:soak-crowd", "operator:soak-operator admin=1")
SMALL = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
HONEST = {"authorization": "Bearer soak-honest"}
OPERATOR = {"authorization": "Bearer soak-operator"}

Times = list[tuple[float, float]]
"""When something began and ended."""


class AttackedSoak:
    """One run against one server."""

    def __init__(self, process: subprocess.Popen[str], url: str, expected: dict[tuple[str, int], str]) -> None:
        self.process = process
        self.url = url
        self.expected = expected
        self.done = 0
        self.wrong: list[str] = []
        self.small: Times = []
        self.health: Times = []
        """Requests that the event loop answers without an engine."""
        self.delays: Times = []
        """Of this process: when it should have been woken, and when it was."""
        self.acts: list[tuple[str, str, float, float]] = []
        """Attacks: the name, the answer, when it began and ended."""
        self.fuzzer: dict[str, Any] = {"requests": 0, "wrong": []}
        self.memory: list[tuple[int, int]] = []
        """Of server and engine."""
        self.restarts: Times = []
        """From a kill until another engine is ready."""
        self.random = random.Random(1)
        self.began = self.quiet_end = self.end = 0.0
        self.honest, self.operator = (
            httpx2.AsyncClient(base_url=url, headers=headers, timeout=300) for headers in (HONEST, OPERATOR)
        )

    async def run(self, seconds: float, folder: Path, pattern: str) -> None:
        """Quiet, then attacked."""
        command = [sys.executable, str(Path(__file__).with_name("attack_load.py")), self.url, str(folder), pattern]
        attack = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert attack.stdin is not None and attack.stdout is not None
        attack.stdout.readline()
        self.began = time.monotonic() + WARM_SECONDS
        self.quiet_end = self.began + max(20.0, seconds * QUIET_SHARE)
        self.end = self.quiet_end + seconds * (1 - QUIET_SHARE)
        attack.stdin.write(f"{self.quiet_end} {self.end}\n")
        attack.stdin.close()
        tasks = [asyncio.create_task(self._streams()) for _ in range(STREAMS)]
        tasks += [asyncio.create_task(work()) for work in (self._small, self._look, self._tell, self._kill)]
        await asyncio.gather(*tasks, asyncio.to_thread(self._hear, attack))
        if attack.wait():
            self.wrong.append(f"the attacking process ended with {attack.returncode}")
        await self.honest.aclose()
        await self.operator.aclose()

    async def _streams(self) -> None:
        while time.monotonic() < self.end:
            key = self.random.choice(list(self.expected))
            prompt, seed = key
            text = ""
            try:
                text = await self._stream(prompt, seed)
            except (OSError, ValueError) as error:
                self.wrong.append(f"the stream of {key} ended with {error}")
            if text != self.expected[key]:
                self.wrong.append(f"of {key} came {text!r}, not {self.expected[key]!r}")
            self.done += 1

    async def _stream(self, prompt: str, seed: int) -> str:
        """One text, read as bytes that are looked at in the end: a client library takes more time than the server."""
        options = {"model": MODEL, "prompt": prompt, "seed": seed, "max_tokens": 120, "temperature": 0.8}
        body = json.dumps({**options, "ignore_eos": True, "stream": True}).encode()
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"POST /v1/completions HTTP/1.0\r\nHost: {parts.netloc}\r\nAuthorization: Bearer soak-honest\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            top, _, events = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        data = [event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event.startswith(b"data: {")]
        if b" 200 " not in top.split(b"\r\n")[0]:
            raise ValueError(f"{top!r} {events!r}")
        return "".join(choice["text"] for event in data for choice in json.loads(event)["choices"])

    async def _small(self) -> None:
        while time.monotonic() < self.end:
            began = time.monotonic()
            try:
                answer = await self.honest.post("/v1/completions", json=SMALL)
                if answer.status_code != 200:
                    self.wrong.append(f"a small request got {answer.status_code} {answer.text}")
            except httpx2.HTTPError as error:
                self.wrong.append(f"a small request got {type(error).__name__} {error}")
            self.small.append((began, time.monotonic()))
            await self._sleep(PAUSE)

    async def _look(self) -> None:
        """At the event loop of the server, and at the memory."""
        while time.monotonic() < self.end:
            began = time.monotonic()
            try:
                await self.operator.get("/health")
            except httpx2.HTTPError as error:
                self.wrong.append(f"/health got {type(error).__name__} {error}")
            self.health.append((began, time.monotonic()))
            with contextlib.suppress(ValueError, OSError):  # between two engines
                self.memory.append((resident(self.process.pid), resident(child_of(self.process.pid, ENGINE))))
            await self._sleep(PAUSE)

    async def _sleep(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        self.delays.append((due, time.monotonic()))

    async def _kill(self) -> None:
        """End engines from outside, at equal distances."""
        attacked = self.end - self.quiet_end
        count = max(1, int(attacked / KILL_SECONDS))
        for number in range(count):
            await asyncio.sleep(self.quiet_end + attacked * (number + 0.5) / count - time.monotonic())
            while not await self._is_ready():
                await asyncio.sleep(LOOK_SECONDS)
            killed, began = child_of(self.process.pid, ENGINE), time.monotonic()
            os.kill(killed, signal.SIGKILL)
            while not await self._is_ready(killed):
                await asyncio.sleep(LOOK_SECONDS)
            self.restarts.append((began, time.monotonic()))

    async def _is_ready(self, killed: int = 0) -> bool:
        """Whether an engine takes requests that is not the one that was killed."""
        with contextlib.suppress(ValueError, httpx2.HTTPError):
            return child_of(self.process.pid, ENGINE) != killed and (await self.operator.get("/ready")).is_success
        return False

    def _hear(self, attack: subprocess.Popen[str]) -> None:
        assert attack.stdout is not None
        for line in attack.stdout:
            told = json.loads(line)
            if isinstance(told, dict):
                self.fuzzer = told
            else:
                self.acts.append(tuple(told))

    async def _tell(self) -> None:
        """How it goes, from time to time."""
        before = time.monotonic()
        while before < self.end:
            await asyncio.sleep(min(TOLD_SECONDS, max(0.0, self.end - before)))
            now = time.monotonic()
            lately = [1000 * (end - began) for began, end in list(self.small) if end > before]
            slowest = f"small requests {statistics.median(lately):.0f}, at most {max(lately):.0f} ms" if lately else "-"
            memory = "+".join(str(size >> 20) for size in self.memory[-1])
            said = f"{self.done} streams, {slowest}, {len(self.acts)} attacks, {len(self.wrong)} wrong, {memory} MiB"
            print(f"{now - self.began:5.0f} s {'quiet' if now < self.quiet_end else 'attacked'}: {said}", flush=True)
            before = now

    def result(self) -> dict[str, Any]:
        """What was measured."""
        quiet = [times for times in self.small if self.began < times[0] and times[1] < self.quiet_end]
        attacked = [times for times in self.small if times[1] >= self.quiet_end]
        fell = beside(attacked, self.restarts)
        figures = percentiles(quiet), percentiles(attacked)
        answers: dict[str, Counter[str]] = {}
        for name, status, _, _ in self.acts:
            answers.setdefault(name, Counter())[status] += 1
        faults = [
            f"{name} was answered {status}" for name, status, _, _ in self.acts if status[0] == "5" and status != BUSY
        ]
        places = [round(part * (len(self.memory) - 1) / 20) for part in range(21)]
        return {
            "honest streams": self.done,
            "small request, quiet, ms": figures[0],
            "small request, attacked, ms": figures[1],
            "small request, attacked, without those that waited for a restart, ms": percentiles(
                sorted(set(attacked) - set(fell))
            ),
            "p99 attacked over quiet": round(figures[1]["p99"] / figures[0]["p99"], 2),
            "small requests that waited for a restart": len(fell),
            "restarts, s": [round(end - began, 2) for began, end in self.restarts],
            "GET /health, quiet, ms": percentiles([times for times in self.health if times[1] < self.quiet_end]),
            "GET /health, attacked, ms": percentiles([times for times in self.health if times[1] >= self.quiet_end]),
            "delay of the client itself, quiet, ms": percentiles([t for t in self.delays if t[1] < self.quiet_end]),
            "delay of the client itself, attacked, ms": percentiles([t for t in self.delays if t[1] >= self.quiet_end]),
            "attacks": {name: dict(counts) for name, counts in sorted(answers.items())},
            "small request beside each, ms": self._beside_each(attacked),
            "requests of the fuzzer": self.fuzzer["requests"],
            "memory of server and engine at twentieths, MiB": [
                [size >> 20 for size in self.memory[place]] for place in places
            ],
            "wrong": [*self.wrong, *self.fuzzer["wrong"], *faults, *self._growth()],
        }

    def _beside_each(self, small: Times) -> dict[str, dict[str, float]]:
        """How long those took that ran at the same time as an attack of each name, the slowest first."""
        acts: dict[str, Times] = {}
        for name, _, began, end in self.acts:
            acts.setdefault(name, []).append((began, end))
        figures = {name: percentiles(beside(small, times)) for name, times in acts.items()}
        return dict(sorted(figures.items(), key=lambda item: -item[1]["p99"]))

    def _growth(self) -> list[str]:
        cut = len(self.memory) * 3 // 4
        sizes = [(name, [size[place] for size in self.memory]) for place, name in enumerate(("server", "engine"))]
        return [
            f"the memory of the {name} grew from {max(size[:cut]) >> 20} to {max(size[cut:]) >> 20} MiB"
            for name, size in sizes
            if max(size[cut:]) > max(size[:cut]) + MOST_GROWTH
        ]


def beside(times: Times, others: Times) -> Times:
    """Those of `times` that overlap with one of `others`."""
    return [(began, end) for began, end in times if any(start < end and began < stop for start, stop in others)]


def percentiles(times: Times) -> dict[str, float]:
    """In milliseconds."""
    taken = [1000 * (end - began) for began, end in times]
    if len(taken) < 2:
        return {"count": len(taken), "p50": 0, "p99": 0, "max": max(taken, default=0)}
    cuts = statistics.quantiles(taken, n=100, method="inclusive")
    return {"count": len(taken), "p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "max": round(max(taken), 1)}


def figure(client: httpx2.Client, name: str) -> float:
    """One of the metrics; 0 if there is none."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == f"kvern:{name}")


def settled(client: httpx2.Client) -> dict[str, float]:
    """What still runs, waits, or holds blocks, when everybody has gone."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(100):
        left = {name: value for name in names if (value := figure(client, name))}
        if not left:
            break
        time.sleep(0.1)
    return left


def soak(seconds: float, pattern: str = "", prompts: int = 60) -> dict[str, Any]:
    """Run it; what was done and what went wrong."""
    expected = alone(prompts)
    with tempfile.TemporaryDirectory() as folder:
        places = ["--data-dir", f"{folder}/data", "--adapter-folder", folder]
        command = [sys.executable, "-m", "kvern", "serve", MODEL, "--port", "0", *places, *OPTIONS]
        command += ["--max-model-len", "2048", "--max-batch-requests", str(ROWS), "--api-key", *KEYS]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        with process.stderr:
            url = next(found[1] for line in process.stderr if (found := re.search(r"(http://[\d.]+:\d+)", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            run = AttackedSoak(process, url, expected)
            try:
                asyncio.run(run.run(seconds, Path(folder), pattern))
                with httpx2.Client(base_url=url, headers=OPERATOR, timeout=60) as operator:
                    left, restarts = settled(operator), figure(operator, "engine_restarts_total")
            finally:
                process.terminate()
                code = process.wait(60)
    result = {"seconds": seconds, **run.result()}
    if left:
        result["wrong"].append(f"in the end there were {left}")
    if restarts != len(run.restarts):
        result["wrong"].append(f"{len(run.restarts)} engines were killed, and {restarts:g} restarted")
    if result["p99 attacked over quiet"] > MOST_SLOWER:
        result["wrong"].append(f"the p99 of small requests is {result['p99 attacked over quiet']} times the quiet one")
    if code:
        result["wrong"].append(f"the server ended with {code}")
    return result


def main() -> int:
    """Run and print; exit code 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800, help="how long (1800)")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    parser.add_argument("--only", default="", help="regular expression that the names of the attacks must hold (all)")
    options = parser.parse_args()
    result = soak(options.seconds, options.only)
    keep(options.output, "soak_attacked", MODEL, vars(options), findings=result)
    table = Table("what", "figure")
    for name, value in result.items():
        table.add_row(name, json.dumps(value)[:3000])
    Console().print(table)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
