"""Five loads, each of which shows one thing that an inference engine does. Sizes follow the model's longest sequence.

A workload is a coroutine that sends what it needs and returns its parts by name, in their order.
"""

import math
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvern.bench.serving import LoadRun, Sample, Sender, arrival_times
from kvern.bench.serving_data import Prompts, random_samples

LONGEST = 16384
"""Models may hold longer sequences: a workload does not use more."""
OVERLAP = 0.7
"""Of the time that decodes take alone: within it, long prompts arrive."""


@dataclass(frozen=True)
class Setting:
    """What a workload works with. `requests` and `rate` replace its own number and rate if they are given."""

    sender: Sender
    prompts: Prompts
    max_model_len: int
    requests: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    def tokens(self, share: float, most: int = LONGEST) -> int:
        """A share of the longest sequence."""
        return min(most, max(1, int(share * min(self.max_model_len, LONGEST))))

    def arrivals(self, count: int, rate: float) -> list[float]:
        """Arrival times at the workload's own rate or the one that replaces it."""
        return arrival_times(count, self.rate or rate, self.burstiness, self.prompts.rng)


Loads = dict[str, LoadRun]


async def baseline(setting: Setting) -> Loads:
    """One request at a time, short in and out: what an answer takes when nothing competes with it."""
    samples = random_samples(
        setting.prompts, setting.requests or 16, setting.tokens(1 / 16, 128), setting.tokens(1 / 32, 64)
    )
    return {"one at a time": await setting.sender.run(samples, concurrency=1)}


async def continuous_batching(setting: Setting) -> Loads:
    """Requests of very different output lengths, arriving at random: none should wait for the longest."""
    draw, count = setting.prompts, setting.requests or 64
    longest = setting.tokens(1 / 4, 512)
    samples = [
        draw.sample(
            draw.tokens(setting.tokens(1 / 16, 256)),
            round(math.exp(draw.rng.uniform(math.log(min(4, longest)), math.log(longest)))),
        )
        for _ in range(count)
    ]
    return {"arriving": await setting.sender.run(samples, setting.arrivals(count, 8.0))}


async def paged_attention(setting: Setting) -> Loads:
    """Long contexts of different lengths, all at once: as many run together as the cache's memory holds."""
    draw = setting.prompts
    low, high, written = setting.tokens(1 / 4), setting.tokens(3 / 4), setting.tokens(1 / 8, 256)
    samples = [draw.sample(draw.tokens(draw.rng.randint(low, high)), written) for _ in range(setting.requests or 32)]
    return {"all at once": await setting.sender.run(samples)}


async def chunked_prefill(setting: Setting) -> Loads:
    """Long prompts that arrive amid running decodes: what the decodes' time between tokens suffers."""
    draw, count = setting.prompts, setting.requests or 8

    def decodes() -> list[Sample]:
        return [
            draw.sample(draw.tokens(setting.tokens(1 / 32, 64)), setting.tokens(1 / 4, 512), "decode")
            for _ in range(count)
        ]

    alone = await setting.sender.run(decodes())
    usual = statistics.median([outcome.e2el for outcome in alone.outcomes]) or 1.0
    prompts = [
        draw.sample(draw.tokens(setting.tokens(3 / 4)), setting.tokens(1 / 64, 8), "prompt") for _ in range(count)
    ]
    arrivals = setting.arrivals(count, count / (OVERLAP * usual))
    both = await setting.sender.run([*decodes(), *prompts], [0.0] * count + arrivals)
    return {"decodes alone": alone, "decodes": both.of("decode"), "long prompts": both.of("prompt")}


async def prefix_caching(setting: Setting) -> Loads:
    """Requests behind a long prefix: each behind one of its own, then all behind the same that is already cached."""
    draw, count = setting.prompts, setting.requests or 16
    long, short, written = setting.tokens(1 / 2, 4096), setting.tokens(1 / 64, 32), setting.tokens(1 / 64, 16)
    cold = await setting.sender.run(random_samples(draw, count, long + short, written))
    first, *others = random_samples(draw, count + 1, short, written, prefix_tokens=long)
    await setting.sender.run([first])
    return {"cold": cold, "warm": await setting.sender.run(others)}


WORKLOADS: dict[str, Callable[[Setting], Awaitable[Loads]]] = {
    workload.__name__: workload
    for workload in (baseline, continuous_batching, paged_attention, chunked_prefill, prefix_caching)
}
