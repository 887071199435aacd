"""How near simulations are to what a model's engine does on this machine.

    python benchmarks/simulation.py [--model kvern-1m] [--requests 150] [--shares 0.4 0.7] [--record steps.jsonl]

Finds what the engine answers at most, records the steps of a load, and fits costs to them. Then it runs other loads, at
shares of that rate, on the engine and on simulated ones with five seeds, and prints both as a table in Markdown: the
measured value, the simulated mean with the least and the greatest, and by how much the mean is off.
"""

import argparse
from pathlib import Path
from typing import Any

from kvern.bench.steps import MeasuredEngine
from kvern.config import EngineConfig
from kvern.loads.source import read_load
from kvern.simulate.costs import FittedPrice, fit_steps
from kvern.simulate.records import replay, write_steps
from kvern.simulate.report import figures, interval
from kvern.simulate.study import Condition, run_once

LENGTHS = "input=uniform:50:400,output=uniform:20:120"
SEEDS = 5
SHOWN = {
    "tokens_per_second": "tokens/s",
    "p50_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p50_itl_ms": "ITL p50, ms",
    "p99_itl_ms": "ITL p99, ms",
    "p50_e2e_ms": "end to end p50, ms",
    "p99_e2e_ms": "end to end p99, ms",
}


def main() -> None:
    """Measure, simulate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-1m")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.4, 0.7])
    parser.add_argument("--record", type=Path, help="keep the steps that costs are fitted to")
    options = parser.parse_args()
    engine = MeasuredEngine(EngineConfig(options.model))
    engine.warm()

    def measured(load: str) -> tuple[Any, dict[str, Any]]:
        record, driven = engine.run(list(read_load(load)))
        found = figures([driven.timeline], {}, driven.hit_tokens, [driven.executor.busy])
        return record, found

    _, crowd = measured(f"rate=inf,requests={options.requests},{LENGTHS},seed=1")
    most = crowd["requests_per_second"]
    lines = [f"rate={most * share:.2f},requests={options.requests},{LENGTHS}" for share in options.shares]
    record, _ = measured(f"{lines[-1]},seed=2")
    if options.record is not None:
        write_steps(record, options.record)
    same = replay(record)
    fit = fit_steps(record.samples)
    print(f"{record.header.model} on {record.header.hardware}: at most {most:.1f} requests/s")
    print(f"replayed: {same.steps} steps, {'all decided alike' if same.differs is None else f'{same.differs} differs'}")
    print(f"costs of {fit.steps} steps: mean error of those left out {fit.error:.1%}, of their sum {fit.bias:+.1%}\n")
    condition = Condition(record.header.sizes, lambda seed: FittedPrice(fit, seed), record.header.pace)
    print("| load | | measured | simulated | off |\n|---|---|---|---|---|")
    for share, line in zip(options.shares, lines, strict=True):
        load = f"{line},seed=3"
        _, real = measured(load)
        runs = [run_once(condition, list(read_load(load)), seed, {}) for seed in range(SEEDS)]
        for name, label in SHOWN.items():
            mean, low, high = interval([run[name] for run in runs])
            off = mean / real[name] - 1 if real[name] else 0.0
            told = f"{mean:,.1f} ({low:,.1f} to {high:,.1f})"
            print(f"| {share:.0%} | {label} | {real[name]:,.1f} | {told} | {off:+.0%} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
