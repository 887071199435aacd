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
import json
import math
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
GROWTHS = 5
"""Times that a KV cache grows to its largest size, and shrinks."""
CHUNK_BYTES = 2e9
"""The bytes of its chunks, about as an engine has them on such a card."""
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
                print(f"{name} is loaded in {models.ask(name):.1f} s", flush=True)
            switches = models.switches(options.requests, dice)
            turned = [names[0], *names[options.models :]]
            turns = {name: [models.turn(name) for _ in range(options.wakes)] for name in turned}
            print(json.dumps(turns), flush=True)
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


def growth(checkpoint: Path) -> dict[str, Any]:
    """Seconds in which a KV cache of a model of this form gets memory of the card, and gives it back."""
    import torch

    from kvern.device.chunked_memory import ChunkedMemory, blocks_of_a_piece
    from kvern.device.mapped_memory import granularity

    config, card = json.loads((checkpoint / "config.json").read_text()), torch.device("cuda:0")
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    torch.cuda.set_device(card)  # a context, which the driver's calls need
    shape = (16, heads, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    block_bytes = 2 * math.prod(shape)
    unit = blocks_of_a_piece(granularity(card), [block_bytes])
    chunk_blocks = max(unit, int(CHUNK_BYTES / (2 * layers * block_bytes)) // unit * unit)
    chunks = int(0.8 * torch.cuda.mem_get_info()[0]) // (2 * layers * block_bytes * chunk_blocks)
    memory = ChunkedMemory(card, chunks * chunk_blocks, chunk_blocks, chunk_blocks, unit)
    pool, found = memory.zeros(2 * layers, shape, torch.bfloat16), defaultdict(list)
    for _ in range(GROWTHS):
        for what, blocks in (("one chunk more", 2), ("all", chunks), ("all back", 1)):
            before, began = memory.size, time.perf_counter()
            memory.resize(blocks * chunk_blocks)
            found[f"{what}: {abs(memory.size - before) / 1e9:.1f} GB"].append(time.perf_counter() - began)
            if what == "all":
                began = time.perf_counter()
                pool[:, : memory.blocks].zero_()
                torch.cuda.synchronize()
                found["zeros alone of all"].append(time.perf_counter() - began)
    return {what: spread(seconds) for what, seconds in found.items()}


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
    parser.add_argument("--wakes", type=int, default=20, help="times that models sleep and wake, with memory free (20)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where they run (cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the order (0)")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    parser.add_argument("server", nargs="*", help="options of kvern serve, after --")
    options = parser.parse_args()
    options.memory = options.memory or ("1.15GB" if options.device == "cpu" else None)
    grown = {}
    if options.device == "cuda":
        grown = {"seconds for more KV cache": growth(Path(options.model))}
        print(json.dumps(grown), flush=True)
    result = measured(options) | grown
    table = Table("what", "figure")
    for name, value in result.items():
        table.add_row(name, json.dumps(value))
    Console().print(table)
    keep(options.output, "several_models", options.model, vars(options), findings=result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
