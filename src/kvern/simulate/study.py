"""Runs of one load under several conditions, with the same random numbers for each."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvern.engine.queues import POLICIES
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.simulate.engine import EngineSizes, PaceSizes, Prompts, check_load, simulated_engine
from kvern.simulate.executor import Price
from kvern.simulate.report import Slo, by_tenant, figures

COMPARED = "policy", "block_size", "max_batch_requests", "max_batch_tokens", "prefix_cache"
"""Conditions that `read_compared` knows: fields of `EngineSizes`."""


class Condition(msgspec.Struct, frozen=True):
    """Engines that are simulated: their sizes and pace, and what makes the price of their steps from a seed."""

    sizes: EngineSizes
    price: Callable[[int], Price]
    pace: PaceSizes | None = None


def read_compared(text: str, base: Condition) -> dict[str, Condition]:
    """Reads NAME=VALUE,VALUE as conditions that differ from `base` by that alone. Raises ConfigError."""
    name, _, listed = text.partition("=")
    name = name.strip().replace("-", "_")
    values = [value.strip() for value in listed.split(",")]
    if name not in COMPARED or len(values) < 2 or len(set(values)) < len(values):
        raise ConfigError(
            f"compare is {text!r:.80}: it must be a name and at least two values, like policy=fcfs,sjf; names are "
            f"{', '.join(COMPARED)}"
        )
    return {f"{name}={value}": changed(base, name, value) for value in values}


def changed(base: Condition, name: str, value: str) -> Condition:
    """Returns a condition with another value of a field of its sizes, given as text. Raises ConfigError."""
    sizes = base.sizes
    try:
        wanted = (
            {"on": True, "off": False}[value] if name == "prefix_cache" else value if name == "policy" else int(value)
        )
    except (KeyError, ValueError):
        kind = "on or off" if name == "prefix_cache" else "a number"
        raise ConfigError(f"{name} is {value!r:.40}: it must be {kind}") from None
    if name == "policy" and wanted not in POLICIES:
        raise ConfigError(f"policy is {value!r:.40}: there are {', '.join(POLICIES)}")
    if isinstance(wanted, int) and wanted < 1 and name != "prefix_cache":
        raise ConfigError(f"{name} is {wanted}: it must be at least 1")
    changes: dict[str, Any] = {name: wanted}
    if name == "block_size":
        changes["blocks"] = sizes.blocks * sizes.block_size // int(value)
    return msgspec.structs.replace(base, sizes=msgspec.structs.replace(sizes, **changes))


def run_once(condition: Condition, load: Sequence[LoadRequest], seed: int, slo: Slo) -> dict[str, Any]:
    """Returns the figures of one run. Raises ConfigError if the load does not fit."""
    check_load(load, condition.sizes)
    engine = simulated_engine(condition.sizes, condition.price(seed), condition.pace)
    engine.run(load, Prompts())
    timelines = [engine.timeline]
    found = figures(timelines, slo, engine.hit_tokens, [engine.executor.busy])
    found["preemptions"] = engine.scheduler.preemption_count
    tenants = by_tenant(timelines, slo)
    return found | ({"tenants": tenants} if tenants else {})
