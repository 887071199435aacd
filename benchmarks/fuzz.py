"""Hours of requests that no client should send: every field of every API at its extremes, alone and together.

    python benchmarks/fuzz.py --seconds 3600 --seed 1 --output fuzz.json

It starts a server of its own. No answer may be a fault of the server, no connection may be dropped, no engine lost, and
a plain request must get the same answer at the end as at the beginning.
"""

import argparse
import itertools
import json
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
from tests.support.fuzz_requests import FIXED, Findings, Requests, plain_answer, send
from tests.support.served import KEY, Served

ROUND = 2000
MOST_GROWTH = 256 << 20
"""Bytes that the server may have more than after the first round."""


def fuzz(seconds: float, seed: int, served: Served) -> dict[str, Any]:
    """The sweep of single fields, then fields together until the time is over."""
    end, began = time.monotonic() + seconds, time.monotonic()
    findings = Findings()
    requests = Requests(served.raw("GET", "/openapi.json")[2], FIXED)
    plain = plain_answer(served)
    probes = itertools.chain(requests.singles(thorough=True), requests.several(random.Random(seed)))
    memory = []
    while time.monotonic() < end and served.process.poll() is None:
        send((served.host, served.port), itertools.islice(probes, ROUND), findings, KEY)
        memory.append(resident(served.process.pid))
        sent, passed = sum(findings.statuses.values()), time.monotonic() - began
        said = f"{passed:.0f} s: {sent} requests, {sent / passed:.0f}/s, {len(findings.wrong)} wrong"
        print(f"{said}, {memory[-1] >> 20} MiB", flush=True)
    if served.process.poll() is not None:
        findings.wrong.append(f"the server ended with code {served.process.returncode}")
    else:
        if plain_answer(served) != plain:
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
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        limits = ("--threads", "1", "--max-model-len", "64", "--dtype", "float32", "--api-key", KEY)
        served = Served("kvern-1m", *limits, "--data-dir", folder, log=Path(folder) / "log")
        try:
            result = fuzz(options.seconds, options.seed, served)
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
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
