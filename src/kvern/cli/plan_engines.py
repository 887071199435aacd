"""``kvern plan --workload``: the fewest engines with which a simulated load keeps to its limits."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from kvern.cli.output import make_table, print_lines, print_tables, refuse
from kvern.cli.simulate import described, loaded, recorded
from kvern.errors import ConfigError

if TYPE_CHECKING:
    from kvern.simulate.sizing import Sized
    from kvern.simulate.study import Condition

    Engines = dict[str, tuple[Condition, int, int]]
    """By name the condition of an engine, its cards, and how many of them there may be."""

SHOWN = {"p99_ttft_ms": "TTFT ms p99", "p99_itl_ms": "ITL ms p99", "tokens_per_second": "tokens/s"}


@dataclass(frozen=True)
class Asked:
    """The options of `kvern plan` that count with --workload; see there."""

    model: str
    hardware: str | None
    workload: str
    slo: str | None
    good: float
    record: Path | None
    roofline: bool
    most_replicas: int
    compare: tuple[str, ...]
    seeds: int
    json: bool
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: Literal["fp8", "int8", "int4"] | None = None
    dtype: Literal["auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32"] = "auto"


def plan_engines(command: Asked) -> int:
    """Prints the choice with what limits it and what came next; returns the exit code. Raises KvernError."""
    from kvern.simulate.report import read_slo
    from kvern.simulate.sizing import size
    from kvern.simulate.tier_options import told

    slo = read_slo(command.slo)
    if not slo:
        raise ConfigError("workload needs limits that answers are to keep to: give --slo, like ttft=500ms,itl=20ms")
    if not 0 < command.good <= 1:
        raise ConfigError(f"good is {command.good:g}: it must be a share above 0, and at most 1")
    engines, basis, lacking = _engines(command)
    engines = _alternatives(engines, command.compare)
    stores = dict.fromkeys(line for condition, _, _ in engines.values() for line in told(condition.sizes))
    basis = "; ".join((basis, *stores))
    loads = [(seed, loaded(command.workload, seed)) for seed in range(command.seeds)]
    found = size(engines, loads, slo, command.good)
    found = msgspec.structs.replace(found, left_out=[*lacking, *found.left_out])
    if command.json:
        sys.stdout.write(json.dumps({"basis": basis, **msgspec.to_builtins(found)}, indent=1) + "\n")
        return 0
    table = make_table(
        "engines", "cards", "good, worst run", *SHOWN.values(), "use", title=f"kvern plan: {command.workload}"
    )
    for sized in (found.chosen, found.fewer, *found.others, *found.short):
        if sized is not None:
            table.add_row(*_row(sized))
    print_tables(table)
    print_lines(*found.verdict(command.good), f"Based on {basis}.")
    return 0


def _alternatives(engines: Engines, compared: Sequence[str]) -> Engines:
    """Returns each engine with each combination of tiers and splits that are compared. Raises ConfigError."""
    from kvern.simulate.study import NONE, resolved

    values: dict[str, list[str]] = {}
    for text in compared:
        name, _, listed = text.partition("=")
        found = [value.strip() for value in listed.split(",")]
        if name not in ("tier", "split") or name in values or len(set(found)) < len(found) or not all(found):
            raise ConfigError(
                f"compare is {text!r:.80}: it must be tier=none,host:64GB or split=none,1+3, each at most once"
            )
        values[name] = found
    several: Engines = {}
    for name, (condition, cards, most) in engines.items():
        for chosen in product(*values.values()):
            options = {key: value for key, value in zip(values, chosen, strict=True) if value != NONE}
            if condition.sizes.tier is not None and "tier" in values and "split" not in options:
                options.setdefault("tier", NONE)
            told = ", ".join(f"{key} {value}" for key, value in options.items() if value != NONE)
            several[f"{name}, {told}" if told else name] = resolved(condition, options), cards, most
    return several


def _row(sized: Sized) -> list[str]:
    figures = ["–" if math.isnan(mean := sized.mean(name)) else f"{mean:,.1f}" for name in SHOWN]
    cards = str(sized.cards or "")
    return [
        sized.name,
        cards,
        f"{sized.good_share:.1%}",
        *figures,
        f"{sized.mean('use'):.0%}",
    ]


def _engines(command: Asked) -> tuple[Engines, str, list[str]]:
    """Returns the engines that there may be, what their steps' costs are based on, and what the model does not fit."""
    if (command.record is None) == (not command.roofline):
        raise ConfigError("workload is simulated with --record FILE of kvern bench steps, or with --roofline: give one")
    if command.record is not None:
        refuse(command, Asked, ("load_format", "quantization", "dtype"), "--record says what its steps were of")
        condition, basis, hardware = recorded(command.record, command.model, command.hardware)
        counted = re.match(r"(\d+)x ", hardware)  # a CPU has none
        return {hardware: (condition, int(counted[1]) if counted else 0, command.most_replicas)}, basis, []
    from kvern.config import EngineConfig
    from kvern.planning.estimate import Workload
    from kvern.planning.hardware import names_of, parse_hardware, this_machine
    from kvern.simulate.roofline import estimated_condition, left_out

    config = EngineConfig(load_format=command.load_format, quantization=command.quantization, dtype=command.dtype)
    config = config if command.hardware is None else replace(config, device="cuda")
    model, config = described(command.model, config)
    cards = this_machine(config, model.dtype) if command.hardware is None else parse_hardware(command.hardware)
    engines: Engines = {}
    reasons: dict[str, str] = {}
    for count in (number for number in range(1, len(cards) + 1) if len(cards) % number == 0):
        try:
            condition, best = estimated_condition(model, cards[:count], Workload())
        except ConfigError as error:
            reasons[f"engines of {count} card{'s' * (count > 1)}"] = str(error)
            continue
        engines[f"{cards[0].name} ({best.split})"] = condition, count, len(cards) // count
    if not engines:
        raise ConfigError(next(iter(reasons.values())))
    told = f"estimates: {command.model} on {names_of(cards)}", "no step of it was measured"
    return engines, "; ".join((*told, *left_out(model))), [f"{name}: {why}" for name, why in reasons.items()]
