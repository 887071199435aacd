"""What it costs to observe steps: `python benchmarks/observation.py --rows 1 64`.

    bare     neither causes of seconds, nor the watch on the time of steps, nor the ring of steps, nor records
    always   what no option turns off: all but records
    records  what is on by default

One engine decodes the same prompts with each kind in turn, so that all have the same memory and the same kernels. A
round without a count comes first. Ratios are of the rates of one round, to that of `bare`.

    python benchmarks/observation.py --model benchmarks/models/llama-3.1-8b --load-format dummy --device cuda
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvern import LLM, SamplingParams
from kvern.bench.record import keep
from kvern.engine.step_ring import make_ring
from kvern.engine.step_seconds import StepSeconds
from kvern.engine.step_watch import SHORTEST_SILENCE, RunningFile, StepWatch

KINDS = ("bare", "always", "records")
PROMPT = 32


class Unobserved(StepSeconds):
    """Seconds without causes."""

    def began(self, *given: Any) -> None:
        """See `StepSeconds`."""

    def awaits(self) -> None:
        """See `StepSeconds`."""

    def ended(self, now: float) -> None:
        """See `StepSeconds`."""


class Switched:
    """An engine whose observers can be taken off and put back."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        engine: Any = llm._engine
        self._core = core = engine.core
        running = RunningFile(folder / "running")
        watch = StepWatch(running, lambda seconds: None, 60.0, SHORTEST_SILENCE, ring=make_ring(folder))
        while core.idle():  # the estimates of the parts of steps, which causes of seconds need
            pass
        self._observed = {"_watch": watch, "_ring": watch.ring, "_seconds": core._seconds, "_recorder": core._recorder}
        depth = core._seconds._overlaps
        self._bare = {"_watch": None, "_ring": None, "_seconds": Unobserved(depth, time.monotonic), "_recorder": None}
        self._drift = core._pace.drift

    def be(self, kind: str) -> None:
        """Has the core observe what `kind` says."""
        core = self._core
        given = self._bare if kind == "bare" else self._observed
        given = given if kind == "records" else given | {"_recorder": None}
        for name, value in given.items():
            setattr(core, name, value)
        core._pace.drift = None if kind == "bare" else self._drift
        core.scheduler.observe(given["_recorder"])


def rates(llm: LLM, switched: Switched, rows: int, answer: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each round, by kind."""
    dice = random.Random(rows)
    prompts = [[dice.randrange(10, 2000) for _ in range(PROMPT)] for _ in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in KINDS if number % 2 else reversed(KINDS):
            switched.be(kind)
            began = time.perf_counter()
            llm.generate(prompts, params)
            if number:
                found[kind].append(rows * answer / (time.perf_counter() - began))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64], help="requests that decode (1 and 64)")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each answer (256)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        load_format=options.load_format,
        device=options.device,
        max_model_len=2 * (PROMPT + options.answer),
        max_batch_requests=max(options.rows),
        kv_cache_tokens=2 * max(options.rows) * (PROMPT + options.answer),
    )
    findings = {}
    with tempfile.TemporaryDirectory() as folder:
        switched = Switched(llm, Path(folder))
        for rows in options.rows:
            found = rates(llm, switched, rows, options.answer, options.rounds)
            for kind in KINDS[1:]:
                ratios = sorted(with_it / bare for with_it, bare in zip(found[kind], found["bare"], strict=True))
                spread = {"least": ratios[0], "median": statistics.median(ratios), "most": ratios[-1]}
                findings[f"{rows} rows, {kind}"] = {name: round(value, 4) for name, value in spread.items()}
            step = 1000 * rows / statistics.median(found["bare"])
            findings[f"{rows} rows, milliseconds a step"] = round(step, 3)
            print(rows, {name: found for name, found in findings.items() if name.startswith(f"{rows} ")}, flush=True)
    keep(options.output, "observation", options.model, vars(options), findings=findings)


if __name__ == "__main__":
    main()
