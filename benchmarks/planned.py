"""What `kvern plan` predicts beside what was measured on H200s, for the rows of docs/PERFORMANCE.md and of quantized 8B
models: errors in percent of the measured time.

    python -m benchmarks.planned

Left out are runs whose ranks share experts alone (`--enable-dp-attention`) and those with a cache in 8 bits, for which
there are no plans, and kernels that were taken out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.figures import cases, offline

from kvern.bench.workloads import WORKLOADS
from kvern.models.loader import outline_model
from kvern.models.precision import shares
from kvern.planning.estimate import Model, Split, seconds_of
from kvern.planning.hardware import CARDS
from kvern.runner.plan import BATCH_REQUESTS

MODELS = Path(__file__).parent / "models"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
RECORDS = {
    "llama-8b": ("llama-3.1-8b", Split(1, 1)),
    "llama-8b-tp2": ("llama-3.1-8b", Split(2, 1)),
    "llama-8b-tp4": ("llama-3.1-8b", Split(4, 1)),
    "llama-8b-tp8": ("llama-3.1-8b", Split(8, 1)),
    "llama-70b-tp2": ("llama-3.1-70b", Split(2, 1)),
    "llama-70b-tp4": ("llama-3.1-70b", Split(4, 1)),
    "llama-70b-tp2-pp2": ("llama-3.1-70b", Split(2, 1, 2)),
    "qwen3-0.6b": ("qwen3-0.6b", Split(1, 1)),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", Split(1, 1)),
    "qwen3.6-35b-a3b": ("qwen3.6-35b-a3b", Split(1, 1)),
    "qwen3.6-35b-a3b-tp4": ("qwen3.6-35b-a3b", Split(4, 1)),
    "gpt-oss-20b": ("gpt-oss-20b", Split(1, 1)),
}
"""Records of `kvern bench offline`: the model and its division."""
LATER = {
    "llama-3.1-8b": "llama-3.1-8b",
    "qwen3-0.6b": "qwen3-0.6b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "llama-3.1-8b quantization=fp8": "llama-3.1-8b fp8",
    "llama-3.1-8b, --quantization fp8": "llama-3.1-8b fp8",
    "awq-llama": "llama-3.1-8b awq",
    "qwen3-30b-a3b quantization=fp8": "qwen3-30b-a3b fp8",
    "qwen3-30b-a3b, --quantization fp8": "qwen3-30b-a3b fp8",
    "llama-3.1-8b, GGUF Q4_K, head Q6_K": "llama-3.1-8b q4_k",
}
"""Runs in the records of one process each, on one H200."""
OLDER = {"llama-3.1-8b, --quantization fp8": "llama-3.1-8b fp8", "llama-3.1-8b bf16": "llama-3.1-8b"}
"""Calls in `h200/quantized.json` whose kernels are those of today."""
LONG = "8 x 7500 in, 256 out"


ALLOWED = 0.15
"""The largest error of a plan, as a share of what was measured, but for these rows."""
BEYOND = {
    ("llama-3.1-70b", "tensor 2 x pipeline 2 x data 1", "mixed256"): "steps of stages with prompts have no CUDA graphs",
}


@dataclass(frozen=True)
class Row:
    """A measured workload: seconds of all of it, and what a plan says."""

    model: str
    split: Split
    workload: str
    measured: float
    planned: float

    @property
    def name(self) -> tuple[str, str, str]:
        """The model, its division and the workload."""
        return self.model, str(self.split), self.workload

    @property
    def error(self) -> float:
        """The plan's error as a share of what was measured."""
        return self.planned / self.measured - 1


@cache
def model_of(name: str) -> Model:
    """A model of `benchmarks/models` by its name, with the form of its weights after a blank."""
    folder, _, form = name.partition(" ")
    if form == "awq":
        with tempfile.TemporaryDirectory() as changed:
            config = json.loads((MODELS / folder / "config.json").read_text()) | {"quantization_config": AWQ}
            Path(changed, "config.json").write_text(json.dumps(config))
            outline = outline_model(Path(changed), load_format="dummy")
    else:
        outline = outline_model(MODELS / folder, load_format="dummy", quantization="fp8" if form == "fp8" else None)
    stored = shares(outline)
    if form == "q4_k":  # as its file has them
        forms = {"output layer": ("Q6_K", 6.5625), "embeddings": ("Q4_K", 4.5), "norms, biases": ("float32", 32)}
        named = [(share, *forms.get(share.kind, ("Q4_K", 4.5))) for share in stored]
        stored = [replace(item, format=kind, nbytes=int(item.parameters * bits / 8)) for item, kind, bits in named]
    return Model(outline.spec, str(outline.build.dtype).removeprefix("torch."), stored, outline.build.linear)


@cache
def planned(name: str, split: Split, workload: str) -> float:
    """The seconds that a plan says, as `kvern bench offline` has them beside its own."""
    model = model_of(name)
    vocabulary = model.spec.vocab_size if workload.startswith("mixed") else 2000  # others have the same lengths for all
    requests = lengths_of(workload, vocabulary)
    return seconds_of(model, CARDS["h200"], split, requests, BATCH_REQUESTS["cuda"])


@cache
def lengths_of(workload: str, vocabulary: int) -> list[tuple[int, int]]:
    """The tokens of prompts and answers."""
    if workload == LONG:
        return [(7500, 256)] * 8
    prompts, lengths = WORKLOADS[workload](vocabulary)
    return list(zip(map(len, prompts), lengths, strict=True))


def measured() -> Iterator[tuple[str, Split, str, float]]:
    """The median seconds of each workload of records."""
    for name, (model, split) in RECORDS.items():
        for workload, result in offline(name).items():
            yield model, split, workload, result["seconds"]
    found: dict[tuple[str, str], list[float]] = {}
    for file in ("steady", "quantized-streams"):
        for process, case in cases(f"h200/{file}.json").items():
            start, _, workload = process.rpartition(": ")
            if (later := LATER.get(start.partition(", process")[0])) is not None:
                workload = "prefill64x4096" if workload == "prefill" else workload
                found.setdefault((later, workload), []).append(case.figures["seconds"].median)
    for call, name in OLDER.items():
        for workload, result in cases("h200/quantized.json")[call].details.items():
            if isinstance(result, dict):
                found.setdefault((name, workload), []).append(result["seconds"])
    for (name, workload), values in found.items():
        yield name, Split(1, 1), workload, statistics.median(values)


def rows() -> list[Row]:
    """All measured workloads but those behind a shared prompt, which plans count as new for each request."""
    return [Row(*item, planned(*item[:3])) for item in measured() if not item[2].startswith("shared")]


def main() -> None:
    """Print a table."""
    print("| model | cards | workload | measured, s | planned, s | error |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows():
        cells = *row.name, f"{row.measured:.3f}", f"{row.planned:.3f}", f"{row.error:+.1%}"
        print(f"| {' | '.join(cells)} |")
    for name, reason in BEYOND.items():
        print(f"{', '.join(name)}: {reason}")


if __name__ == "__main__":
    main()
