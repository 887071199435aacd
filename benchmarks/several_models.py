"""Models that wake and make way: seconds to an answer of one token, by the state in which a request finds its model.

    python benchmarks/several_models.py --output benchmarks/results/several-models-cpu.json
    python benchmarks/several_models.py --model kvern-12m --models 5 --memory 1.15GB --requests 60
    python benchmarks/several_models.py --device cuda --model benchmarks/models/llama-3.1-8b --models 3 \\
        --memory 100GB --requests 20 -- --load-format dummy --gpu-memory-share 0.3     # after --: options of the server
    python benchmarks/several_models.py --device cuda --model benchmarks/models/llama-3.1-8b --models 1 \\
        --beside benchmarks/models/qwen3-0.6b --requests 10 -- --load-format dummy --max-model-len 8192

Starts `kvern serve` with as many models as `--models`, all of the same checkpoint, and asks them in random order. Says
what requests took by the state that the server reported before, what `sleep` took, and the memory of all engines' own
pages (PSS) awake and asleep, on a GPU what is taken of the card. On a GPU it also says what it takes to have more
memory behind a KV cache: to map it, and to let it be zeros.
"""

import argparse
import dataclasses
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from kvern.bench.record import keep

ENGINE = "kvern.serving.process"
KEY = "admin:secret"
WAKES = 20
"""Times that each model is put to sleep and woken, while memory is free."""
GROWTHS = 5
"""Times that a KV cache grows to its largest size, and shrinks."""
PROMPT = [5, 9, 17, 33, 2, 81]
PATIENCE = 300.0


def card_memory() -> int:
    """Bytes that are taken of the first GPU, by anybody."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def engine_memory(server: int) -> int:
    """Bytes of the memory of a server's engines, each page shared among those that have it."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and ENGINE in (path / "cmdline").read_text():
                found = re.search(r"Pss: +(\d+)", (path / "smaps_rollup").read_text())
                total += int(found[1]) * 1024 if found else 0
        except OSError:  # others end meanwhile
            continue
    return total


class Models:
    """Several models of one server."""

    def __init__(self, http: httpx2.Client, names: list[str], taken: Callable[[], int]) -> None:
        """`taken`: the bytes that engines take."""
        self.http = http
        self.names = names
        self.taken = taken

    def states(self) -> dict[str, str]:
        """The state of each."""
        return {entry["id"]: entry["state"] for entry in self.http.get("/v1/models").json()["data"]}

    def ask(self, name: str) -> float:
        """Returns the seconds of an answer of one token."""
        began = time.perf_counter()
        body = {"model": name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        self.http.post("/v1/completions", json=body).raise_for_status()
        return time.perf_counter() - began

    def sleep(self, name: str) -> float:
        """Returns the seconds until a model is asleep."""
        began = time.perf_counter()
        self.http.post(f"/v1/models/{name}/sleep").raise_for_status()
        return time.perf_counter() - began

    def turn(self, name: str) -> tuple[float, float, float]:
        """Returns the seconds until a model is asleep, until it is awake again, and of an answer of one token."""
        asleep, began = self.sleep(name), time.perf_counter()
        self.http.post(f"/v1/models/{name}/load").raise_for_status()
        return asleep, time.perf_counter() - began, self.ask(name)

    def switches(self, requests: int, dice: random.Random) -> dict[str, list[float]]:
        """Seconds of requests to models in random order, by the state of each before."""
        found = defaultdict(list)
        for _ in range(requests):
            name = dice.choice(self.names)
            state = self.states()[name]
            found[state].append(self.ask(name))
        return found

    def memory(self) -> tuple[int, int]:
        """Bytes of the first model's engine, awake and asleep, if all others are cold."""
        for name in self.names[1:]:
            self.http.post(f"/v1/models/{name}/unload").raise_for_status()
        self.ask(self.names[0])
        awake = self.taken()
        self.sleep(self.names[0])
        return awake, self.taken()


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Starts the server and asks it."""
    checkpoints = {f"model-{number}": options.model for number in range(options.models)}
    checkpoints |= {} if options.beside is None else {"beside": options.beside}
    names = [*checkpoints]
    command = [sys.executable, "-m", "kvern", "serve", "--port", "0", "--device", options.device]
    command += ["--threads", "1", "--kv-cache-tokens", "2048"] if options.device == "cpu" else []
    command += [] if options.memory is None else ["--models-memory", options.memory]
    command += ["--api-key", f"{KEY} admin=1", *options.server]
    command += [word for name, model in checkpoints.items() for word in ("--model", f"{name}={model}")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(found[1] for line in process.stderr if (found := re.search(r"(http://[\d.]+:\d+)", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
        headers = {"Authorization": f"Bearer {KEY.partition(':')[2]}"}
        with httpx2.Client(base_url=url, timeout=PATIENCE, headers=headers) as http:
            taken = card_memory if options.device == "cuda" else partial(engine_memory, process.pid)
            models = Models(http, names, taken)
            dice = random.Random(options.seed)
            for name in names:  # all have been awake once
                models.ask(name)
            switches = models.switches(options.requests, dice)
            turned = [names[0], *names[options.models :]]
            turns = {name: [models.turn(name) for _ in range(WAKES)] for name in turned}
            awake, asleep = models.memory()
    finally:
        process.terminate()
        process.wait(60)
    return {
        "model": options.model,
        "models": options.models,
        "models_memory": options.memory,
        "options": options.server,
        "seconds_by_state": {state: spread(seconds) for state, seconds in sorted(switches.items())},
        **{
            f"{name}: {what}": spread([turn[place] for turn in found])
            for name, found in turns.items()
            for place, what in enumerate(("seconds to sleep", "seconds to wake", "seconds to the first token then"))
        },
        "engine_gb_awake": round(awake / 1e9, 3),
        "engine_gb_asleep": round(asleep / 1e9, 3),
    }


def growth(model: str, options: list[str]) -> dict[str, Any]:
    """Seconds in which the KV cache of an engine in this process gets what memory it may have, or gives it back."""
    import torch

    from kvern import LLM, EngineConfig
    from kvern.cli.main import read_command

    command, _ = read_command(["serve", "--model", model, "--device", "cuda", "--elastic-kv-cache", *options], {})
    fields = {field.name: getattr(command.engine, field.name) for field in dataclasses.fields(command.engine)}
    with LLM(**{name: value for name, value in fields.items() if value != getattr(EngineConfig(), name)}) as llm:
        core: Any = llm._engine.core  # type: ignore[union-attr]
        chunked = core.executor._worker.memory.chunked
        least, found = core.scheduler.cache.memory.chunks, defaultdict(list)
        for _ in range(GROWTHS):
            for name, chunks in (("one chunk more", least + 1), ("all", 1 << 20), ("back", least)):
                chunks, before = min(chunks, core.scheduler.cache.memory.most_chunks), chunked.size
                began = time.perf_counter()
                core.resize_cache(chunks)
                found[f"{name}, {abs(chunked.size - before) / 1e9:.2f} GB"].append(time.perf_counter() - began)
                if name == "all":
                    began = time.perf_counter()
                    for pool in chunked._pools:
                        pool.zero(chunked.least, chunked.blocks)
                    torch.cuda.synchronize()
                    found["zeros alone of all"].append(time.perf_counter() - began)
        return {name: spread(seconds) for name, seconds in found.items()}


def spread(seconds: list[float]) -> dict[str, float]:
    """The number of measurements, their least, median, 90th percentile and most."""
    ordered = sorted(seconds)
    places = {"least": 0, "p90": int(0.9 * (len(ordered) - 1)), "most": -1}
    found = {name: round(ordered[place], 4) for name, place in places.items()}
    return {"count": len(ordered), "median": round(statistics.median(ordered), 4), **found}


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m", help="the checkpoint of all (kvern-12m)")
    parser.add_argument("--models", type=int, default=5, help="how many (5)")
    parser.add_argument("--beside", help="the checkpoint of one more")
    parser.add_argument("--memory", help="for all models, as --models-memory (1.15GB on a CPU, else what is free)")
    parser.add_argument("--requests", type=int, default=60, help="in random order (60)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where they run (cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the order (0)")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    parser.add_argument("server", nargs="*", help="options of kvern serve, after --")
    options = parser.parse_args()
    options.memory = options.memory or ("1.15GB" if options.device == "cpu" else None)
    result = measured(options)
    if options.device == "cuda":
        result["seconds for more KV cache"] = growth(options.model, options.server)
    table = Table("what", "figure")
    for name, value in result.items():
        table.add_row(name, json.dumps(value))
    Console().print(table)
    keep(options.output, "several_models", options.model, vars(options), findings=result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
