"""Hours of requests that no client should send: every field of every API at its extremes, alone and together.

    python benchmarks/fuzz.py --seconds 3600 --seed 1 --output fuzz.json
    python benchmarks/fuzz.py --images --seconds 600 --seed 1 --output fuzz-images.json

With --images it sends files of images instead: flipped, cut, with headers that lie and chunks that swell. It starts a
server of its own. No answer may be a fault of the server, no connection may be dropped, no engine lost, and a plain
request must get the same answer at the end as at the beginning.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.soak import resident
from tests.support.fuzz_images import plain_question
from tests.support.fuzz_images import probes as image_probes
from tests.support.fuzz_requests import FIXED, Findings, Requests, plain_answer, send
from tests.support.served import KEY, Served
from tests.support.vision_models import make_vision_model

from kvern.bench.record import keep

PLAIN = "kvern-1m"
ROUND, IMAGE_ROUND = 2000, 200
MOST_GROWTH = 256 << 20
"""Bytes that the server and its engine may have more than after the first round."""


def fuzz(seconds: float, seed: int, served: Served, images: bool) -> dict[str, Any]:
    """The sweep of single fields, then fields together until the time is over; or files of images."""
    end, began = time.monotonic() + seconds, time.monotonic()
    findings, ask, size = (Findings(), plain_question, IMAGE_ROUND) if images else (Findings(), plain_answer, ROUND)
    if images:
        probes = image_probes(seed)
    else:
        requests = Requests(served.raw("GET", "/openapi.json")[2], FIXED)
        probes = itertools.chain(requests.singles(thorough=True), requests.several(random.Random(seed)))
    plain = ask(served)
    memory = []
    while time.monotonic() < end and served.process.poll() is None:
        send((served.host, served.port), itertools.islice(probes, size), findings, KEY)
        memory.append(resident(served.process.pid) + resident(served.engine_pid()))
        sent, passed = sum(findings.statuses.values()), time.monotonic() - began
        said = f"{passed:.0f} s: {sent} requests, {sent / passed:.0f}/s, {len(findings.wrong)} wrong"
        print(f"{said}, {memory[-1] >> 20} MiB", flush=True)
    if served.process.poll() is not None:
        findings.wrong.append(f"the server ended with code {served.process.returncode}")
    else:
        if ask(served) != plain:
            findings.wrong.append("a plain request gets another answer than at the beginning")
        if restarts := served.figure("engine_restarts_total"):
            findings.wrong.append(f"{restarts:g} engines were lost")
    if memory[-1] > memory[0] + MOST_GROWTH:
        findings.wrong.append(f"memory grew from {memory[0] >> 20} to {memory[-1] >> 20} MiB")
    return {
        "seconds": round(time.monotonic() - began),
        "seed": seed,
        "requests": sum(findings.statuses.values()),
        "statuses": {f"{route} {status}": count for (route, status), count in sorted(findings.statuses.items())},
        "slowest": findings.slowest,
        "memory_mib": [memory[0] >> 20, memory[-1] >> 20],
        "wrong": findings.wrong,
    }


def main() -> int:
    """Run and print; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long (600)")
    parser.add_argument("--seed", type=int, default=0, help="of the fields that are changed together (0)")
    parser.add_argument("--images", action="store_true", help="files of images, for a small model that reads them")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        limits = (
            "--threads",
            "1",
            "--max-model-len",
            "128" if options.images else "64",
            "--dtype",
            "float32",
            "--api-key",
            KEY,
        )
        model = str(make_vision_model("mistral3", Path(folder) / "model")) if options.images else PLAIN
        served = Served(model, *limits, "--data-dir", folder, log=Path(folder) / "log")
        try:
            result = fuzz(options.seconds, options.seed, served, options.images)
        finally:
            served.close() if served.process.poll() is not None else served.stop()
    table = Table("what", "figure")
    for name, count in result["statuses"].items():
        table.add_row(name, str(count))
    for seconds, what in result["slowest"]:
        table.add_row(f"{seconds:.2f} s", what)
    for name in ("seconds", "requests", "memory_mib"):
        table.add_row(name, str(result[name]))
    Console().print(table)
    for line in result["wrong"]:
        print(line)
    keep(options.output, "fuzz", None if options.images else PLAIN, vars(options), findings=result)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
