"""The tables of serving.py: what has a target, then times by load."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

CONNECTIONS = 1000
"""Idle connections, and waiting streams, whose memory is measured."""
LEAST_RATIO = 0.95
MOST_MEGABYTES = 150
Figures = dict[str, Any]


def tell(number: int, name: str, figures: Figures) -> None:
    keys = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    shown = ", ".join(f"{key} {figures[key]:.2f}" for key in keys)
    print(f"round {number + 1}: {name}: {shown}, clients {figures['client_cpu_share']:.0%} of a core", file=sys.stderr)


def middle(rounds: Sequence[Figures], key: str) -> float:
    return float(statistics.median(each[key] for each in rounds))


def show(report: Figures) -> None:
    """The tables: what has a target, then times by load."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    goals = Table("case", "median", "min-max", "target", "", title="kvern serve")
    if rounds := report.get("offline"):
        for way, share, what in (("http", "ratio", "streamed"), ("at_once", "at_once_ratio", "answers at once")):
            low, high = min(each[share] for each in rounds), max(each[share] for each in rounds)
            ratio = middle(rounds, way) / middle(rounds, "offline")
            speeds = f"{middle(rounds, way):,.0f} of {middle(rounds, 'offline'):,.0f} tokens/s: {ratio:.1%}"
            goals.add_row(
                f"over HTTP, {what}, of the same work offline",
                speeds,
                f"{low:.1%}-{high:.1%}",
                f">= {LEAST_RATIO:.0%}",
                _verdict(ratio >= LEAST_RATIO),
            )
    if rounds := report.get("memory"):
        for key, what in (("idle", "idle_connections"), ("waiting", "waiting_streams")):
            values = [each[f"{key}_megabytes"] for each in rounds]
            count = min(each[what] for each in rounds)
            goals.add_row(
                f"{count} {what.replace('_', ' ')}",
                f"{statistics.median(values):.0f} MB",
                f"{min(values):.0f}-{max(values):.0f}",
                f"{CONNECTIONS}, < {MOST_MEGABYTES} MB",
                _verdict(statistics.median(values) < MOST_MEGABYTES and count >= CONNECTIONS),
            )
    loads = Table("load", "requests/s", "tokens/s", "TTFT ms p50 / p99", "ITL ms p50 / p99", "cached", title="loads")
    for name, rounds in {**report.get("workloads", {}), **report.get("http", {})}.items():
        share = statistics.median((each["cached_input_tokens"] or 0) / each["total_input_tokens"] for each in rounds)
        loads.add_row(
            name,
            f"{middle(rounds, 'request_throughput'):.2f}",
            f"{middle(rounds, 'output_throughput'):,.0f}",
            *(
                f"{middle(rounds, f'median_{key}_ms'):,.1f} / {middle(rounds, f'p99_{key}_ms'):,.1f}"
                for key in ("ttft", "itl")
            ),
            f"{share:.0%}",
        )
    for table in (goals, loads):
        if table.row_count:
            console.print(table)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"
