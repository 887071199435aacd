"""Minutes of everything at once: streams, clients that leave, bad requests, an engine that is killed or hangs.

    python benchmarks/soak.py --seconds 600 --output benchmarks/results/soak-cpu.json
    python benchmarks/soak.py --seconds 3600 --kv-tier host:64MB --kv-tier disk:/tmp/pages:256MB

Each stream's text must be the one that the same request has alone. At the end nothing may run, no block may be held,
and the memory of server and engine, and the files of tiers, must be what they were after a tenth of the time. With
tiers prompts are long and come again, and the KV cache holds few of them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from kvern import LLM, SamplingParams
from kvern.bench.record import keep

MODEL = "kvern-1m"
OPTIONS = ("--threads", "1", "--max-model-len", "512", "--dtype", "float32")
SMALL_CACHE = ("--kv-cache-tokens", "8192")
LONG_PROMPT = "There was an old tree in the garden, and under the tree there lived a family of mice. " * 10
BAD_BODIES: tuple[Any, ...] = (
    {"prompt": []},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "n": 10**9},
    {"prompt": "a", "stop": ["a"] * 10_000},
    {"prompt": [10**9]},
    {"prompt": "a " * 5000},
    {"model": "none", "prompt": "a"},
    {"prompt": "a", "logit_bias": {"x": 1}},
)


class Soak:
    """One run against one server."""

    def __init__(
        self, process: subprocess.Popen[str], url: str, expected: dict[tuple[str, int], str], folders: Sequence[Path]
    ) -> None:
        self.process = process
        self.url = url
        self.expected = expected
        self.folders = folders
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[int] = []
        self.engine_memory: list[int] = []
        self.files: list[int] = []
        self.random = random.Random(0)
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self.plain = httpx2.AsyncClient(base_url=url, timeout=120)

    async def run(self, seconds: float, width: int, kills: int) -> None:
        """Keep `width` clients busy for so long."""
        end = time.monotonic() + seconds
        clients = [asyncio.create_task(self._client(end)) for _ in range(width)]
        sampler = asyncio.create_task(self._sample(seconds))
        for number in range(kills):
            await asyncio.sleep(seconds / (kills + 1))
            os.kill(self._engine(), signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL)
            self.done["engines lost"] += 1
        await asyncio.gather(*clients)
        sampler.cancel()

    async def _client(self, end: float) -> None:
        actions: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._stream, 60),
            (self._leave, 20),
            (self._at_once, 10),
            (self._bad, 10),
        ]
        while time.monotonic() < end:
            [action] = self.random.choices([act for act, _ in actions], [weight for _, weight in actions])
            try:
                await action()
            except Exception as error:  # whatever it is, it should not have happened
                self.wrong.append(f"{action.__name__}: {type(error).__name__}: {error}")

    def _pick(self) -> tuple[tuple[str, int], dict[str, Any]]:
        key = self.random.choice(list(self.expected))
        prompt, seed = key
        extra = {"ignore_eos": True}
        return key, {
            "model": MODEL,
            "prompt": prompt,
            "seed": seed,
            "max_tokens": 120,
            "temperature": 0.8,
            "extra_body": extra,
        }

    async def _stream(self) -> None:
        key, options = self._pick()
        text = ""
        async for chunk in await self.client.completions.create(stream=True, **options):
            text += chunk.choices[0].text
        self._compare(key, text, "streams")

    async def _leave(self) -> None:
        key, options = self._pick()
        text, stop = "", self.random.randrange(300)
        stream = await self.client.completions.create(stream=True, **options)
        async for chunk in stream:
            text += chunk.choices[0].text
            if len(text) > stop:
                break
        await stream.close()
        if not self.expected[key].startswith(text):
            self.wrong.append(f"of {key} came {text!r}")
        self.done["clients that left"] += 1

    async def _at_once(self) -> None:
        key, options = self._pick()
        answer = await self.client.completions.create(**options)
        self._compare(key, answer.choices[0].text, "answers at once")

    async def _bad(self) -> None:
        answer = await self.plain.post("/v1/completions", json=self.random.choice(BAD_BODIES))
        if not 400 <= answer.status_code < 500 or "error" not in answer.json():
            self.wrong.append(f"a bad request got {answer.status_code}: {answer.text[:200]}")
        self.done["bad requests"] += 1

    def _compare(self, key: tuple[str, int], text: str, what: str) -> None:
        self.done[what] += 1
        if text != self.expected[key]:
            self.wrong.append(f"of {key} came {text!r}, not {self.expected[key]!r}")

    async def _sample(self, seconds: float) -> None:
        while True:
            self.memory.append(resident(self.process.pid))
            with contextlib.suppress(OSError, IndexError):  # it is being started
                self.engine_memory.append(resident(self._engine()))
            self.files.append(sum(file.stat().st_blocks * 512 for folder in self.folders for file in folder.rglob("*")))
            await asyncio.sleep(max(1.0, seconds / 60))

    def _engine(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    async def figures(self) -> dict[str, float]:
        """The metrics without labels that tell several apart."""
        text = (await self.plain.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name.removeprefix("kvern:"): sample.value for sample in samples}

    async def hits(self) -> dict[str, float]:
        """Tokens that each store gave."""
        text = (await self.plain.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {one.labels["store"]: one.value for one in samples if one.name == "kvern:tier_hit_tokens_total"}

    async def settled(self) -> dict[str, float]:
        """What still runs, waits, or holds blocks, when everybody has gone."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for _ in range(100):
            figures = await self.figures()
            left = {name: figures[name] for name in names if figures[name]}
            if not left:
                break
            await asyncio.sleep(0.1)
        return left


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alone(count: int, begin: str = "") -> dict[tuple[str, int], str]:
    """The texts of requests that run one at a time, whose prompts begin so."""
    requests = [(f"Once upon a time there were {number}. {begin}", number % 7) for number in range(count)]
    expected = {}
    with LLM(MODEL, threads=1, dtype="float32", max_model_len=512) as llm:
        for prompt, seed in requests:
            params = SamplingParams(temperature=0.8, seed=seed, max_tokens=120, ignore_eos=True)
            [output] = llm.generate([prompt], params)
            expected[prompt, seed] = output.outputs[0].text
    return expected


async def soak(
    seconds: float, tiers: Sequence[str] = (), width: int = 24, kills: int = 5, prompts: int = 60
) -> dict[str, Any]:
    """Run it; what was done and what went wrong."""
    expected = alone(prompts, LONG_PROMPT if tiers else "")
    command = [sys.executable, "-m", "kvern", "serve", MODEL, "--port", "0", "--engine-timeout", "5", *OPTIONS]
    if tiers:
        command += [*SMALL_CACHE, *(word for tier in tiers for word in ("--kv-tier", tier))]
    folders = [Path(tier.split(":")[1]) for tier in tiers if tier.startswith("disk:")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        url = next(found[1] for line in process.stderr if (found := re.search(r"(http://[\d.]+:\d+)", line)))
        run = Soak(process, url, expected, folders)
        try:
            await run.run(seconds, width, kills)
            left, figures = await run.settled(), await run.figures()
            hits = await run.hits()
            await run.client.close()
            await run.plain.aclose()
        finally:
            process.terminate()
            code = await asyncio.to_thread(process.wait, 60)
    levels = {"memory_mb": run.memory, "engine_memory_mb": run.engine_memory, "files_mb": run.files}
    level_figures = {
        f"{name}_{when}": round(samples[place] / 2**20, 1)
        for name, samples in levels.items()
        for when, place in (("after_a_tenth", max(1, len(samples) // 10)), ("at_the_end", -1))
    }
    return {
        "seconds": seconds,
        "done": dict(run.done),
        "wrong": run.wrong,
        "left": left,
        "restarts": figures["engine_restarts_total"],
        **level_figures,
        "tier_hit_tokens": hits,
        "exit_code": code,
    }


def main() -> int:
    """Run and print; exit code 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long (600)")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    parser.add_argument("--kv-tier", action="append", default=[], help="a store of the KV cache; repeatable")
    options = parser.parse_args()
    result = asyncio.run(soak(options.seconds, options.kv_tier))
    table = Table("what", "figure")
    for name, value in result.items():
        table.add_row(name, json.dumps(value)[:300])
    Console().print(table)
    keep(options.output, "soak", MODEL, vars(options), findings=result)
    return 1 if result["wrong"] or result["left"] or result["exit_code"] else 0


if __name__ == "__main__":
    sys.exit(main())
