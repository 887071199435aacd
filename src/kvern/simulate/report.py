"""The figures of a simulation, or of a real engine under the same load."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvern.config import read_seconds
from kvern.errors import ConfigError
from kvern.simulate.timeline import PER_SECOND, Answer, Timeline, all_gaps, weighted_percentiles

PERCENTS = 50, 90, 99
LIMITS = "ttft", "itl", "e2e"
Slo = dict[str, float]


def read_slo(text: str | None) -> Slo:
    """Reads limits such as "ttft=500ms,itl=20ms" in seconds. Raises ConfigError."""
    found = {}
    for part in (text or "").split(","):
        name, _, value = part.strip().partition("=")
        if not part.strip():
            continue
        if name not in LIMITS or name in found:
            raise ConfigError(
                f"slo is {text!r:.80}: it must be limits like ttft=500ms,itl=20ms, of {', '.join(LIMITS)}"
            )
        found[name] = read_seconds(f"slo {name}", value)
        if not found[name]:
            raise ConfigError(f"slo {name} is {value!r}: no answer takes no time; give a limit like 500ms")
    return found


def is_good(answer: Answer, slo: Slo) -> bool:
    """True if an answer keeps to all limits; that of `itl` is for the mean time between its tokens."""
    return answer.ended and all(getattr(answer, name) <= limit for name, limit in slo.items())


def figures(timelines: Sequence[Timeline], slo: Slo, cached: int, used: Iterable[float]) -> dict[str, Any]:
    """Returns the figures of a run as JSON: times in milliseconds, rates per second.

    Those of `itl` are absent where no answer has a second token. `waiting` is the mean number of requests of an engine
    without a first token.

    `cached`: prompt tokens that came from caches. `used`: the seconds of steps of each engine.
    """
    answers = [answer for timeline in timelines for answer in timeline.answers.values()]
    begun, ended = min(answer.arrival for answer in answers), max(answer.last for answer in answers)
    seconds = max(ended - begun, 1e-9)
    generated, prompts = sum(answer.tokens for answer in answers), sum(answer.prompt for answer in answers)
    found: dict[str, Any] = {
        "requests": len(answers),
        "seconds": seconds,
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": generated / seconds,
        "prompt_tokens": prompts,
        "generated_tokens": generated,
        "cache_hit_share": cached / max(1, prompts),
        "use": sum(used) / (seconds * len(timelines)),
        "waiting": sum(answer.ttft for answer in answers) / (seconds * len(timelines)),
        "steps": sum(timeline.steps for timeline in timelines),
    }
    if slo:
        good = sum(is_good(answer, slo) for answer in answers)
        found |= {"goodput": good / seconds, "good_share": good / len(answers)}
        found |= {
            f"late_{name}": sum(getattr(answer, name) > limit for answer in answers) / len(answers)
            for name, limit in slo.items()
        }
    for name in ("ttft", "e2e"):
        values = [getattr(answer, name) for answer in answers]
        found |= _percentiles(name, [float(value) for value in np.percentile(values, PERCENTS)])
    found["ttft_growth"] = _growth(answers)
    if gaps := all_gaps(timelines):
        found |= _percentiles("itl", [gap / PER_SECOND for gap in weighted_percentiles(gaps, PERCENTS)])
    return found


def _growth(answers: Sequence[Answer]) -> float:
    """Returns the median time to the first token of the later half of requests, as a multiple of the earlier half's."""
    ordered = sorted(answers, key=lambda answer: answer.arrival)
    half = len(ordered) // 2
    if not half:
        return 1.0
    early, late = (float(np.median([each.ttft for each in part])) for part in (ordered[:half], ordered[half:]))
    return late / max(early, 1e-9)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}_{name}_ms": 1000 * value for percent, value in zip(PERCENTS, values, strict=True)}


def by_tenant(timelines: Sequence[Timeline], slo: Slo) -> dict[str, dict[str, Any]]:
    """Returns times and good shares of each tenant, if there are several."""
    groups: dict[str, list[Answer]] = {}
    for timeline in timelines:
        for answer in timeline.answers.values():
            groups.setdefault(answer.tenant, []).append(answer)
    found: dict[str, dict[str, Any]] = {}
    for tenant, answers in sorted(groups.items()) if len(groups) > 1 else ():
        told: dict[str, Any] = {"requests": len(answers)}
        for name in ("ttft", "e2e"):
            values = [getattr(answer, name) for answer in answers]
            told |= _percentiles(name, [float(value) for value in np.percentile(values, PERCENTS)])
        if slo:
            told["good_share"] = sum(is_good(answer, slo) for answer in answers) / len(answers)
        found[tenant] = told
    return found


BINS = 80
"""The parts of a run of which rates are told."""


def series(timelines: Sequence[Timeline], used: Sequence[float]) -> dict[str, list[float]]:
    """Returns rates and numbers of requests in equal parts of a run, and the use of each engine, the most used first.

    `edges`: seconds at which parts begin and end. `arrived` and `ended` are requests per second, `waiting` and
    `answering` mean numbers of them. `tokens` per second are those of answers, spread evenly over the time of each.
    """
    answers = [answer for timeline in timelines for answer in timeline.answers.values()]
    arrivals, firsts, lasts, tokens = (
        np.array([getattr(answer, name) for answer in answers]) for name in ("arrival", "first", "last", "tokens")
    )
    begun, ended = float(arrivals.min()), float(lasts.max())
    width = max(ended - begun, 1e-9) / BINS
    edges = begun + width * np.arange(BINS + 1)
    spans = np.maximum(lasts - firsts, 1e-9)

    def mean_change(sums: Callable[[float], float]) -> list[float]:
        found: list[float] = (np.diff([sums(float(edge)) for edge in edges]) / width).tolist()
        return found

    return {
        "edges": (edges - begun).tolist(),
        "arrived": (np.histogram(arrivals, edges)[0] / width).tolist(),
        "ended": (np.histogram(lasts, edges)[0] / width).tolist(),
        "tokens": mean_change(lambda edge: float((tokens * np.clip((edge - firsts) / spans, 0, 1)).sum())),
        "waiting": mean_change(lambda edge: float(np.clip(edge - arrivals, 0, firsts - arrivals).sum())),
        "answering": mean_change(lambda edge: float(np.clip(edge - firsts, 0, lasts - firsts).sum())),
        "use": sorted((seconds / (BINS * width) for seconds in used), reverse=True),
    }


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean of runs with several seeds, the least and the greatest."""
    return float(np.mean(values)), min(values), max(values)
