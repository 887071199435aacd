"""How near simulations are to what a model's engine does on this machine.

    python benchmarks/simulation.py [--model kvern-12m] [--seconds 12] [--shares 0.4 0.8]
    python benchmarks/simulation.py --model benchmarks/models/llama-3.1-8b --load-format dummy --keep FOLDER
    python benchmarks/simulation.py --kept FOLDER       # simulates, anywhere, what was measured and kept
    python benchmarks/simulation.py --kept FOLDER --json FILE      # and writes the figures of both to a record

Builds the kernels for CPUs if they are missing, finds what the engine answers at most, and records steps of loads at
several shares of that rate, for costs to be fitted to. Then it runs other loads, three times each with other requests.
The same requests are simulated with five seeds, and tables in Markdown compare: the mean of the measured and of the
simulated runs, each with the least and the greatest, and by how much the simulated mean is off; the steps of these
runs, which costs were not fitted to, with the sums of their times and of what they are predicted to take; and in short
by how much each figure is off, in bold what misses its goal. The engine is in this process, which also gives it its
requests: neither HTTP nor a load generator limits it. Nothing else may run on the machine.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvern.bench.record import Better, Case, figure
from kvern.bench.record import keep as record_to
from kvern.bench.steps import MeasuredEngine
from kvern.config import EngineConfig
from kvern.loads.source import read_load
from kvern.simulate.costs import FittedPrice, fit_steps
from kvern.simulate.launches import StepSample
from kvern.simulate.records import StepRecord, read_steps, replay, write_steps
from kvern.simulate.report import figures, interval
from kvern.simulate.study import Condition, run_once

LENGTHS = "input=uniform:50:400,output=uniform:20:120"
CALIBRATED = 0.2, 0.5, 0.8, 1.0, float("inf")
"""Shares of the greatest rate at which steps are recorded; the last is a crowd, which has the largest batches."""
REPEATS, SEEDS = 3, 5
LEAST_REQUESTS = 40
FITTED, CROWD = "fitted", "all at once"
"""Names of loads: those that costs are fitted to, and the one that has the greatest rate."""
SHOWN = {
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "p50_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p50_itl_ms": "ITL p50, ms",
    "p99_itl_ms": "ITL p99, ms",
    "p50_e2e_ms": "end to end p50, ms",
    "p99_e2e_ms": "end to end p99, ms",
}
GOALS = {"requests_per_second": 0.07, "tokens_per_second": 0.05, "p50": 0.1, "p99": 0.2}
"""By how much a figure may be off: the greatest rate, tokens a second, and percentiles."""
Figures = dict[str, Any]


class Measured(NamedTuple):
    """A run of the engine."""

    record: StepRecord
    figures: Figures


Runs = dict[str, list[Measured]]
"""The runs of each load."""


def main() -> None:
    """Measure, simulate, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--seconds", type=float, default=12, help="of each run, about; there are 14 with two shares")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.4, 0.8])
    parser.add_argument("--lengths", default=LENGTHS, help="of prompts and answers, as in --load of kvern simulate")
    parser.add_argument("--keep", type=Path, help="write the measured runs to this folder, and simulate none")
    parser.add_argument("--kept", type=Path, help="take the measured runs of this folder")
    parser.add_argument("--json", type=Path, help="write the record of what was compared to this file")
    options = parser.parse_args()
    runs = measure(options) if options.kept is None else kept(options.kept)
    if options.keep is not None:
        keep(runs, options.keep)
    else:
        compare(runs, options.json)


def measure(options: argparse.Namespace) -> Runs:
    """Runs all loads on the engine."""
    config = EngineConfig(options.model, load_format=options.load_format)
    if not torch.cuda.is_available():
        subprocess.run([sys.executable, "-m", "kvern.cpu.ready", str(config.cache_folder)], check=True)
    engine = MeasuredEngine(config)
    engine.warm()

    def run(rate: float, seed: int, requests: int) -> Measured:
        load = f"rate={rate:.2f},requests={requests},{options.lengths},seed={seed}"
        record, driven = engine.run(list(read_load(load)))
        found = figures([driven.timeline], {}, driven.hit_tokens, [driven.executor.busy])
        print(f"{load}: {found['seconds']:.1f} s, {found['requests_per_second']:.1f} requests/s", flush=True)
        return Measured(record, found)

    def count(rate: float) -> int:
        seconds: float = options.seconds
        return max(LEAST_REQUESTS, round(rate * seconds))

    guess = run(float("inf"), 99, LEAST_REQUESTS).figures["requests_per_second"]
    found = {CROWD: [run(float("inf"), seed, count(guess)) for seed in range(REPEATS)]}
    most, _, _ = interval([each.figures["requests_per_second"] for each in found[CROWD]])
    found |= {FITTED: [], **{f"{share:.0%}": [] for share in options.shares}}
    fitted = [(FITTED, share, 50) for share in CALIBRATED]
    others = [(f"{share:.0%}", share, seed) for seed in range(REPEATS) for share in options.shares]
    for name, share, seed in filter(None, chain.from_iterable(zip_longest(others, fitted))):  # a machine may drift
        found[name].append(run(most * share, seed, count(most * min(1.0, share))))
    engine.close()
    return found


def keep(runs: Runs, folder: Path) -> None:
    """Writes runs to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, several in runs.items():
        for number, each in enumerate(several):
            write_steps(each.record, folder / f"{name} {number}.jsonl")
    told = {name: [each.figures for each in several] for name, several in runs.items()}
    (folder / "figures.json").write_text(json.dumps(told, indent=1))


def kept(folder: Path) -> Runs:
    """Returns the runs that were written to a folder."""
    told: dict[str, list[Figures]] = json.loads((folder / "figures.json").read_text())
    return {
        name: [Measured(read_steps(folder / f"{name} {number}.jsonl"), each) for number, each in enumerate(several)]
        for name, several in told.items()
    }


def compare(runs: Runs, output: Path | None = None) -> None:
    """Simulates the loads of runs, prints the tables, and writes the record to a file if one is named."""
    fitted = runs.pop(FITTED)
    header = fitted[0].record.header
    print(f"\n{header.model} on {header.hardware}, kvern {header.version}")
    replays = [replay(each.record) for several in (fitted, *runs.values()) for each in several]
    differ = [each for each in replays if each.differs is not None]
    print(f"replayed: {sum(each.steps for each in replays):,} steps of {len(replays)} runs, {len(differ)} runs differ")
    fit = fit_steps([sample for each in fitted for sample in each.record.samples], header.graph_tokens)
    print(f"costs of {fit.steps:,} steps: {fit.errors}\n")
    condition = Condition(header.sizes, lambda seed: FittedPrice(fit, seed), header.pace)
    print("| load | | measured | simulated | off |\n|---|---|---|---|---|")
    short, cases = [], []
    for name, several in runs.items():
        offs = {}
        simulated = [run_once(condition, each.record.load, seed, {}) for each in several for seed in range(SEEDS)]
        for key, label in SHOWN.items():
            real = interval([each.figures[key] for each in several])
            found = interval([each[key] for each in simulated])
            offs[key] = found[0] / real[0] - 1 if real[0] else 0.0
            print(f"| {name} | {label} | {_told(real)} | {_told(found)} | {offs[key]:+.0%} |", flush=True)
        cases.append(_case(name, several, simulated))
        short.append(_in_short(f"{header.model.rpartition('/')[2]}, {name}", offs, name == CROWD))
    others = [sample for each in chain.from_iterable(runs.values()) for sample in each.record.samples]
    _print_sums(FittedPrice(fit, None), others)
    print("\n| at | throughput | TTFT p50/p99 | ITL p50/p99 | end to end p50/p99 |")
    print("|---|---|---|---|---|", *short, sep="\n")
    findings = {
        "measured_on": header.hardware,
        "errors_of_costs": fit.errors,
        "steps": fit.steps,
        "differ": len(differ),
    }
    record_to(output, "simulation", header.model, {"seeds": SEEDS}, cases, findings)


def _case(name: str, measured: Sequence[Measured], simulated: Sequence[Figures]) -> Case:
    """Returns what was measured of a load, beside what was simulated of it."""
    figures_of = {key: figure([each.figures[key] for each in measured], _unit(key), _better(key)) for key in SHOWN}
    return Case(name, figures_of, details={"simulated": {key: [each[key] for each in simulated] for key in SHOWN}})


def _unit(key: str) -> str:
    return "ms" if key.endswith("_ms") else key.replace("_per_second", "/s")


def _better(key: str) -> Better:
    return "lower" if key.endswith("_ms") else "higher"


def _in_short(name: str, offs: dict[str, float], is_crowd: bool) -> str:
    """Returns a row of the short table; in a crowd the greatest rate has a goal, and times have none."""

    def cell(*keys: str) -> str:
        marks = ["**" * (abs(offs[key]) > GOALS.get(key, GOALS.get(key[:3], 0.0))) for key in keys]
        return "/".join(f"{mark}{offs[key]:+.0%}{mark}" for key, mark in zip(keys, marks, strict=True))

    if is_crowd:
        return f"| {name} | {cell('requests_per_second')} | | | |"
    times = (cell(f"p50_{each}_ms", f"p99_{each}_ms") for each in ("ttft", "itl", "e2e"))
    return " | ".join((f"| {name}", cell("tokens_per_second"), *times)) + " |"


def _print_sums(price: FittedPrice, samples: Sequence[StepSample]) -> None:
    """Prints measured and predicted times of steps, by their answers that go on, with and without prompts."""
    sums: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        load = sample.work.load
        kind = "with prompts" if load.prompt else "decodes"
        found = sums.setdefault((kind, (load.rows - load.prompt).bit_length()), [0, 0.0, 0.0])
        for place, value in enumerate((1, sample.seconds, price.seconds(*sample.work))):
            found[place] += value
    print("\n| steps | rows of answers | number | measured, s | predicted, s | off |\n|---|---|---|---|---|---|")
    for (kind, bits), (count, seconds, guess) in sorted(sums.items()):
        rows = f"{1 << bits - 1} to {(1 << bits) - 1}" if bits else "0"
        print(f"| {kind} | {rows} | {count:,.0f} | {seconds:.2f} | {guess:.2f} | {guess / seconds - 1:+.1%} |")


def _told(values: tuple[float, float, float]) -> str:
    mean, low, high = values
    return f"{mean:,.1f} ({low:,.1f} to {high:,.1f})"


if __name__ == "__main__":
    main()
