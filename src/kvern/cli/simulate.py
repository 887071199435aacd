"""``kvern simulate``: what a load would meet on engines that are not there."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from kvern.cli.output import check_least, make_table, print_lines, print_tables, say
from kvern.errors import ConfigError
from kvern.io.files import reason
from kvern.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvern.config import EngineConfig
    from kvern.loads.request import LoadRequest
    from kvern.planning.estimate import Model
    from kvern.simulate.study import Condition

ROWS = {
    "requests": ",.0f",
    "seconds": ",.1f",
    "requests_per_second": ",.2f",
    "tokens_per_second": ",.1f",
    "goodput": ",.2f",
    "good_share": ".1%",
    "cache_hit_share": ".1%",
    "tier_hit_share": ".1%",
    "handed_share": ".1%",
    "use": ".1%",
    "preemptions": ",.0f",
} | {f"p{percent}_{name}_ms": ",.1f" for name in ("ttft", "itl", "e2e") for percent in (50, 90, 99)}
GROWTH = 2.0
"""The factor by which the later half of requests waits longer where more come than engines answer."""
QUEUE = 1.0
"""The mean number of requests that wait for each engine, below which times grow by chance: later prompts are longer."""
SPREAD = 1.5
"""The factor between runs from which on a percentile is a matter of chance."""


@dataclass(frozen=True)
class SimulateCommand:
    """Run a load on engines without a model: the scheduler, cache and router of a server over a virtual clock.

    Steps cost what a record of `kvern bench steps` says or, with --roofline, what `kvern plan` estimates."""

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL")] = None
    """Name, folder, GGUF file, or hub id, whose headers --roofline reads; a record has its own."""
    load: str | None = None
    """File with the requests, one a line, as in Mooncake's traces, or what to draw: rate=2,requests=1000."""
    record: Path | None = None
    """Record of steps, written by `kvern bench steps`."""
    hardware: str | None = None
    """Cards of an engine, such as "2x h200"; with --record those that the record must be of."""
    roofline: bool = False
    """Take estimates where there is no record; the result is marked as one."""
    policy: str | None = None
    """Order of requests. None: the record's, or fcfs."""
    replicas: int = 1
    """Number of engines, among which requests are divided as a server divides them."""
    router: str = "server"
    """Choice of an engine: server, or for comparison least, random or round-robin."""
    shards: int = 1
    """Groups of engines that are simulated apart, in a process for each core; what that changes is told."""
    kv_cache_tokens: int | None = None
    """Tokens that fit the KV cache of an engine. None: the record's, or an estimate."""
    split: str | None = None
    """Engines that compute long prompts and those that answer, such as 1+3. None: all do both."""
    kv_tier: tuple[str, ...] = ()
    """Stores of the KV cache of each engine: host:SIZE or disk:SIZE, with ?bandwidth=6GB&latency=1ms if known; or none.

    Not given: those of the record."""
    compare: tuple[str, ...] = ()
    """Conditions beside each other, such as policy=fcfs,sjf or replicas=2,4."""
    slo: str | None = None
    """Limits of good answers, such as ttft=500ms,itl=20ms,e2e=5s; itl is an answer's mean time between tokens."""
    seed: int = 0
    """Seed of what is drawn: what the fit of steps leaves over, and the load unless it has a seed or is a file."""
    seeds: int = 5
    """Number of runs, with seeds that follow; figures are their mean, with the least and the greatest."""
    report: Path | None = None
    """HTML file for the table and plots: percentiles, rates over time, use of engines."""
    json: bool = False
    """Print the figures as JSON."""

    def execute(self) -> int:
        """Prints the figures and returns the exit code. Raises KvernError."""
        check_least(self, "seeds")
        if self.report is not None:
            from kvern.bench.record import check_target

            check_target(self.report, "report")
            if self.report.is_dir():
                raise ConfigError(f"report is {self.report}, a folder: name a file in it, such as report.html")
        from kvern.simulate.report import read_slo
        from kvern.simulate.study import read_compared, resolved, run_once
        from kvern.simulate.tier_options import told

        slo = read_slo(self.slo)
        if self.load is None:
            raise ConfigError(
                "there is nothing to simulate: give --load, a file or what to draw, like rate=2,requests=1000"
            )
        condition, basis = self._condition()
        options = self._options()
        conditions = {} if self.compare else {"": resolved(condition, options)}
        for text in self.compare:
            conditions |= read_compared(text, condition, options)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in conditions}
        for seed in range(self.seed, self.seed + self.seeds):
            load = loaded(self.load, seed)
            for name, each in conditions.items():
                found[name].append(run_once(each, load, seed, slo, self.report is not None))
        stores = dict.fromkeys(line for each in conditions.values() for line in told(each.sizes))
        basis = "; ".join((basis, *stores))
        if self.report is not None:
            _write(self.report, found, self.load, basis)
        if self.json:
            sys.stdout.write(json.dumps({"basis": basis, "runs": found}, indent=1) + "\n")
        else:
            _print(found, basis)
        return 0

    def _options(self) -> dict[str, str]:
        """Returns the options that were given and that a comparison can change, as text."""
        names = "policy", "replicas", "router", "shards", "kv_cache_tokens", "split"
        given = {name: getattr(self, name) for name in names}
        options = {name: str(value) for name, value in given.items() if value != getattr(SimulateCommand, name)}
        return options | ({"tier": "+".join(self.kv_tier)} if self.kv_tier else {})

    def _condition(self) -> tuple[Condition, str]:
        """Returns the engines that are simulated, and what their steps' costs are based on."""
        if self.record is not None and self.roofline:
            raise ConfigError("record and roofline exclude each other: steps cost what one of them says")
        if self.record is not None:
            condition, basis, _ = recorded(self.record, self.model, self.hardware)
            return condition, basis
        if not self.roofline:
            raise ConfigError(
                "nothing says what steps cost: give --record FILE of kvern bench steps, or --roofline for estimates"
            )
        from kvern.planning.estimate import Workload
        from kvern.planning.hardware import names_of, parse_hardware, this_machine
        from kvern.simulate.roofline import estimated_condition, left_out

        model, config = described(self.model)
        cards = this_machine(config, model.dtype) if self.hardware is None else parse_hardware(self.hardware)
        condition, best = estimated_condition(model, cards, Workload())
        told = f"an estimate: {self.model} on {names_of(cards)}, {best.split}", "no step of it was measured"
        return condition, "; ".join((*told, *left_out(model)))


def recorded(path: Path, model: str | None, hardware: str | None) -> tuple[Condition, str, str]:
    """Returns engines as a record says, what that is based on, and the hardware. Raises ConfigError."""
    from kvern.planning.hardware import same_hardware
    from kvern.simulate.costs import FittedPrice, fit_steps
    from kvern.simulate.records import read_steps
    from kvern.simulate.study import Condition

    record = read_steps(path)
    header = record.header
    if header.version != __version__:
        raise ConfigError(f"{path} is of kvern {header.version}, and this is {__version__}: record its steps anew")
    if hardware is not None and not same_hardware(hardware, header.hardware):
        raise ConfigError(f"{path} is of {header.hardware}, not of {hardware}: record steps there")
    if model not in (None, header.model):
        raise ConfigError(f"{path} is of the model {header.model}, not of {model}: record its steps")
    fit = fit_steps(record.samples, header.graph_tokens)
    basis = f"{header.model} on {header.hardware}: costs of {fit.steps} recorded steps; {fit.errors}"
    return Condition(header.sizes, lambda seed: FittedPrice(fit, seed), header.pace), basis, header.hardware


def described(name: str | None, options: EngineConfig | None = None) -> tuple[Model, EngineConfig]:
    """Returns a model by the headers of its files, for estimates, and the options with it. Raises KvernError."""
    from kvern.cli.models import outlines
    from kvern.config import EngineConfig
    from kvern.models.folder import model_folder
    from kvern.models.repository import outlined_model
    from kvern.planning.choice import model_of

    if name is None:
        raise ConfigError("roofline estimates a model's steps: name the model")
    config = dataclasses.replace(options or EngineConfig(), model=str(outlined_model(name, outlines())))
    return model_of(config, model_folder(config)), config


def loaded(text: str, seed: int) -> list[LoadRequest]:
    """Reads a load; one that is drawn, and says no seed, is another for each seed. Raises ConfigError."""
    from kvern.loads.source import is_drawn, read_load

    drawn = is_drawn(text) and "seed=" not in text
    return list(read_load(f"{text},seed={seed}" if drawn else text))


def _rows(found: dict[str, list[dict[str, Any]]]) -> list[tuple[str, list[str]]]:
    """Returns the rows of the table: names, with a cell for each condition, of what at least one of them has."""
    return [
        (row.replace("_", " "), [_cell([run[row] for run in runs if row in run], form) for runs in found.values()])
        for row, form in ROWS.items()
        if any(row in run for runs in found.values() for run in runs)
    ]


def _write(path: Path, found: dict[str, list[dict[str, Any]]], load: str, basis: str) -> None:
    """Writes the page. Raises ConfigError."""
    from kvern.bench.simulate_page import page

    try:
        path.write_text(page(found, _rows(found), load, basis), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report {path} cannot be written: {reason(error)}") from None
    say(f"report: {path}")


def _print(found: dict[str, list[dict[str, Any]]], basis: str) -> None:
    table = make_table("", *(name or "value" for name in found), title="kvern simulate")
    for name, cells in _rows(found):
        table.add_row(name, *cells)
    print_tables(table)
    print_lines(f"Based on {basis}.", *(line for name, runs in found.items() for line in _grouped(name, runs)))
    for name, runs in found.items():
        for line in doubts(runs):
            say(f"{name}: {line}" if name else line)


def doubts(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields why figures of runs with several seeds are none to count on."""
    growth = statistics.median(run["ttft_growth"] if run["waiting"] > QUEUE else 1.0 for run in runs)
    if growth > GROWTH:
        yield "requests come faster than engines answer them: times grow with the length of the load"
    for key in (f"p99_{each}_ms" for each in ("ttft", "itl", "e2e")):
        values = [run[key] for run in runs if run.get(key)]
        if values and max(values) > SPREAD * min(values):
            shown = key.replace("_", " ").removesuffix(" ms")
            yield (
                f"{shown} is an interval, not a number: runs differ by a factor of {max(values) / min(values):.1f}"
                + ("" if growth > GROWTH else "; a longer load narrows it")
            )


def _grouped(name: str, runs: list[dict[str, Any]]) -> Iterator[str]:
    """Yields what a simulation in groups changes: the greatest differences of all runs."""
    shards = [run["shards"] for run in runs if "shards" in run]
    if shards:
        told = []
        for key in shards[0]["differences"]:
            worst = max((each["differences"].get(key, 0.0) for each in shards), key=abs)
            told.append(f"{key.replace('_', ' ').removesuffix(' ms')} {worst:+.1%}")
        where = f"{name}: " if name else ""
        groups = shards[0]["groups"]
        yield f"{where}{groups} groups apart; two of them differ from the two together by: {', '.join(told)}."


def _cell(values: list[float], form: str) -> str:
    from kvern.simulate.report import interval

    if not values:
        return "–"
    mean, low, high = interval(values)
    told, least, most = (format(value, form) for value in (mean, low, high))
    return told if least == most else f"{told} ({least} to {most})"
