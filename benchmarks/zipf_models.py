"""Seconds of wakes under a Zipf load: the policy of several models beside least recent use, in the real server.

    python benchmarks/zipf_models.py --output benchmarks/results/zipf-models-cpu.json
    python benchmarks/zipf_models.py --model kvern-1m --memory 1GB --requests 100 --rounds 1

Starts `kvern serve` with as many models as `--models`, all of the same checkpoint, loads each once, and then asks them
one request at a time, after a pause: the model of rank r as often as 1/r. Both policies get the same requests at the
same time, so that what else the machine does holds up both. Says what the servers count: wakes, and their seconds.
"""

import argparse
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from kvern.bench.record import keep

POLICIES = {"value": "kvern.residency.policy:Residency", "lru": "tests.support.simulated_residency:LeastRecentlyUsed"}
LAUNCH = """
import sys
import kvern.residency.keeper
from kvern.cli.main import main
from kvern.plugins import imported
kvern.residency.keeper.Residency = imported(sys.argv.pop(1))
sys.exit(main())
"""
"""A server with another policy, which has no option."""
PROMPT = [5, 9, 17, 33, 2, 81]
PATIENCE = 300.0


@contextmanager
def server(policy: str, options: argparse.Namespace) -> Iterator[httpx2.Client]:
    """A server of all models."""
    command = [
        sys.executable,
        "-c",
        LAUNCH,
        POLICIES[policy],
        "serve",
        "--port",
        "0",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    command += ["--kv-cache-tokens", "2048", "--models-memory", options.memory]
    command += [word for number in range(options.models) for word in ("--model", f"m{number}={options.model}")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    assert process.stderr is not None
    try:
        url = next(found[1] for line in process.stderr if (found := re.search(r"(http://[\d.]+:\d+)", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
        with httpx2.Client(base_url=url, timeout=PATIENCE) as http:
            yield http
    finally:
        process.terminate()
        process.wait(60)


def ask(http: httpx2.Client, model: str) -> float:
    """Returns the seconds of an answer of one token."""
    began = time.perf_counter()
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    http.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - began


def counted(http: httpx2.Client) -> dict[str, float]:
    """The sums over all models of what the server counts."""
    found = dict.fromkeys(("wakes", "wake_seconds", "memory_bytes"), 0.0)
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("kvern:model_").removesuffix("_total")
            if name in found:
                found[name] += sample.value
    return found


def run(policy: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Asks a server with this policy; returns what it counted since all models were loaded once."""
    dice = random.Random(seed)
    weights = [1 / (number + 1) for number in range(options.models)]
    with server(policy, options) as http:
        for number in range(options.models):
            ask(http, f"m{number}")
        before, asleep, seconds = counted(http), 0, 0.0
        for _ in range(options.requests):
            time.sleep(dice.expovariate(1 / options.pause))
            [number] = dice.choices(range(options.models), weights)
            states = {entry["id"]: entry["state"] for entry in http.get("/v1/models").json()["data"]}
            asleep += states[f"m{number}"] == "asleep"
            seconds += ask(http, f"m{number}")
        after = counted(http)
    return {
        "wakes": after["wakes"] - before["wakes"],
        "of asleep models": asleep,
        "wake seconds": round(after["wake_seconds"] - before["wake_seconds"], 2),
        "request seconds": round(seconds, 2),
        "gb at the end": round(after["memory_bytes"] / 1e9, 2),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m", help="the checkpoint of all (kvern-12m)")
    parser.add_argument("--models", type=int, default=20, help="how many (20)")
    parser.add_argument("--memory", default="1.15GB", help="for all models, as --models-memory: five (1.15GB)")
    parser.add_argument("--requests", type=int, default=300, help="in each run (300)")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between requests on average (3)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each policy (2)")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    with ThreadPoolExecutor(len(runs)) as pool:
        for seed in range(options.rounds):
            both = {policy: pool.submit(run, policy, options, seed) for policy in runs}
            for policy, found in both.items():
                runs[policy].append(found.result())
                print(seed, policy, runs[policy][-1], flush=True)
    value, lru = (sum(one["wake seconds"] for one in runs[policy]) for policy in ("value", "lru"))
    result: dict[str, Any] = {"fewer wake seconds": round(1 - value / lru, 3), **runs}
    print(result["fewer wake seconds"])
    keep(options.output, "zipf_models", options.model, vars(options), findings=result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
