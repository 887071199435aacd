"""Figures of a load: throughput, percentiles of times, goodput and errors."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvern.bench.percentile import percentile
from kvern.bench.record import Case, figure
from kvern.bench.serving import LoadRun, Outcome
from kvern.errors import ConfigError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after it",
    "itl": "time between tokens",
    "e2el": "request, from end to end",
}
MAIN = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "server_cpu_ms")
"""The figures that a gate checks."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def read_goodput(limits: Iterable[str]) -> dict[str, float]:
    """Reads limits such as ttft:200, in milliseconds, as seconds. Raises ConfigError."""
    found = {}
    for text in limits:
        name, _, value = text.partition(":")
        name = metric(name)
        try:
            found[name] = float(value) / 1000
        except ValueError:
            found[name] = 0.0
        if name not in GOODPUT_METRICS or not 0 < found[name] < float("inf"):
            names = ", ".join(GOODPUT_METRICS)
            raise ConfigError(f"goodput is {text!r}: it must be NAME:MILLISECONDS, NAME one of {names}")
    return found


def metric(name: str) -> str:
    """Returns a metric's name; e2e is another name of e2el."""
    return "e2el" if name == "e2e" else name


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """True if the request succeeded within all limits; a single token has no time per output token."""
    values = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2el}
    return not outcome.error_kind and all(values[name] <= limit for name, limit in limits.items())


def summarize(
    run: LoadRun,
    percents: Sequence[float] = (50, 90, 99),
    limits: Mapping[str, float] | None = None,
    metrics: Iterable[str] = tuple(METRICS),
    detailed: bool = False,
    target_itl: float = 0.0,
) -> dict[str, Any]:
    """Returns the figures of a run as JSON. Times are milliseconds, rates per second; successful requests count.

    `server_cpu_ms` and `engine_cpu_ms` are the CPU time of their processes for a request. A token is late if it comes
    more than `target_itl` seconds after the one before; with 0 none is.
    """
    answered = [outcome for outcome in run.outcomes if not outcome.error_kind]
    errors = Counter(outcome.error_kind for outcome in run.outcomes if outcome.error_kind)
    first: dict[str, str] = {}
    for outcome in run.outcomes:
        first.setdefault(outcome.error_kind, outcome.error)
    read, written = (sum(getattr(outcome, f"{name}_tokens") for outcome in answered) for name in ("prompt", "output"))
    cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    seconds = max(run.seconds, 1e-9)
    found: dict[str, Any] = {
        "completed": len(answered),
        "failed": len(run.outcomes) - len(answered),
        "errors": {kind: {"count": count, "first": first[kind]} for kind, count in errors.items()},
        "duration": run.seconds,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "cached_input_tokens": sum(cached) if cached else None,
        "request_throughput": len(answered) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
        "client_cpu_share": run.client_seconds / seconds,
    }
    for name in ("server", "engine"):
        spent = getattr(run, f"{name}_seconds")
        if spent is not None and answered:
            found[f"{name}_cpu_ms"] = 1000 * spent / len(answered)
    if run.latest_send is not None:
        found["latest_send_ms"] = 1000 * run.latest_send
    if limits:
        found["request_goodput"] = sum(is_good(outcome, limits) for outcome in answered) / seconds
    if target_itl:
        gaps = _values(answered, "itl")
        found["late_token_share"] = sum(gap > target_itl for gap in gaps) / max(len(gaps), 1)
    for name in metrics:
        values = [1000 * value for value in _values(answered, name)]
        found[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        found[f"median_{name}_ms"] = percentile(values, 50)
        found[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        found |= {f"p{percent:g}_{name}_ms": percentile(values, percent) for percent in percents}
    return found | (_details(run) if detailed else {})


def case_of(name: str, runs: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> Case:
    """Returns the figures of runs for a record: throughputs and times as such, counts and errors as details."""
    figures, details = {}, {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        if key.endswith("_ms"):
            figures[key] = figure(values, "ms", main=key in MAIN)
        elif key.endswith("throughput") or key == "request_goodput":
            figures[key] = figure(values, "1/s", "higher", key in MAIN)
        else:
            details[key] = values if len(runs) > 1 else values[0]
    return Case(name, figures, dict(asked), details)


def _details(run: LoadRun) -> dict[str, Any]:
    """Returns the figures of every request, in order; times in seconds."""
    outcomes = run.outcomes
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.gaps for outcome in outcomes],
        "start_times": [outcome.started for outcome in outcomes],
        "request_errors": [outcome.error for outcome in outcomes],
    }


def _values(outcomes: Iterable[Outcome], name: str) -> list[float]:
    if name == "itl":
        return [gap for outcome in outcomes for gap in outcome.gaps]
    values = (getattr(outcome, name) for outcome in outcomes)
    return [value for value in values if value is not None]
