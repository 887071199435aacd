"""How near simulations are to what a model's engine does on this machine.

    python benchmarks/simulation.py [--model kvern-12m] [--seconds 12] [--shares 0.4 0.8] [--record steps.jsonl]

Builds the kernels for CPUs if they are missing, finds what the engine answers at most, and fits costs to the steps of
loads at several shares of that rate. Then it runs other loads, three times each with other requests, on the engine and
on simulated ones with five seeds, and prints a table in Markdown: the mean of the measured and of the simulated runs,
each with the least and the greatest, and by how much the simulated mean is off. A second table has the steps of these
runs, which costs were not fitted to: the sums of their times, and of what they are predicted to take. Nothing else may
run on the machine.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvern.bench.steps import MeasuredEngine
from kvern.config import EngineConfig
from kvern.loads.source import read_load
from kvern.simulate.costs import FittedPrice, StepSample, fit_steps
from kvern.simulate.records import StepRecord, replay, write_steps
from kvern.simulate.report import figures, interval
from kvern.simulate.study import Condition, run_once

LENGTHS = "input=uniform:50:400,output=uniform:20:120"
CALIBRATED = 0.2, 0.5, 0.8, 1.0
"""Shares of the greatest rate at which steps are recorded."""
WARM_STEPS = 20
"""The first steps of a run do not count: some are the first of their kind."""
REPEATS, SEEDS = 3, 5
LEAST_REQUESTS = 40
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
Figures = dict[str, Any]


class Measured(NamedTuple):
    """A run of the engine."""

    record: StepRecord
    figures: Figures


def main() -> None:
    """Measure, simulate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m")
    parser.add_argument("--seconds", type=float, default=12, help="of each run, about")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.4, 0.8])
    parser.add_argument("--record", type=Path, help="keep the steps of the last load that costs are fitted to")
    options = parser.parse_args()
    config = EngineConfig(options.model)
    if not torch.cuda.is_available():
        subprocess.run([sys.executable, "-m", "kvern.cpu.ready", str(config.cache_folder)], check=True)
    engine = MeasuredEngine(config)
    engine.warm()

    def measured(load: str) -> Measured:
        record, driven = engine.run(list(read_load(load)))
        return Measured(record, figures([driven.timeline], {}, driven.hit_tokens, [driven.executor.busy]))

    guess = measured(f"rate=inf,requests={LEAST_REQUESTS},{LENGTHS},seed=99").figures["requests_per_second"]
    crowd = f"rate=inf,requests={_requests(guess, options.seconds)},{LENGTHS}"
    crowds = [measured(f"{crowd},seed={seed}").figures for seed in range(REPEATS)]
    most, _, _ = interval([run["requests_per_second"] for run in crowds])
    records = []
    for share in CALIBRATED:
        rate = most * share
        load = f"rate={rate:.2f},requests={_requests(rate, options.seconds)},{LENGTHS},seed=50"
        records.append(measured(load).record)
    if options.record is not None:
        write_steps(records[-1], options.record)
    header = records[0].header
    print(f"{header.model} on {header.hardware}: at most {most:.1f} requests/s")
    for share, record in zip(CALIBRATED, records, strict=True):
        same = replay(record)
        told = "all decided alike" if same.differs is None else f"step {same.differs} differs"
        print(f"replayed at {share:.0%}: {same.steps} steps, {told}")
    samples: list[StepSample] = [sample for record in records for sample in record.samples[WARM_STEPS:]]
    fit = fit_steps(samples)
    print(f"costs of {fit.steps} steps: {fit.errors}\n")
    condition = Condition(header.sizes, lambda seed: FittedPrice(fit, seed), header.pace)
    print("| load | | measured | simulated | off |\n|---|---|---|---|---|")
    _compare("all at once", crowds, [_simulated(condition, f"{crowd},seed={seed}") for seed in range(REPEATS)])
    steps: list[StepSample] = []
    for share in options.shares:
        rate = most * share
        loads = [
            f"rate={rate:.2f},requests={_requests(rate, options.seconds)},{LENGTHS},seed={seed}"
            for seed in range(REPEATS)
        ]
        runs = [measured(load) for load in loads]
        steps += [sample for run in runs for sample in run.record.samples[WARM_STEPS:]]
        _compare(f"{share:.0%}", [run.figures for run in runs], [_simulated(condition, load) for load in loads])
    _print_sums(FittedPrice(fit, None), steps)
    engine.close()


def _requests(rate: float, seconds: float) -> int:
    return max(LEAST_REQUESTS, round(rate * seconds))


def _simulated(condition: Condition, load: str) -> list[Figures]:
    requests = list(read_load(load))
    return [run_once(condition, requests, seed, {}) for seed in range(SEEDS)]


def _compare(name: str, measured: Sequence[Figures], simulated: Sequence[Sequence[Figures]]) -> None:
    runs = [run for each in simulated for run in each]
    for key, label in SHOWN.items():
        real = interval([run[key] for run in measured])
        found = interval([run[key] for run in runs])
        off = f"{found[0] / real[0] - 1:+.0%}" if real[0] else ""
        print(f"| {name} | {label} | {_told(real)} | {_told(found)} | {off} |", flush=True)


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
