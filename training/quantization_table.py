"""Quantizes an embedded model in many ways and measures each with kvern, as a Markdown table for docs/notes/quantized.md.

python -m training.quantization_table --count 200
python -m training.quantization_table --methods plain fp8 awq mixed-5 kv-fp8 --tasks arithmetic facts
"""

import argparse
import contextlib
import io
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvern import LLM
from kvern.cli.main import main as kvern
from training.evaluate import EMBEDDED, accuracy, perplexities
from training.text import TASKS


@dataclass(frozen=True)
class Method:
    """A way to store weights or cache: options of `kvern quantize`, if it makes a folder, and of the engine."""

    says: str
    quantize: tuple[str, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)


METHODS = {
    "plain": Method("bf16"),
    "fp8": Method("FP8, a scale for each output", ("--method", "fp8")),
    "fp8-blocks": Method("FP8, blocks of 128 x 128", ("--method", "fp8", "--blocks")),
    "int8": Method("INT8", ("--method", "int8")),
    "fp8-online": Method("FP8 made while loading", engine={"quantization": "fp8"}),
    "int8-online": Method("INT8 made while loading", engine={"quantization": "int8"}),
    "int4": Method("INT4 group 128, rounded to the nearest", ("--method", "int4")),
    "awq": Method("INT4 group 128, AWQ", ("--method", "awq")),
    "awq-zero": Method("INT4 group 128, AWQ, zero points", ("--method", "awq", "--zero-points")),
    "gptq": Method("INT4 group 128, GPTQ", ("--method", "gptq")),
    "int4-32": Method("INT4 group 32, rounded to the nearest", ("--method", "int4", "--group-size", "32")),
    "awq-32": Method("INT4 group 32, AWQ", ("--method", "awq", "--group-size", "32")),
    "gptq-32": Method("INT4 group 32, GPTQ", ("--method", "gptq", "--group-size", "32")),
    "mixed-4.5": Method("mixed, 4.5 bits", ("--method", "mixed", "--target-bits", "4.5")),
    "mixed-5": Method("mixed, 5 bits", ("--method", "mixed", "--target-bits", "5")),
    "mixed-6": Method("mixed, 6 bits", ("--method", "mixed", "--target-bits", "6")),
    "mixed-1%": Method("mixed, at most 1 % of perplexity", ("--method", "mixed", "--max-loss", "1%")),
    "kv-fp8": Method("bf16, KV cache in FP8", engine={"kv_cache_dtype": "fp8"}),
    "kv-int8": Method("bf16, KV cache in INT8", engine={"kv_cache_dtype": "int8"}),
}


@dataclass(frozen=True)
class Measured:
    """`bits` per weight of the layers, perplexities of what the assistant says and of all text, `right` of `asked`."""

    says: str
    bits: float
    spoken: float
    every: float
    right: int
    asked: int

    def row(self, plain: "Measured") -> str:
        cells = [self.says, f"{self.bits:.2f}"]
        for mine, other in ((self.spoken, plain.spoken), (self.every, plain.every)):
            cells += [f"{mine:.4f}", f"{mine / other - 1:+.2%}"]
        cells += [f"{self.right / self.asked:.1%}"] if self.asked else []
        return f"| {' | '.join(cells)} |"


def measure(method: Method, arguments: argparse.Namespace, folder: Path) -> Measured:
    """Make the model in the folder, if it takes one, and measure it. Raises SystemExit."""
    model, bits = arguments.model, 8.0 if "quantization" in method.engine else 16.0
    if method.quantize:
        out = folder / "model"
        rows = ["--calibration-rows", str(arguments.calibration_rows)] if arguments.calibration_rows else []
        with contextlib.redirect_stdout(io.StringIO()):
            if kvern(["quantize", str(model), *method.quantize, *rows, "--out", str(out), "--overwrite"]):
                raise SystemExit(f"{method.says} could not be made")
        report = json.loads((out / "quantization_report.json").read_text())
        bits = report["mixed"]["bits_per_weight"] if "mixed" in report else report["totals"]["bits_per_weight"]
        model = out
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with LLM(str(model), **method.engine) as llm:
        marks = [accuracy(llm, tokenizer, task, arguments.questions, arguments.seed) for task in arguments.tasks]
        counts = [count for found in marks for count in found.values()]
        spoken, every = perplexities(llm, tokenizer, arguments.count, arguments.seed)
    right, asked = (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
    return Measured(method.says, bits, spoken, every, right, asked)


def table(measured: Sequence[Measured]) -> str:
    """In Markdown; the first is what others are compared with."""
    head = [
        "weights",
        "bits",
        "perplexity, answers",
        "change",
        "perplexity, all text",
        "change",
        *(["right"] if measured[0].asked else []),
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(item.row(measured[0]) for item in measured)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what each precision costs an embedded model.")
    parser.add_argument("--model", type=Path, default=EMBEDDED / "kvern-12m")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--count", type=int, default=200, help="conversations for perplexity")
    parser.add_argument("--questions", type=int, default=40, help="questions a task")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=[])
    parser.add_argument("--calibration-rows", type=int, help="of kvern quantize")
    parser.add_argument("--seed", type=int, default=20_000)
    arguments = parser.parse_args()
    names = ["plain", *(name for name in arguments.methods if name != "plain")]
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            measured.append(measure(METHODS[name], arguments, Path(folder)))
            assert math.isfinite(measured[-1].every)
            print(table(measured), flush=True)


if __name__ == "__main__":
    main()
