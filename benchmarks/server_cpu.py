"""How surely a server that takes 5 % more CPU time for a request is found by the rule of `kvern bench gate`.

    python benchmarks/server_cpu.py --starts 12 --output FILE
    python benchmarks/server_cpu.py --starts 12 --plain="--no-request-records" --third="--trace-layers 100"

With `--third` the third server has these options in place of the burnt share, and the first two those of `--plain`:
what do they cost, server and engine together?

Each round starts three servers of the small embedded model: two as they are, one whose requests each burn a share more.
All three answer the same requests, one after another, at the same time, so that what else the machine does hits them
alike. A start counts with the median of its runs. Then gates of `--pairs` starts, drawn from those measured, are
counted by their verdict. PYTHONHASHSEED=0 takes one difference of starts away.
"""

import argparse
import asyncio
import contextlib
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvern.bench.compare import Side, interval
from kvern.bench.gate import FINE, LEAST_RUNS, LOSS, judge_all
from kvern.bench.http_client import HttpClient
from kvern.bench.record import Case, Record, figure, keep, make_record
from kvern.bench.serving import Sender, run_loop
from kvern.bench.serving_data import Prompts
from kvern.bench.serving_figures import case_of, summarize

MODEL = "kvern-1m"
SIDES = {"plain": 0.0, "again": 0.0, "planted": 0.05}
VERDICTS = {FINE: "fine", LOSS: "loss"}
DRAWS = 200


def serve(share: float, options: Sequence[str]) -> None:
    """Runs `kvern serve` with a server whose requests burn `share` of the CPU time since the last one."""
    from kvern.cli.main import main
    from kvern.server.gate import Gate

    answer, last = Gate.__call__, time.process_time()

    async def burning(self: Gate, scope: Any, receive: Any, send: Any) -> None:
        nonlocal last
        await answer(self, scope, receive, send)
        now = time.process_time()
        while time.process_time() < now + share * (now - last):
            pass
        last = time.process_time()

    if share:
        Gate.__call__ = burning  # type: ignore[method-assign]
    sys.exit(main(["serve", *options]))


@contextmanager
def served(share: float, options: str) -> Iterator[str]:
    """Starts a server, and yields its URL."""
    command = [sys.executable, __file__, "--serve", str(share), "--model", MODEL, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen([*command, "--threads", "1", *shlex.split(options)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = next(filter(None, (re.search(r"on (http://[\d.]+:\d+)", line) for line in process.stderr)), None)
        if found is None:
            raise SystemExit("the server did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait()


async def loads(urls: Sequence[str], requests: int, seed: str) -> list[dict[str, Any]]:
    """Asks all servers the same at the same time, and returns the figures of each."""

    async def load(url: str) -> dict[str, Any]:
        prompts = Prompts(4096, random.Random(seed))
        samples = [prompts.sample(prompts.tokens(16), 1) for _ in range(requests)]
        async with HttpClient(url) as client:
            return summarize(
                await Sender(client, "/v1/completions", MODEL, {"ignore_eos": True}).run(samples, concurrency=1)
            )

    return await asyncio.gather(*(load(url) for url in urls))


def one_start(given: argparse.Namespace, number: int) -> dict[str, Record]:
    """Starts all servers and measures them, in another order each time."""
    runs, requests, third = given.runs, given.requests, given.third
    order = list(SIDES)[number % 3 :] + list(SIDES)[: number % 3]
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(
                served(0.0 if third else SIDES[side], third if third and side == "planted" else given.plain)
            )
            for side in order
        ]
        run_loop(loads(urls, requests // 4, "to warm up"))
        found = [run_loop(loads(urls, requests, f"{number} {run}")) for run in range(runs)]
    for figures in (each for run in found if third for each in run):
        figures["server_cpu_ms"] += figures["engine_cpu_ms"]
    cases = {side: case_of("one at a time", [run[index] for run in found], {}) for index, side in enumerate(order)}
    return {side: make_record("serve", MODEL, [cases[side]]) for side in SIDES}


def verdict(measured: Sequence[dict[str, Record]], side: str, tolerance: float) -> str:
    """What the gate says of a side beside the plain one."""
    plain, other = (Side(name, [start[name] for start in measured]) for name in ("plain", side))
    [judged] = judge_all(plain, other, tolerance, ["server_cpu_ms"])
    return VERDICTS.get(judged.code, "cannot tell")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3, help="of a start (3)")
    parser.add_argument("--requests", type=int, default=150, help="of a run (150)")
    parser.add_argument("--pairs", type=int, default=10, help="starts of a gate (10)")
    parser.add_argument("--tolerance", type=float, default=2.5, help="percent (2.5)")
    parser.add_argument("--plain", default="", help="options of the first two servers")
    parser.add_argument("--third", default="", help="options of the third one, which then burns nothing")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    arguments = parser.parse_args()
    measured = list[dict[str, Record]]()
    for number in range(arguments.starts):
        measured.append(one_start(arguments, number))
        middles = [measured[-1][side].cases[0].figures["server_cpu_ms"].median for side in SIDES]
        print(number, *(f"{side} {middle:.3f} ms" for side, middle in zip(SIDES, middles, strict=True)), flush=True)
        if number >= LEAST_RUNS - 1:
            report(measured, arguments)


def report(measured: Sequence[dict[str, Record]], arguments: argparse.Namespace) -> None:
    """Prints and keeps what is measured so far."""
    values = {side: [start[side].cases[0].figures["server_cpu_ms"].median for start in measured] for side in SIDES}
    dice, findings = random.Random(0), dict[str, Any]()
    for side in ("again", "planted"):
        draws = DRAWS if len(measured) > arguments.pairs else 0
        drawn = [dice.sample(measured, arguments.pairs) for _ in range(draws)]
        findings[side] = {
            "ratio": figure([b / a for a, b in zip(values["plain"], values[side], strict=True)], "").median,
            "interval": interval(values["plain"], values[side], True),
            "of all starts": verdict(measured, side, arguments.tolerance / 100),
            "drawn": Counter(verdict(starts, side, arguments.tolerance / 100) for starts in drawn),
        }
        print(side, findings[side], flush=True)
    cases = [Case(side, {"server_cpu_ms": figure(of, "ms a request")}) for side, of in values.items()]
    keep(arguments.output, "server_cpu", MODEL, vars(arguments), cases, findings)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(float(sys.argv[2]), sys.argv[3:])
    main()
