"""``kvern top``: what a running server does, in a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvern.cli.output import check_least, make_table, print_lines, print_tables
from kvern.cli.remote import RemoteServer, printable
from kvern.engine.step_ring import Step, read_steps
from kvern.errors import ConfigError, in_a_line

if TYPE_CHECKING:
    from rich.table import Table

PATIENCE = 5.0
"""Seconds until an answer must come."""
STEP_SECONDS = 20.0
"""The seconds before an engine's last step of which the steps are shown."""
STEP_COLUMNS = "steps", "s ago", "number", "p50 ms", "p99 ms", "rows", "tokens", "the last ones"
DRAWN, BARS = 40, "▁▂▃▄▅▆▇█"
"""The number of steps that are drawn, and the bars."""
STATES: dict[float, str] = {0: "cold", 1: "asleep", 2: "awake"}
"""States of one of several models, as `kvern:model_state` counts them."""

READY = "not ready", "ready"


class EngineName(NamedTuple):
    """The labels of an engine's metrics; `engine` is empty where a model has one."""

    model: str
    engine: str


class OldRequest(msgspec.Struct):
    """One of the requests that are in a server longest."""

    id: str
    seconds: float = 0.0
    tokens: int = 0


class SaidVerdict(msgspec.Struct):
    """The cause of most of an engine's last seconds, in words."""

    evidence: str
    action: str
    share: float = 0.0


class SaidPart(msgspec.Struct):
    """A part of an engine's steps."""

    part: str
    seconds: float = 0.0
    share: float = 0.0
    bound_seconds: float | None = None


class SaidStep(msgspec.Struct):
    """The time of an engine's steps of one kind, by part."""

    step: str
    seconds: float = 0.0
    tokens: float = 0.0
    parts: list[SaidPart] = []


class EngineState(msgspec.Struct):
    """An engine in the answer of /v1/engines."""

    model: str
    engine: str = ""
    verdict: SaidVerdict | None = None
    oldest_requests: list[OldRequest] = []
    step_parts: list[SaidStep] = []
    steps_file: str | None = None


class SaidServer(msgspec.Struct):
    """A server that computes prompts for the one that is watched."""

    prefill_server: str
    ready: bool = False
    reason: str = ""
    running: int = 0
    computed_prompts: int = 0
    computed_tokens: int = 0
    failed_prompts: int = 0


class EngineStates(msgspec.Struct):
    """The answer of /v1/engines."""

    data: list[EngineState]
    prefill_servers: list[SaidServer] = []


@dataclass(frozen=True)
class Reading:
    """The figures of all engines at a time, by their names without `kvern:`."""

    time: float
    figures: dict[EngineName, dict[str, float]]
    told: Sequence[EngineState] = ()
    servers: Sequence[SaidServer] = ()


@dataclass(frozen=True)
class TopCommand:
    """Watch a running server: its engines, their queues and speed, what their time goes to, and the oldest requests.

    Ctrl-C ends it.
    """

    url: str = "http://127.0.0.1:8000"
    """URL of the server: http://host:port or https://host, with a prefix if it has one."""
    api_key: str | None = None
    """API key, sent as bearer token; of several keys one with admin=1 or metrics=1. None: OPENAI_API_KEY, if it is
    set."""
    interval: int = 1
    """Seconds between two looks."""
    once: bool = False
    """Print one look and end: with exit code 1 if the server does not answer. So it is without a terminal."""

    def execute(self) -> int:
        """Shows the server until Ctrl-C, and returns the exit code. Raises ConfigError for a wrong URL."""
        check_least(self, "interval")
        top = Top(RemoteServer(self.url, self.api_key, PATIENCE))
        try:
            if self.once or not sys.stdout.isatty():
                return self._print(top)
            self._watch(top)
        except KeyboardInterrupt:
            pass
        return 0

    def _print(self, top: Top) -> int:
        for wait in (self.interval, 0):
            top.look()
            if top.failure is not None:
                sys.stderr.write(f"kvern top: {top.failure}\n")
                return 1
            time.sleep(wait)  # rates need two looks
        print_tables(*top.tables())
        print_lines(*top.lines())
        return 0

    def _watch(self, top: Top) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        console = Console(markup=False, emoji=False, highlight=False)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                top.look()
                failure = [] if top.failure is None else [Text(f"{top.failure}; it is asked again", style="bold")]
                live.update(Group(*failure, *top.tables(), *map(Text, top.lines())), refresh=True)
                time.sleep(self.interval)


@dataclass
class Top:
    """The last two readings of a server."""

    server: RemoteServer
    failure: str | None = None
    """Why the last look brought nothing; what was seen before stays."""
    _seen: list[Reading] = field(default_factory=list)

    def look(self) -> None:
        """Reads the server's figures anew."""
        try:
            figures = read_figures(self.server.read("/metrics").decode(errors="replace"))
            states = read_states(self.server.read("/v1/engines"))
        except ConfigError as error:
            self.failure = printable(str(error))
            self._seen = self._seen[-1:]
            return
        self.failure = None
        self._seen = [*self._seen[-1:], Reading(time.monotonic(), figures, states.data, states.prefill_servers)]

    def tables(self) -> Iterator[Table]:
        """Yields the engines, and the oldest requests; nothing before the first reading."""
        if not self._seen:
            return
        title = f"{self.server.base_url}, {time.strftime('%H:%M:%S')}"
        names = "model", "state", "run", "wait", "in tok/s", "out tok/s", "KV", "hits", "GPU GB", "GPU"
        table = make_table(*names, title=title, words=("state",))
        before, now = self._seen[0], self._seen[-1]
        for name, figures in now.figures.items():
            table.add_row(*row_of(name, figures, before.figures.get(name, {}), now.time - before.time))
        yield table
        if now.servers:
            yield table_of_servers(now.servers)
        requests = make_table("oldest requests", "model", "seconds", "tokens", words=("model",))
        for one in now.told:
            for request in one.oldest_requests:
                cells = f"{request.seconds:.1f}", f"{request.tokens:,}"
                requests.add_row(printable(request.id), shown(one, now.told), *cells)
        if requests.rows:
            yield requests
        steps = make_table(*STEP_COLUMNS, words=("the last ones",))
        for one in now.told:
            if one.steps_file is not None:
                with suppress(OSError, ValueError):  # the engine has ended, or runs on another machine
                    if row := row_of_steps(read_steps(one.steps_file)):
                        steps.add_row(shown(one, now.told), *row)
        if steps.rows:
            yield steps
        for one in now.told:
            for kind in one.step_parts:
                yield table_of_parts(shown(one, now.told), kind)

    def lines(self) -> Iterator[str]:
        """Yields the verdict on each engine."""
        told = self._seen[-1].told if self._seen else ()
        for one in told:
            if (verdict := one.verdict) is not None:
                evidence = f"{verdict.evidence} ({verdict.share:.0%} of the time): {verdict.action}"
                yield printable(f"{shown(one, told)}: {evidence}")


def row_of_steps(steps: Sequence[Step]) -> list[str]:
    """Returns the cells of an engine's last seconds step by step, the time of each of the last ones drawn as a bar."""
    last = [step for step in steps if step.ended > steps[-1].ended - STEP_SECONDS]
    if not last:
        return []
    ordered = sorted(step.seconds for step in last)
    middle, late = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    drawn = [step.seconds for step in last[-DRAWN:]]
    height = (len(BARS) - 1) / max(*drawn, 1e-9)
    return [
        f"{time.monotonic() - last[-1].ended:.1f}",
        f"{len(last):,}",
        f"{1000 * middle:.2f}",
        f"{1000 * late:.2f}",
        f"{sum(step.rows for step in last) / len(last):.1f}",
        f"{sum(step.tokens for step in last) / len(last):.1f}",
        "".join(BARS[int(height * seconds)] for seconds in drawn),
    ]


def table_of_parts(name: str, kind: SaidStep) -> Table:
    """Returns where the time of an engine's steps of one kind goes, the longest part first."""
    steps = f"{printable(kind.step)} steps of {name}: {1000 * kind.seconds:.2f} ms, {kind.tokens:,.1f} tokens"
    table = make_table("part", "ms", "share", "bound ms", title=steps)
    for part in kind.parts:
        least = "" if part.bound_seconds is None else f"{1000 * part.bound_seconds:.3f}"
        table.add_row(printable(part.part), f"{1000 * part.seconds:.3f}", f"{part.share:.1%}", least)
    return table


def table_of_servers(servers: Sequence[SaidServer]) -> Table:
    """Returns the servers that compute prompts for the one that is watched, and what became of these."""
    words = ("state",)
    table = make_table("prefill server", "state", "run", "computed", "tokens", "failed", words=words)
    for one in servers:
        state = READY[True] if one.ready else f"{READY[False]}: {one.reason}"
        counts = one.running, one.computed_prompts, one.computed_tokens, one.failed_prompts
        table.add_row(printable(one.prefill_server), printable(state), *(f"{count:,}" for count in counts))
    return table


def shown(one: EngineState, told: Sequence[EngineState]) -> str:
    """Returns an engine's name: its model's, with its number if the model has several."""
    siblings = sum(other.model == one.model for other in told)
    return printable(f"{one.model} {one.engine}" if siblings > 1 else one.model)


def read_states(content: bytes) -> EngineStates:
    """Returns the states in an answer of /v1/engines. Raises ConfigError."""
    try:
        return msgspec.json.decode(content, type=EngineStates)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ConfigError(f"/v1/engines does not answer as kvern serve does: {in_a_line(error)}") from error


def read_figures(text: str) -> dict[EngineName, dict[str, float]]:
    """Returns the metrics of a text in Prometheus's format by engine, summed over other labels. Raises ConfigError."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[EngineName, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = EngineName(sample.labels.get("model_name", ""), sample.labels.get("engine", ""))
                figures, figure = found.setdefault(name, {}), sample.name.removeprefix("kvern:")
                if sample.name.startswith("kvern:") and "le" not in sample.labels:
                    figures[figure] = figures.get(figure, 0.0) + sample.value
    except Exception as error:  # the parser stumbles over text in many ways
        raise ConfigError(f"/metrics is not in Prometheus's format: {in_a_line(error)}") from error
    return {name: figures for name, figures in found.items() if {"engine_ready", "model_state"} & figures.keys()}


def row_of(name: EngineName, now: dict[str, float], before: dict[str, float], seconds: float) -> list[str]:
    """Returns the cells of an engine; those are empty of which nothing is known."""

    def grown(figure: str) -> float:
        return max(now.get(figure, 0.0) - before.get(figure, math.inf), 0.0)

    queried = grown("prefix_cache_queries_total")
    memory = "gpu_memory_used_bytes", "gpu_memory_total_bytes"
    used, total = (now.get(figure, 0.0) / 1e9 for figure in memory)
    ready = now.get("engine_ready", math.nan)
    state = STATES.get(now.get("model_state", 0), "") if math.isnan(ready) else READY[bool(ready)]
    return [
        printable(" ".join(name)),
        state,
        f"{now.get('num_requests_running', 0):.0f}",
        f"{now.get('num_requests_waiting', 0):.0f}",
        f"{grown('prompt_tokens_total') / seconds:,.0f}" if seconds else "",
        f"{grown('generation_tokens_total') / seconds:,.0f}" if seconds else "",
        f"{now.get('kv_cache_usage_perc', 0):.0%}",
        f"{grown('prefix_cache_hits_total') / queried:.0%}" if queried else "",
        f"{used:.0f} / {total:.0f}" if total else "",
        f"{now['gpu_utilization']:.0%}" if "gpu_utilization" in now else "",
    ]
