"""A large fleet in groups, each simulated apart in a process, and what that makes of its figures.

requests --by conversation--> groups of engines, each behind a router of its own --> answers of all groups

A router of all engines would see more idle engines, and more that have a prefix cached. So the first two groups are
simulated together as well, and the differences of their figures to those of the two apart are told with the outcome.
"""

import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.simulate.timeline import Timeline, all_gaps

SHOWN = "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "p50_e2e_ms", "p99_e2e_ms", "cache_hit_share", "use"
"""Figures whose differences are told."""


class Part(NamedTuple):
    """Engines by the seeds of their prices, with their requests."""

    seeds: list[int]
    load: list[LoadRequest]


class Outcome(NamedTuple):
    """The outcome of some engines: the seconds of their steps, and sums of all engines.

    `hits`: prompt tokens that came from prefix caches; `loaded`: from tiers, None without any;
    `handed`: prompts that were computed for other engines, None where none is.
    """

    timelines: list[Timeline]
    used: list[float]
    hits: int
    loaded: int | None
    preemptions: int
    handed: int | None = None


Simulate = Callable[[Part], Outcome]
_simulate: Simulate | None = None
"""The function that a process of `run_parts` calls: it is inherited, since prices cannot be sent."""


def divided(seeds: Sequence[int], load: Sequence[LoadRequest], shards: int, seed: int) -> list[Part]:
    """Divides engines and requests into groups; those of a conversation stay together. Raises ConfigError.

    Groups without requests, whose engines are idle, are the last.
    """
    if shards > len(seeds):
        raise ConfigError(f"shards is {shards}, and there are {len(seeds)} engines: each group needs one")
    edges = [len(seeds) * number // shards for number in range(shards + 1)]
    parts = [Part([*seeds[first:end]], []) for first, end in itertools.pairwise(edges)]
    weights = [len(part.seeds) for part in parts]
    dice = random.Random(f"groups {seed}")
    chosen: dict[str, Part] = {}
    for request in load:
        part = chosen.get(request.session)
        if part is None:
            part = dice.choices(parts, weights)[0]
            if request.session:
                chosen[request.session] = part
        part.load.append(request)
    return sorted(parts, key=lambda part: not part.load)


def run_parts(parts: Sequence[Part], simulate: Simulate) -> list[Outcome]:
    """Simulates groups in as many processes as this one has cores."""
    global _simulate
    _simulate = simulate
    processes = min(len(parts), len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:  # a group's memory goes with its process
        found = pool.map(_run, parts, chunksize=1)
    _simulate = None
    return found


def _run(part: Part) -> Outcome:
    assert _simulate is not None
    outcome = _simulate(part)
    first, *others = outcome.timelines
    first.gaps = all_gaps(outcome.timelines)
    for timeline in others:
        timeline.gaps.clear()
    return outcome


def together(parts: Sequence[Part]) -> Part:
    """Returns groups as one, with the requests in order."""
    load = sorted((request for part in parts for request in part.load), key=lambda request: request.arrival)
    return Part([seed for part in parts for seed in part.seeds], load)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Returns the outcome of all engines."""
    loaded = [outcome.loaded for outcome in outcomes if outcome.loaded is not None]
    return Outcome(
        [timeline for outcome in outcomes for timeline in outcome.timelines],
        [seconds for outcome in outcomes for seconds in outcome.used],
        sum(outcome.hits for outcome in outcomes),
        sum(loaded) if loaded else None,
        sum(outcome.preemptions for outcome in outcomes),
    )


def differences(apart: dict[str, Any], joint: dict[str, Any]) -> dict[str, float]:
    """Returns by how much figures of groups apart differ from those of these together: shares of them, or points."""
    return {
        name: apart[name] - joint[name] if name in ("cache_hit_share", "use") else apart[name] / joint[name] - 1
        for name in SHOWN
        if joint.get(name)
    }
