"""Runs of one load under several conditions, with the same random numbers for each."""

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvern.engine.queues import POLICIES
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.simulate.engine import DrivenEngine, EngineSizes, PaceSizes, Prompts, check_load, simulated_engine
from kvern.simulate.executor import Price
from kvern.simulate.fleet import ROUTERS, Fleet
from kvern.simulate.prediction import predicted
from kvern.simulate.report import Slo, by_tenant, figures, series
from kvern.simulate.shards import Outcome, Part, differences, divided, merged, run_parts, together
from kvern.simulate.splitting import SplitFleet, read_split, with_peers
from kvern.simulate.tier_options import with_tier

SIZED = "policy", "block_size", "max_batch_requests", "max_batch_tokens", "prefix_cache", "kv_cache_tokens"
COMPARED = *SIZED, "replicas", "router", "shards", "tier", "split"
"""Options that `resolved` knows, in the order in which they take effect: fields of `EngineSizes` and `Condition`."""
NONE = "none"
"""The value of `tier` and `split` for engines without."""


class Condition(msgspec.Struct, frozen=True):
    """Engines that are simulated: their sizes and pace, and what makes the price of their steps from a seed.

    `price`: without a seed nothing is drawn. `router`: how a request's engine is chosen; see `ROUTERS`.
    `shards`: groups of engines that are simulated apart.
    """

    sizes: EngineSizes
    price: Callable[[int | None], Price]
    pace: PaceSizes | None = None
    replicas: int = 1
    router: str = "server"
    shards: int = 1
    split: tuple[int, int] | None = None
    """The numbers of prefill and decode engines; None: all do both."""


def read_compared(text: str, base: Condition, options: Mapping[str, str]) -> dict[str, Condition]:
    """Reads NAME=VALUE,VALUE as conditions with these options that differ by that alone. Raises ConfigError."""
    name, _, listed = text.partition("=")
    name = name.strip().replace("-", "_")
    values = [value.strip() for value in listed.split(",")]
    if name not in COMPARED or len(values) < 2 or len(set(values)) < len(values):
        raise ConfigError(
            f"compare is {text!r:.80}: it must be a name and at least two values, like policy=fcfs,sjf; names are "
            f"{', '.join(COMPARED)}"
        )
    return {f"{name}={value}": resolved(base, {**options, name: value}) for value in values}


def resolved(base: Condition, options: Mapping[str, str]) -> Condition:
    """Returns a condition with options of `COMPARED`, given as text, from one whose engines are not divided.

    Raises ConfigError for wrong values, and for options that contradict each other.
    """
    found = base
    for name in COMPARED:
        if name in options and name not in ("tier", "split"):
            found = _changed(found, name, options[name])
    sizes, pace = found.sizes, found.pace
    if (tier := options.get("tier")) is not None:
        sizes = with_tier(sizes, () if tier == NONE else tier.split("+"))
    split, replicas = None, found.replicas
    if (given := options.get("split", NONE)) != NONE:
        split = read_split(given)
        _check_split(found, options, sum(split))
        sizes, replicas = with_peers(sizes), sum(split)
    if sizes.tier is not None:
        if not sizes.prefix_cache:
            shown = tier or "+".join(store.name for store in sizes.tier.stores)
            raise ConfigError(
                f"kv_tier is {shown!r:.80} and the prefix cache is off: pages are parts of it; turn prefix_cache on, "
                "or let the tier be none"
            )
        if pace is None:  # engines with stores know what computing takes
            pace = predicted(base.price(None), has_target=False)
    return msgspec.structs.replace(found, sizes=sizes, pace=pace, split=split, replicas=replicas)


def _changed(base: Condition, name: str, value: str) -> Condition:
    """Returns a condition with another value of a field, or of one of its sizes. Raises ConfigError."""
    sizes = base.sizes
    wanted: bool | str | int = value
    try:
        if name not in ("policy", "router"):
            wanted = {"on": True, "off": False}[value] if name == "prefix_cache" else int(value)
    except (KeyError, ValueError):
        kind = "on or off" if name == "prefix_cache" else "a number"
        raise ConfigError(f"{name} is {value!r:.40}: it must be {kind}") from None
    if name == "policy" and wanted not in POLICIES:
        raise ConfigError(f"policy is {value!r:.40}: there are {', '.join(POLICIES)}")
    if isinstance(wanted, int) and wanted < 1 and name != "prefix_cache":
        raise ConfigError(f"{name} is {wanted}: it must be at least 1")
    if name == "router" and wanted not in ROUTERS:
        raise ConfigError(f"router is {value!r:.40}: there are {', '.join(ROUTERS)}")
    if name not in SIZED:
        return msgspec.structs.replace(base, **{name: wanted})
    changes: dict[str, Any] = {name: wanted}
    if name == "block_size":
        changes["blocks"] = sizes.blocks * sizes.block_size // int(value)
    if name == "kv_cache_tokens":
        changes = {"blocks": max(1, int(value) // sizes.block_size)}
    return msgspec.structs.replace(base, sizes=msgspec.structs.replace(sizes, **changes))


def _check_split(base: Condition, options: Mapping[str, str], engines: int) -> None:
    """Raises ConfigError if other options contradict the division into so many engines."""
    given = f"split is {options['split']}"
    if base.replicas != engines and (base.replicas > 1 or "replicas" in options):
        raise ConfigError(f"{given}, and replicas is {base.replicas}: leave it out, or make it {engines}")
    if not base.sizes.prefix_cache:
        raise ConfigError(f"{given}, which needs the prefix cache, which is off: turn prefix_cache on")
    if options.get("tier") == NONE:
        raise ConfigError(f"{given}, and the tier is none, where prefill engines leave pages: give host:SIZE")
    if base.shards > 1 or base.router != "server":
        raise ConfigError(
            "split divides engines by the server's own choice, and in one group: leave router and shards out"
        )


def run_once(
    condition: Condition, load: Sequence[LoadRequest], seed: int, slo: Slo, with_series: bool = False
) -> dict[str, Any]:
    """Returns the figures of one run, with those over time if wanted. Raises ConfigError if the load does not fit."""
    check_load(load, condition.sizes)
    dice = random.Random(f"engines {seed}")
    whole = Part([dice.getrandbits(32) for _ in range(condition.replicas)], [*load])
    simulate = partial(_simulated, condition, seed)
    if condition.shards == 1:
        return _figures(simulate(whole), slo, with_series)
    parts = divided(whole.seeds, load, condition.shards, seed)
    *outcomes, joint = run_parts([*parts, together(parts[:2])], simulate)
    found = _figures(merged(outcomes), slo, with_series)
    apart = _figures(merged(outcomes[:2]), {})
    return found | {"shards": {"groups": len(parts), "differences": differences(apart, _figures(joint, {}))}}


def _simulated(condition: Condition, seed: int, part: Part) -> Outcome:
    """Returns the outcome of engines that share requests."""
    engines = [simulated_engine(condition.sizes, condition.price(each), condition.pace) for each in part.seeds]
    collects = gc.isenabled()
    gc.disable()  # no cycles are lost in a run, and a search for some among millions of blocks is a fifth of its time
    try:
        return _outcome(condition, seed, engines, part.load)
    finally:
        for engine in engines:
            engine.forget()
        if collects:
            gc.enable()


def _outcome(condition: Condition, seed: int, engines: Sequence[DrivenEngine], load: Sequence[LoadRequest]) -> Outcome:
    handed = None
    if condition.split is None:
        Fleet(engines, condition.router, seed).run(load, Prompts())
        hits = sum(engine.hit_tokens for engine in engines)
        loaded = sum(engine.loaded_tokens for engine in engines)
    else:
        fleet = SplitFleet(engines, condition.split[0], seed)
        fleet.run(load, Prompts())
        hits, loaded = fleet.hit_tokens, fleet.loaded_tokens
        handed = fleet.handed
    return Outcome(
        [engine.timeline for engine in engines],
        [engine.executor.busy for engine in engines],
        hits,
        None if condition.sizes.tier is None else loaded,
        sum(engine.scheduler.preemption_count for engine in engines),
        handed,
    )


def _figures(outcome: Outcome, slo: Slo, with_series: bool = False) -> dict[str, Any]:
    timelines = outcome.timelines
    found = figures(timelines, slo, outcome.hits, outcome.used)
    found["preemptions"] = outcome.preemptions
    if outcome.loaded is not None:
        found["tier_hit_share"] = outcome.loaded / found["prompt_tokens"]
    if outcome.handed is not None:
        found["handed_share"] = outcome.handed / found["requests"]
    if with_series:
        found["series"] = series(timelines, outcome.used)
    tenants = by_tenant(timelines, slo)
    return found | ({"tenants": tenants} if tenants else {})
