"""Eight honest streams beside an attacker: byte-identical texts, a small request's time, and the server's memory.

    python benchmarks/soak_attacked.py --seconds 1800 --output benchmarks/results/soak-attacked-cpu.json

First nobody attacks, which tells how long a small request takes beside eight streams. Then another key sends everything
in `attacks.py` and what the fuzzer makes, again and again, a third has 300 long streams, and twice the engine is killed
five times in a row.
"""

import argparse
import asyncio
import itertools
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from attacks import Attacker, attacks
from soak import MODEL, OPTIONS, alone, resident

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzz_requests import Findings, Requests, send
from tests.test_fuzz_requests import FIXED

LOAD = "/v1/load_lora_adapter"
STREAMS = 8
ATTACKERS = 2
CROWD = 300
"""Long streams of one key."""
KILLS = 5
KILL_PAUSE = 7.0
"""Seconds between two kills: five are within 29 s."""
KILL_PLACES = (0.4, 0.7)
"""Of the time: when the kills begin."""
MOST_SLOWER = 3.0
"""The p99 of small requests, attacked over quiet."""
QUIET_SHARE = 0.1
"""Of the time, before the attack."""
PAUSE = 0.25
"""Seconds between two small requests."""
KEYS = ("honest:soak-honest", "hostile:soak-hostile", "crowd:soak-crowd", "operator:soak-operator admin=1")


class AttackedSoak:
    """One run against one server."""

    def __init__(
        self, process: subprocess.Popen[str], url: str, expected: dict[tuple[str, int], str], folder: Path
    ) -> None:
        self.process = process
        self.folder = folder
        self.findings = Findings()
        self.operator = Attacker(url, "soak-operator")
        parts = urlsplit(url)
        self.address = parts.hostname or "", parts.port or 0
        headers = {"authorization": "Bearer soak-operator"}
        self.description = httpx2.get(f"{url}/openapi.json", headers=headers).json()
        self.expected = expected
        self.done = 0
        self.wrong: list[str] = []
        self.times: dict[bool, list[float]] = {False: [], True: []}
        """Of small requests, without and with the attack, in seconds."""
        self.memory: list[int] = []
        self.random = random.Random(1)
        self.attacked = False
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="soak-honest", max_retries=0, timeout=300)
        self.attacker = Attacker(url, "soak-hostile")
        self.crowd = Attacker(url, "soak-crowd", 120)
        self.kills = 0

    async def run(self, seconds: float) -> None:
        """Quiet, then attacked."""
        end = time.monotonic() + seconds
        honest = [asyncio.create_task(self._streams(end)) for _ in range(STREAMS)]
        honest.append(asyncio.create_task(self._small(end)))
        await asyncio.sleep(seconds * QUIET_SHARE)
        self.attacked = True
        hostile = [asyncio.create_task(self._attack(end)) for _ in range(ATTACKERS)]
        crowd = [asyncio.create_task(self._crowd(end)) for _ in range(CROWD)]
        hostile += [asyncio.create_task(self._kill(seconds * (place - QUIET_SHARE))) for place in KILL_PLACES]
        await asyncio.gather(*honest, *hostile, self._load_adapters(end), asyncio.to_thread(self._fuzz, end))
        for stream in crowd:
            stream.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    async def _streams(self, end: float) -> None:
        while time.monotonic() < end:
            key = self.random.choice(list(self.expected))
            prompt, seed = key
            options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "seed": seed, "max_tokens": 120}
            text = ""
            try:
                async for chunk in await self.client.completions.create(
                    stream=True, temperature=0.8, extra_body={"ignore_eos": True}, **options
                ):
                    text += chunk.choices[0].text
            except openai.APIError as error:
                self.wrong.append(f"the stream of {key} ended with {error}")
            if text != self.expected[key]:
                self.wrong.append(f"of {key} came {text!r}, not {self.expected[key]!r}")
            self.done += 1

    async def _small(self, end: float) -> None:
        while time.monotonic() < end:
            attacked, began = self.attacked, time.monotonic()
            try:
                await self.client.completions.create(model=MODEL, prompt="Once", max_tokens=1)
            except openai.APIError as error:
                self.wrong.append(f"a small request got {error}")
            self.times[attacked].append(time.monotonic() - began)
            self.memory.append(resident(self.process.pid))
            await asyncio.sleep(PAUSE)

    async def _load_adapters(self, end: float) -> None:
        """An operator whose files are hostile, too."""
        paths = hostile_adapters(self.folder)
        while time.monotonic() < end:
            for path in paths:
                body = json.dumps({"lora_name": path.name, "lora_path": str(path)}).encode()
                await self.operator.act(f"an adapter: {path.name}", lambda one, b=body: one.post(LOAD, b))
                await asyncio.sleep(PAUSE)

    def _fuzz(self, end: float) -> None:
        """What the fuzzer makes, in a thread."""
        probes = Requests(self.description, FIXED).several(random.Random(2))
        while time.monotonic() < end:
            send(self.address, itertools.islice(probes, 100), self.findings, "soak-hostile", width=1)

    async def _attack(self, end: float) -> None:
        every = list(attacks())
        while time.monotonic() < end:
            self.random.shuffle(every)
            for name, act in every:
                if time.monotonic() > end:
                    return
                await self.attacker.act(name, act)

    async def _crowd(self, end: float) -> None:
        while time.monotonic() < end:
            await self.crowd.act("long streams", Attacker.long_stream)

    async def _kill(self, after: float) -> None:
        """End engines from outside, each new one soon after its start."""
        await asyncio.sleep(after)
        for _ in range(KILLS):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            if children:
                os.kill(int(children[0]), signal.SIGKILL)
                self.kills += 1
            await asyncio.sleep(KILL_PAUSE)


def hostile_adapters(folder: Path) -> list[Path]:
    """Folders that no adapter should be, below `folder`."""
    slow = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "(a|aa|model.*)*" * 8 + "$b"}
    configs = {"slow-pattern": json.dumps(slow), "deep": "[" * 100_000, "long": " " * (2 << 20), "none": ""}
    tensor = {"dtype": "F32", "shape": [4, 1], "data_offsets": [0, 16]}
    header = json.dumps({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": tensor}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(16)
    paths = [folder / name for name in (*configs, "pipe", "endless")]
    for path in paths:
        path.mkdir()
        config = path / "adapter_config.json"
        if path.name == "pipe":
            os.mkfifo(config)
        elif path.name == "endless":
            config.symlink_to("/dev/zero")
        else:
            config.write_text(configs[path.name])
            (path / "adapter_model.safetensors").write_bytes(weights)
    return paths


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


def soak(seconds: float, prompts: int = 60) -> dict[str, Any]:
    """Run it; what was done and what went wrong."""
    expected = alone(prompts)
    with tempfile.TemporaryDirectory() as folder:
        places = ["--data-dir", f"{folder}/data", "--adapter-folder", folder]
        command = [sys.executable, "-m", "kvern", "serve", MODEL, "--port", "0", *places, *OPTIONS]
        command += ["--max-model-len", "2048", "--api-key", *KEYS]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        with process.stderr:
            url = next(found[1] for line in process.stderr if (found := re.search(r"(http://[\d.]+:\d+)", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            run = AttackedSoak(process, url, expected, Path(folder))
            headers = {"authorization": "Bearer soak-operator"}
            try:
                asyncio.run(run.run(seconds))
                with httpx2.Client(base_url=url, headers=headers, timeout=60) as operator:
                    left, restarts = settled(operator), figure(operator, "engine_restarts_total")
                run.memory.append(resident(process.pid))
            finally:
                process.terminate()
                code = process.wait(60)
    quiet, attacked = (percentiles(run.times[attacked]) for attacked in (False, True))
    tenth = len(run.memory) // 10
    return {
        "seconds": seconds,
        "honest streams": run.done,
        "attacks": dict(sorted((run.attacker.statuses | run.operator.statuses | run.crowd.statuses).items())),
        "requests of the fuzzer": sum(run.findings.statuses.values()),
        "wrong": run.wrong + run.findings.wrong,
        "left": left,
        "kills": run.kills,
        "engine restarts": restarts,
        "small request, quiet, ms": quiet,
        "small request, attacked, ms": attacked,
        "p99 attacked over quiet": round(attacked["p99"] / quiet["p99"], 2),
        "memory_mb_at_tenths": [round(run.memory[index] / 2**20) for index in range(0, len(run.memory), tenth)],
        "exit_code": code,
    }


def percentiles(times: list[float]) -> dict[str, float]:
    """In milliseconds."""
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"p50": round(1000 * cuts[49], 1), "p99": round(1000 * cuts[98], 1), "max": round(1000 * max(times), 1)}


def main() -> int:
    """Run and print; exit code 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800, help="how long (1800)")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    options = parser.parse_args()
    result = soak(options.seconds)
    table = Table("what", "figure")
    for name, value in result.items():
        table.add_row(name, json.dumps(value)[:2000])
    Console().print(table)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lost = result["engine restarts"] - result["kills"]
    slow = result["p99 attacked over quiet"] > MOST_SLOWER
    return 1 if result["wrong"] or result["left"] or lost > 0 or slow or result["exit_code"] else 0


if __name__ == "__main__":
    sys.exit(main())
