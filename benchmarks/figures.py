"""Figures in tables and sentences of docs/ that people write, filled in from `benchmarks/results/`.

A passage is a piece of a page, with {} in the place of each figure. `benchmarks.performance` puts the figures of the
records there, and `--check` fails where a page has others.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvern.bench.record import Case, Figure, read_record

RESULTS = Path(__file__).parent / "results"
FIGURE = r"\d[\d.,-]*(?: \d{3})*"
"""A number, or two of a range: 0.97, 39 424, 10,066, 1.95-2.06."""


class Passage(NamedTuple):
    """A piece of a page of docs/, and the figures that stand in its places {}."""

    page: str
    text: str
    figures: Sequence[str]


def read(name: str) -> dict[str, Any]:
    """The findings of a record in `benchmarks/results/`."""
    return read_record(RESULTS / name).findings


def cases(name: str) -> dict[str, Case]:
    """The cases of such a record, by name."""
    return {case.name: case for case in read_record(RESULTS / name).cases}


def middle(name: str, case: str, figure: str) -> float:
    """The median of a figure in such a record."""
    return cases(name)[case].figures[figure].median


def number(value: float) -> str:
    """Three or more digits that count: 4.11, 13.4, 39 424."""
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def filled(text: str, passage: Passage) -> str:
    """The text of a page with a passage's figures. Raises SystemExit if the passage is not there once."""
    pattern = re.escape(passage.text).replace(r"\{\}", FIGURE)
    wanted = passage.text.format(*passage.figures)
    changed, count = re.subn(pattern, lambda match: wanted, text)
    if count != 1:
        raise SystemExit(f"docs/{passage.page} has {count} times what benchmarks/figures.py looks for: {passage.text}")
    return changed


def passages() -> Iterator[Passage]:
    """All passages with figures of records."""
    for part in (switches, over_http, agents, attacked, divisions, sums, engines, adapters, quantized):
        yield from part()
    for part in (accuracy, quantized_experts, heads, drafts, forms, clients, workloads):
        yield from part()


def offline(name: str) -> dict[str, dict[str, Any]]:
    """What a record of `kvern bench offline` on an H200 says of each workload."""
    return {
        case.name: {name: figure.median for name, figure in case.figures.items()}
        | {"prompt_tokens": case.workload["prompt_tokens"], "seconds_of_runs": case.figures["seconds"].runs}
        for case in cases(f"h200/{name}.json").values()
    }


def of(name: str, workload: str) -> Any:
    """The figures of a workload in such a record."""
    return offline(name)[workload]


def step(name: str, *numbers: int) -> list[str]:
    """Milliseconds of a step with so many requests, one figure each."""
    return [number(of(name, f"decode{count}")["step_milliseconds"]) for count in numbers]


def switches() -> Iterator[Passage]:
    plain, page = "llama-8b", "PERFORMANCE.md"
    for switch, name in (("cuda_graphs", "no-graphs"), ("overlap", "no-overlap")):
        text = f"| `{switch}` | decode 1 / 32, ms/step | {{}} / {{}} | {{}} / {{}} |"
        yield Passage(page, text, [*step(plain, 1, 32), *step(f"{plain}-{name}", 1, 32)])
    shared = [number(of(name, "shared2048x256")["seconds"]) for name in (plain, f"{plain}-no-shared-prefix")]
    yield Passage(page, "| `shared_prefix_attention` | shared2048x256, s | {} | {} |", shared)
    text = "| decode 1 / 32 / 128, ms/step | {} / {} / {} | {} / {} / {} |"
    yield Passage(page, text, [*step(plain, 1, 32, 128), *step(f"{plain}-deterministic", 1, 32, 128)])


def under_load(load: str, key: str) -> float:
    """The median of a figure over the rounds of a load over HTTP."""
    return middle("h200/http.json", load, key)


def over_http() -> Iterator[Passage]:
    later = [
        run["request_throughput"]
        for run in read("h200/everyday-use.json")["http"]["runs"]
        if run["load"] in ("burst2", "burst3")
    ]
    text = "512 at once: bursts of later code gave {} to {} requests/s"
    yield Passage("notes/serving.md", text, [f"{min(later):.1f}", f"{max(later):.1f}"])
    rounds = read("h200/steady.json")[
        "http (512 prompts at once, then 200 at 16/s Poisson; 512 in, 128 out; target 15 ms), in this order"
    ]
    poisson = [found for name, found in rounds.items() if name.startswith("poisson")]
    keys = ("TTFT ms, median", "ITL ms, median", "ITL ms, p99")
    medians = [number(statistics.median(float(found[key]) for found in poisson)) for key in keys]
    yield Passage("notes/serving.md", "{} ms (median) and ITL {} / {} ms", medians)


def agents() -> Iterator[Passage]:
    record = read("h200/everyday-use.json")
    took = {name: f"{value:.0f}" for name, value in record["agent_prompt"]["milliseconds"].items()}
    for text, names in (
        ("| 6,000 tokens alone | {} ms |", ("alone",)),
        ("| the same after 20,000 cached ones | {} ms |", ("cached",)),
        ("| the same as token ids, without template and tokenizer | {} ms |", ("ids",)),
        ("| 26,000 tokens of which all but 19 are cached; 19 tokens alone | {} ms; {} ms |", ("resumed", "short")),
        ("| 26,000 tokens of which none is cached | {} ms |", ("whole",)),
    ):
        yield Passage("notes/serving.md", text, [took[name] for name in names])
    idle = record["idle"]
    figures = [f"{100 * idle['before any request']:.2f}", f"{100 * idle['after requests']:.2f}"]
    yield Passage("notes/serving.md", "before any request / after answers | {} / {} % |", figures)


def attacked() -> Iterator[Passage]:
    record, fuzzed, page = read("soak-attacked-cpu.json"), read("fuzz-cpu.json"), "notes/serving.md"
    first, last = fuzzed["memory_mib"]
    yield Passage(page, "| {} requests, no 500,", [number(fuzzed["requests"])])
    yield Passage(page, "the server had {} MiB at the beginning and {} at the end", [str(first), str(last)])
    restarts = record["restarts, s"]
    yield Passage(page, "| {} streams, each identical", [f"{record['honest streams']:,}"])
    text = "{} of 5 engines came back, in {} to {} s |"
    yield Passage(page, text, [str(len(restarts)), f"{min(restarts):.1f}", f"{max(restarts):.1f}"])
    small, quiet = record["small request, attacked, ms"], record["small request, quiet, ms"]
    without = record["small request, attacked, without those that waited for a restart, ms"]
    figures = [small["p50"], small["p99"], small["max"]]
    yield Passage(
        page,
        "| {} / {} / {} ms, p99 {} times that without attack ({} ms); {} of {} waited for a restart, "
        "without them the longest took {} ms |",
        [
            *(f"{value:.0f}" for value in figures),
            f"{record['p99 attacked over quiet']:.1f}",
            f"{quiet['p99']:.0f}",
            str(record["small requests that waited for a restart"]),
            str(small["count"]),
            f"{without['max']:.0f}",
        ],
    )
    loop = [
        record[name]["p99"]
        for name in ("GET /health, quiet, ms", "GET /health, attacked, ms", "delay of the client itself, attacked, ms")
    ]
    yield Passage(page, "{} ms quiet, {} ms attacked; the client's own delay {} ms", [f"{value:.0f}" for value in loop])


def divisions() -> Iterator[Passage]:
    """What divided models take for a step of one request, in ms, and for mixed256, in s."""
    small, large = (step(name, 1)[0] for name in ("llama-70b-tp2", "llama-70b-tp4"))
    yield Passage("notes/gpu.md", "on 2 and 4 ({} and {})", [small, large])
    steps = [step(f"llama-8b-tp{ranks}", 1)[0] for ranks in (2, 4, 8)]
    yield Passage("notes/gpu.md", "(measured {}, {} and {})", steps)
    took = [number(of(name, "mixed256")["seconds"]) for name in ("llama-70b-tp4", "llama-70b-tp2-pp2")]
    yield Passage("notes/gpu.md", "one of `-tp 4` {} s, and `-tp 2 -pp 2` {} s", took)
    killed = read("h200/ranks.json")["a_rank_is_killed"]["seconds_until_streams_go_on"]
    yield Passage("parallel.md", "all streams went on after {} s", [f"{killed:.1f}"])


def sums() -> Iterator[Passage]:
    record = read("h200/ranks.json")["sums"]
    for shape in ("1 x 4096", "32 x 4096", "1 x 8192", "32 x 8192", "128 x 8192", "512 x 8192"):
        two, four = (record[f"{count} GPUs"][shape] for count in (2, 4))
        values = [
            two["nccl + norm"],
            two["whole + norm"],
            *(four[f"{way} + norm"] for way in ("nccl", "whole", "parts")),
        ]
        yield Passage("notes/gpu.md", f"| {shape} |" + " {} |" * 5, [f"{value:.1f}" for value in values])


def engines() -> Iterator[Passage]:
    record = read("h200/ranks.json")["data_parallel"]
    two, one, _, ratio = record["two engines of llama-3.1-8b"]
    page = "data-parallel.md"
    yield Passage(
        page,
        "took {} s for 512 requests, and one\n{} s: {} times",
        [
            f"{two['seconds']:.1f}",
            f"{one['seconds']:.1f}",
            f"{one['seconds'] / two['seconds']:.2f}",
        ],
    )
    eight = record["eight engines of llama-3.1-8b"][2]["of 8 x one with its share"]
    shares = [f"{ratio['of 2 x one with its share']:.2f}", f"{eight:.2f}"]
    yield Passage(page, "Two generated {} times what twice one did with its\nshare, eight {} of", shares)


def adapters() -> Iterator[Passage]:
    rates = {name: case.figures["tokens_per_second"] for name, case in cases("h200/adapters.json").items()}
    plain = rates["no places for adapters"].median
    for text, name in (
        ("no slots for adapters", "no places for adapters"),
        ("eight slots, none used", "places, none used"),
        ("one adapter for all", "1 adapter"),
        ("eight, mixed", "8 adapters mixed"),
        ("eight, mixed with requests that use none", "8 adapters mixed with none"),
    ):
        rate, runs = rates[name].median, rates[name].runs
        figures = [f"{rate:,.0f}", f"{min(runs):,.0f}-{max(runs):,.0f}", f"{rate / plain:.3f}"]
        yield Passage("adapters.md", f"| {text} | {{}} ({{}}) | {{}} |", figures)


def steady(name: str, workload: str, figure: str) -> str:
    """A figure of a run in h200/steady.json, marked * in docs/notes/quantized.md."""
    return number(middle("h200/steady.json", f"{name}: {workload}", figure))


def streamed(name: str, workload: str, figure: str) -> float:
    """A figure of a run in h200/quantized-streams.json."""
    return middle("h200/quantized-streams.json", f"{name}: {workload}", figure)


def quantized() -> Iterator[Passage]:
    """Llama-3.1-8B's tables in docs/notes/quantized.md."""
    page, plain, fp8, awq = "notes/quantized.md", "llama-3.1-8b", "llama-3.1-8b quantization=fp8", "awq-llama"
    q4, ahead, fp8_ahead = f"{plain}, GGUF Q4_K, head Q6_K", f"{plain}, ahead", f"{plain}, --quantization fp8, ahead"
    both, of_step = f"{fp8},kv_cache_dtype=fp8", "step_milliseconds"
    one = steady(f"{plain}, process 2", "decode1", of_step)
    many = number(streamed(ahead, "decode32", of_step))
    rates = [streamed(name, "prefill", "prompt_tokens_per_second") for name in (plain, fp8_ahead)]
    whole, *wholes = (steady(name, "mixed256", "seconds") for name in (plain, fp8, both, f"{awq}, process 2"))
    steps = [one, *(steady(name, "decode1", of_step) for name in (fp8, awq)), number(streamed(q4, "decode1", of_step))]
    more = [many, number(streamed(fp8_ahead, "decode32", of_step)), steady(awq, "decode32", of_step)]
    rows = (
        ("| decode 1, ms a step | {} * | {} * | {} * | {} |", steps),
        ("| decode 32 | {} | {} | {} * | {} |", [*more, number(streamed(q4, "decode32", of_step))]),
        ("| prefill 64 x 4096, tokens/s | {} | {} |", [number(rate) for rate in rates]),
        ("| mixed256 | {} s * | {} s *; {} s * with the KV cache in FP8 | {} s * |", [whole, *wholes]),
    )
    for text, figures in rows:
        yield Passage(page, text, figures)
    for text, workload in (("KV cache: decode 256", "decode256"), ("| 8 x 7500 tokens and 256 answers", "8x7500")):
        before, after = (
            streamed(name, workload, "itl_p50_milliseconds") for name in (ahead, f"{plain}, --kv-cache-dtype fp8")
        )
        figures = [number(value) for value in (before, after, before / after)]
        yield Passage(page, f"{text}, time between tokens | {{}} ms | {{}} ms, {{}}x |", figures)
    figures = [steady(both, workload, "itl_p50_milliseconds") for workload in ("decode256", "8x7500")]
    yield Passage(page, "| the same two with weights in FP8, too | | {} *; {} ms * |", figures)


def accuracy() -> Iterator[Passage]:
    """The exam of the embedded model."""
    rights = [100 * case.details["scores"][0]["value"] for case in cases("accuracy-cpu.json").values()]
    yield Passage("notes/quantized.md", "{} to {} % right", [f"{min(rights):.1f}", f"{max(rights):.1f}"])


def quantized_experts() -> Iterator[Passage]:
    """Qwen3-30B-A3B in the same page."""
    page, plain, fp8 = "notes/quantized.md", "qwen3-30b-a3b", "qwen3-30b-a3b quantization=fp8"
    took, *tries = (
        middle("h200/steady.json", f"{name}: decode32", "step_milliseconds")
        for name in (f"{plain}, process 2", fp8, f"{fp8}, process 2", f"{fp8}, process 3")
    )
    steps = [took, statistics.median(tries), min(tries), max(tries)]
    text = "decode 32, ms a step | {} * | {} * ({}-{}, three"
    yield Passage(page, text, [f"{value:.2f}" for value in steps])
    rates = [steady(name, "prefill", "prompt_tokens_per_second") for name in (plain, fp8)]
    yield Passage(page, "| Qwen3-30B-A3B: prefill 64 x 4096, tokens/s | {} * | {} * |", rates)


def heads() -> Iterator[Passage]:
    runs = read("h200/draft-heads.json")["runs"]
    one, many = (next(run for run in runs if run["requests"] == count and run["drafts"] == 3) for count in (1, 32))
    text = "{} times the tokens a second\nfor one request, {} times for 32"
    yield Passage("notes/speculation.md", text, [f"{run['ratio']:.2f}" for run in (one, many)])
    for run in runs:
        times = (run["plain_ms"], run["verify_ms"], run["drafts_ms"])
        rates = [str(run[f"{kind}_tokens_per_second"]) for kind in ("plain", "drafting")]
        yield Passage(
            "notes/speculation.md",
            f"| {run['requests']} | {run['drafts']} |" + " {} |" * 7,
            [f"{run['tokens_a_step']:.2f}", *rates, f"{run['ratio']:.2f}", *(f"{time:.2f}" for time in times)],
        )


def drafts() -> Iterator[Passage]:
    rows = read("h200/draft-models.json")["synthetic_acceptance"]["rows"]

    def tried(draft: str, requests: int, way: str) -> str:
        found = [row[way] for row in rows if (row["draft"], row["requests"]) == (draft, requests) and way in row]
        values = [value for item in found for value in (item if isinstance(item, list) else [item])]
        least, most = (f"{value:.2f}" for value in (min(values), max(values)))
        return least if least == most else f"{least}-{most}"

    for requests in (1, 32):
        figures = [tried(draft, requests, way) for way in ("five", "auto") for draft in ("bfloat16", "int4")]
        yield Passage("notes/speculation.md", f"| {requests} | {{}} | {{}} | {{}} | {{}} |\n", figures)
    figures = [tried("int4", 256, "five"), f"{rows[4]['auto']:.3f}"]
    yield Passage("notes/speculation.md", "| 256 | | {} | | {} |", figures)


def forms() -> Iterator[Passage]:
    """Answers with a form beside free ones."""
    card, core = (
        {name: figure.median for name, case in cases(file).items() for figure in case.figures.values()}
        for file in ("h200/structured.json", "structured-cpu.json")
    )
    page = "notes/serving.md"
    for text, found, names in (
        ("one H200: a regular expression / a schema | {} % / {} % |", card, ("text: regex", "text: json")),
        (
            "one CPU core: a regular expression / a schema with one long text | {} % / {} % |",
            core,
            ("text: regex", "text: json"),
        ),
        ("64 records, each with its own schema | {} % |", core, ("records: json",)),
    ):
        shares = [found[name] / found[f"{name.partition(':')[0]}: free"] for name in names]
        yield Passage(page, text, [f"{100 * share:.1f}" for share in shares])
    compiling = [f"{found['compile']:.1f}" for found in (card, core)]
    yield Passage(page, "compiling | {} ms (H200's host), {} ms (CPU) |", compiling)
    firsts = [f"{found[name]:.1f}" for found in (card, core) for name in ("first: new", "first: none")]
    yield Passage(page, "its first token, beside none | {} and {} ms (H200), {} and {} ms (CPU) |", firsts)


def clients() -> Iterator[Passage]:
    """A server on a CPU beside the same work offline."""
    page = "notes/serving.md"
    both, alone = (cases(f"{name}.json")["offline"].figures for name in ("serving-cpu", "serving-cpu-one-thread"))

    def share(figure: Figure) -> list[str]:
        return [f"{100 * value:.1f}" for value in (figure.median, min(figure.runs), max(figure.runs))]

    rates = [[f"{found[kind].median:,.0f}" for kind in ("http", "offline")] for found in (both, alone)]
    streamed, at_once, one = share(both["ratio"]), share(both["at_once_ratio"]), share(alone["ratio"])
    text = "streamed, of the same work offline, engine on both cores | {} of {} tokens/s: {} % | {} % |"
    spread = [f"{least}-{most}" for _, least, most in (streamed, at_once, one)]
    yield Passage(page, text, [*rates[0], streamed[0], spread[0]])
    yield Passage(page, "| the same with answers at once | {} % | {} % |", [at_once[0], spread[1]])
    text = "`serving-cpu-one-thread.json`) | {} of {} tokens/s: {} % | {} % |"
    yield Passage(page, text, [*rates[1], one[0], spread[2]])


def workloads() -> Iterator[Passage]:
    """The five workloads of `kvern bench serve` on a CPU."""
    found = cases("serving-cpu.json")
    for text, name in (
        ("| baseline | one at a time |", "baseline: one at a time"),
        ("| continuous_batching | arriving |", "continuous_batching: arriving"),
        ("| paged_attention | all at once |", "paged_attention: all at once"),
        ("| chunked_prefill | decodes alone |", "chunked_prefill: decodes alone"),
        ("| | decodes, prompts arriving |", "chunked_prefill: decodes"),
        ("| | long prompts |", "chunked_prefill: long prompts"),
        ("| prefix_caching | cold |", "prefix_caching: cold"),
        ("| | warm |", "prefix_caching: warm"),
    ):
        keys = ("request_throughput", "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")
        rate, tokens, *times = (found[name].figures[key].median for key in keys)
        counts = (found[name].details[f"{kind}_input_tokens"] for kind in ("cached", "total"))
        cached = statistics.median(part / whole for part, whole in zip(*counts, strict=True))
        figures = [f"{rate:.2f}", f"{tokens:,.0f}", *(f"{time:,.1f}" for time in times), f"{100 * cached:.0f}"]
        yield Passage("notes/serving.md", f"{text} {{}} | {{}} | {{}} / {{}} | {{}} / {{}} | {{}} % |", figures)
