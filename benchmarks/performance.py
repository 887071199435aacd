"""The tables of docs/PERFORMANCE.md, the table and the picture of README.md, and figures in other pages (`figures.py`),
made from `benchmarks/results/`.

python -m benchmarks.performance            # writes them; `--check` fails if they are not current
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import cases, filled, number, of, passages, read, under_load
from benchmarks.figures import offline as of_record
from benchmarks.picture import Compared, picture

from kvern.bench.record import Figure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "PERFORMANCE.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "compared.svg"
BEGIN, END = "<!-- python -m benchmarks.performance -->\n", "<!-- the end of the tables -->\n"

MODELS = {
    "llama-8b": "Llama-3.1-8B",
    "llama-8b-tp2": "Llama-3.1-8B, `-tp 2`",
    "llama-8b-tp4": "Llama-3.1-8B, `-tp 4`",
    "llama-8b-tp8": "Llama-3.1-8B, `-tp 8`",
    "llama-70b-tp2": "Llama-3.1-70B, `-tp 2`",
    "llama-70b-tp4": "Llama-3.1-70B, `-tp 4`",
    "llama-70b-tp2-pp2": "Llama-3.1-70B, `-tp 2 -pp 2`",
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-30b-a3b-mixed256": "Qwen3-30B-A3B, later",
    "qwen3-30b-a3b-ep2": "Qwen3-30B-A3B, `-tp 2`, DP attention",
    "qwen3-30b-a3b-ep4": "Qwen3-30B-A3B, `-tp 4`, DP attention",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
    "qwen3.6-35b-a3b-tp4": "Qwen3.6-35B-A3B, `-tp 4`",
    "gpt-oss-20b": "gpt-oss-20b MXFP4",
    "deepseek-v3-16-layers-ep4": "DeepSeek-V3, 16 layers, `-tp 4`, DP attention",
    "deepseek-v3-16-layers-ep8": "DeepSeek-V3, 16 layers, `-tp 8`, DP attention",
}
"""Files of `kvern bench offline`, by their names, and what they measured."""
STEADY = {
    "llama-3.1-8b quantization=fp8": "Llama-3.1-8B FP8",
    "awq-llama": "Llama-3.1-8B AWQ",
    "qwen3-30b-a3b quantization=fp8": "Qwen3-30B-A3B FP8",
}
"""Runs in h200/steady.json that no file of `kvern bench offline` has."""
CASES = (
    ("stream", "kvern", "llama.cpp BF16"),
    ("stream", "kvern int8", "OpenVINO int8"),
    ("stream", "kvern int8", "llama.cpp Q8_0"),
    ("stream", "kvern int4", "llama.cpp Q4_0"),
    ("16 streams", "kvern", "transformers"),
    ("16 streams", "kvern", "vLLM"),
    ("16 streams", "kvern int8", "OpenVINO int8 batching"),
    ("64 streams", "kvern", "transformers"),
    ("64 streams", "kvern", "vLLM"),
    ("64 streams", "kvern int8", "OpenVINO int8 batching"),
    ("prefill", "kvern", "llama.cpp BF16"),
    ("prefill", "kvern int8", "OpenVINO int8"),
    ("prefill", "kvern int8", "llama.cpp Q8_0"),
    ("prefill", "kvern int4", "llama.cpp Q4_0"),
)
"""What is compared on a CPU: the load, kvern's precision, and the engine beside it."""


def unit(workload: str) -> str:
    if workload.startswith("decode"):
        return f"{workload}, ms/step"
    return f"{workload}, prompt tokens/s" if workload.startswith("prefill") else f"{workload}, s"


def figure(workload: str, seconds: float, result: dict[str, Any]) -> float:
    """What the table shows of a run that took `seconds`."""
    if workload.startswith("decode"):
        return float(result["step_milliseconds"] * seconds / result["seconds"])
    return float(result["prompt_tokens"] / seconds) if workload.startswith("prefill") else seconds


def measured(workload: str, result: dict[str, Any]) -> str:
    """The median, the range where runs differ by more than 1 %, and the number of runs if they are fewer than three."""
    runs = sorted(figure(workload, seconds, result) for seconds in result["seconds_of_runs"])
    shown = number(figure(workload, result["seconds"], result))
    if runs[-1] > 1.01 * runs[0]:
        shown += f" ({number(runs[0])}-{number(runs[-1])})"
    return shown if len(runs) > 2 else f"{shown}, {len(runs)} run{'s' * (len(runs) > 1)}"


def offline() -> Iterator[Sequence[str]]:
    """Rows of `kvern bench offline`: model, workload, kvern, vLLM."""
    peers = read("h200/vllm-0.24.json")
    for name, model in MODELS.items():
        for workload, result in of_record(name).items():
            beside = peers.get(name, {}).get(workload)
            yield model, unit(workload), measured(workload, result), number(beside) if beside else ""
    runs = cases("h200/steady.json")
    for name, model in STEADY.items():
        found: dict[str, list[float]] = {}
        for process, case in runs.items():
            start, separator, workload = process.partition(": ")
            if separator and start.partition(", process")[0] == name:
                kind = workload.rstrip("0123456789")
                figure = {"decode": "step_milliseconds", "prefill": "prompt_tokens_per_second"}.get(kind, "seconds")
                found.setdefault(workload, []).append(case.figures[figure].median)
        for workload, values in found.items():
            label = "prefill64x4096" if workload == "prefill" else workload
            yield model, unit(label), number(statistics.median(values)), ""


def over_http() -> Iterator[Sequence[str]]:
    """Rows of a server and of starts: model, what, kvern, vLLM."""
    peers = read("h200/vllm-0.24.json")["http"]
    model = "Llama-3.1-8B over HTTP, 512 in, 128 out"

    def middle(load: str, key: str) -> str:
        return number(under_load(load, key))

    burst = "512 at once, requests/s"
    yield model, burst, middle("512 at once", "request_throughput"), number(peers[burst])
    for short, key in (("TTFT", "ttft"), ("ITL", "itl")):
        what = f"16 requests/s, {short} p50 / p99, ms"
        pair = (middle("16 requests/s", f"{edge}_{key}_ms") for edge in ("p50", "p99"))
        yield model, what, " / ".join(pair), " / ".join(number(value) for value in peers[what])
    for what, ours, theirs in starts():
        yield "Llama-3.1-8B", f"start to first token, {what}, s", number(ours), "-".join(map(number, theirs))


def starts() -> Iterator[tuple[str, float, list[float]]]:
    """Seconds to the first token: what the caches hold, kvern's median, vLLM's range."""
    start, peers = cases("h200/start.json"), read("h200/vllm-0.24.json")["start"]
    for what in ("nothing cached", "later"):
        yield what, start[what].figures["seconds"].median, peers[f"{what}, s"]


def steps(name: str, *workloads: str) -> Iterator[tuple[float, float]]:
    """Milliseconds of a step of workloads: kvern's, vLLM's."""
    peers = read("h200/vllm-0.24.json")[name]
    for workload in workloads:
        yield of(name, workload)["step_milliseconds"], peers[workload]


def short() -> Iterator[Sequence[str]]:
    """Rows of README: what, kvern, vLLM."""
    peers = read("h200/vllm-0.24.json")
    for what, name, workloads in (
        ("Llama-3.1-8B, a step of 1 / 32 / 256 streams, ms", "llama-8b", ("decode1", "decode32", "decode256")),
        ("Qwen3-0.6B, a step of one stream, ms", "qwen3-0.6b", ("decode1",)),
        ("Qwen3-30B-A3B, a step of one stream, ms", "qwen3-30b-a3b", ("decode1",)),
    ):
        pairs = zip(*steps(name, *workloads), strict=True)
        yield what, *(" / ".join(number(value) for value in engine) for engine in pairs)
    burst = "512 at once, requests/s"
    ours = number(under_load("512 at once", "request_throughput"))
    yield "8B over HTTP, 512 requests at once, requests/s", ours, number(peers["http"][burst])
    ours = number(under_load("16 requests/s", "p99_itl_ms"))
    theirs = number(peers["http"]["16 requests/s, ITL p50 / p99, ms"][1])
    yield "8B over HTTP, 16 requests/s: time between tokens, p99, ms", ours, theirs
    shared = of("llama-8b", "shared2048x256")["seconds"]
    yield (
        "8B, 256 requests with the same first 2048 tokens, s",
        number(shared),
        number(peers["llama-8b"]["shared2048x256"]),
    )
    for what, seconds, theirs_seconds in starts():
        yield f"8B, start to the first token, {what}, s", number(seconds), "-".join(map(number, theirs_seconds))


def drawn() -> str:
    """docs/images/compared.svg as it has to be."""
    [(step, step_of_vllm)] = steps("llama-8b", "decode1")
    late = read("h200/vllm-0.24.json")["http"]["16 requests/s, ITL p50 / p99, ms"][1]
    [_, (_, start, [start_of_vllm])] = starts()
    return picture(
        [
            Compared("Llama-3.1-8B, one stream: time for a token", "ms", step, step_of_vllm),
            Compared(
                "16 requests a second: time between tokens, 99th percentile",
                "ms",
                under_load("16 requests/s", "p99_itl_ms"),
                late,
            ),
            Compared("From the start of the server to the first token", "s", start, start_of_vllm),
        ]
    )


def beside(ours: Figure, theirs: Figure) -> str:
    """Two speeds and their ratio, and the ratios of rounds where they differ by more than a tenth."""
    rounds = [here / there for here, there in zip(ours.runs, theirs.runs, strict=True)]
    text = f"{ours.median:.0f} / {theirs.median:.0f} = {ours.median / theirs.median:.2f}"
    return f"{text} ({min(rounds):.2f}-{max(rounds):.2f})" if max(rounds) > 1.1 * min(rounds) else text


def on_cpus() -> Iterator[Sequence[str]]:
    """Rows of `benchmarks/cpu.py`: shape, load, precision, the other engine, and speeds with one and two threads."""
    found = cases("cpu.json")
    for shape in ("32M", "135M"):
        for load, ours, theirs in CASES:
            cells = []
            for threads in ("1 thread", "2 threads"):
                speeds = found[f"{shape}, {threads}, {load}"].figures
                cells.append(beside(speeds[ours], speeds[theirs]))
            yield shape, load, ours.removeprefix("kvern").strip() or "bfloat16", theirs, *cells


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """In Markdown; a first cell that repeats the one above it is left empty."""
    lines, above = [head, ["---"] * len(head)], ""
    for first, *rest in rows:
        lines.append(["" if first == above else first, *rest])
        above = first
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def with_tables(page: Path, tables: Sequence[str]) -> str:
    """A page with these tables between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n" + "\n".join(tables) + f"\n{END}{after}"


def made() -> dict[Path, str]:
    """All files as they have to be."""
    offline_and_http = (row for rows in (offline(), over_http()) for row in rows)
    cpu = table(["CPU", "load", "precision", "beside", "1 thread, tokens/s", "2 threads"], on_cpus())
    pages = {
        PAGE: with_tables(PAGE, [table(["H200", "workload", "kvern", "vLLM 0.24"], offline_and_http), cpu]),
        README: with_tables(README, [table(["one H200", "kvern", "vLLM 0.24"], short())]),
        PICTURE: drawn(),
    }
    for passage in passages():
        path = ROOT / "docs" / passage.page
        pages[path] = filled(pages.get(path) or path.read_text(), passage)
    return pages


def main() -> None:
    for path, text in made().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif text != path.read_text():
            raise SystemExit(f"{path.relative_to(ROOT)} is not current: make performance")


if __name__ == "__main__":
    main()
