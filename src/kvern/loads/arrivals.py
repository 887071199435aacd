"""Times at which requests arrive at random."""

import math
import random
from collections.abc import Iterator

from kvern.errors import ConfigError

LEAST_RATE = 1e-6
BURSTINESS = 1e-3, 1e6
"""Limits within which numbers of the gamma distribution stay numbers."""


def arrivals(
    rng: random.Random,
    rate: float,
    burstiness: float = 1.0,
    later: float | None = None,
    ramp: float = 0.0,
    name: str = "request_rate",
) -> Iterator[float]:
    """Yields times in seconds without end; the gaps between them have a gamma distribution. Raises ConfigError.

    A burstiness of 1 is a Poisson process; below, requests come in bursts; above, more evenly. The rate, in requests a
    second, goes to `later` within `ramp` seconds, if that is given. It is the mean of many draws: one of n gaps
    deviates from it by some 1 / sqrt(n * burstiness) of it. `name` is the rate's in errors.
    """
    last = rate if later is None else later
    for value in (rate, last):
        if not value >= LEAST_RATE:
            raise ConfigError(f"{name} is {value:g}: it must be at least {LEAST_RATE:g}, or inf")
    low, high = BURSTINESS
    if not low <= burstiness <= high:
        raise ConfigError(f"burstiness is {burstiness:g}: it must be between {low:g} and {high:g}")
    return _times(rng, rate, burstiness, last, ramp)


def _times(rng: random.Random, rate: float, burstiness: float, last: float, ramp: float) -> Iterator[float]:
    slope = (last - rate) / (2 * ramp) if ramp else 0.0
    until = (rate + last) * ramp / 2
    """Requests that are expected before the last rate is reached."""
    expected = 0.0
    while True:
        if rate == math.inf:
            yield 0.0
            continue
        expected += rng.gammavariate(burstiness, 1 / burstiness)
        if expected >= until:
            yield ramp + (expected - until) / last
        else:
            yield 2 * expected / (rate + math.sqrt(rate * rate + 4 * slope * expected))
