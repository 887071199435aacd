"""Five loads that each show one ability of an inference engine. Sizes follow the model's longest sequence.

A workload is a coroutine that sends its requests and returns its parts by name, in order.
"""

import math
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvern.bench.serving import LoadRun, Sample, Sender, arrival_times
from kvern.bench.serving_data import Prompts, random_samples

LONGEST = 16384
"""The limit of a sequence, even if the model allows longer ones."""
OVERLAP = 0.7
"""The share of the time of the decodes alone in which long prompts arrive."""


@dataclass(frozen=True)
class LoadSettings:
    """The settings of a workload. `requests` and `rate` replace its own number and rate if they are given."""

    sender: Sender
    prompts: Prompts
    max_model_len: int
    requests: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    def tokens(self, share: float, most: int = LONGEST) -> int:
        """Returns a share of the longest sequence."""
        return min(most, max(1, int(share * min(self.max_model_len, LONGEST))))

    def arrivals(self, count: int, rate: float) -> list[float]:
        """Returns arrival times at `rate`, or at the setting's own rate."""
        return arrival_times(count, self.rate or rate, self.burstiness, self.prompts.rng)


Loads = dict[str, LoadRun]


async def baseline(setting: LoadSettings) -> Loads:
    """One short request at a time: the time of an answer without competition."""
    samples = random_samples(
        setting.prompts, setting.requests or 16, setting.tokens(1 / 16, 128), setting.tokens(1 / 32, 64)
    )
    return {"one at a time": await setting.sender.run(samples, concurrency=1)}


async def continuous_batching(setting: LoadSettings) -> Loads:
    """Requests with very different output lengths that arrive at random: none should wait for the longest."""
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


async def paged_attention(setting: LoadSettings) -> Loads:
    """Long contexts of different lengths, all at once: the cache's memory limits how many run together."""
    draw = setting.prompts
    low = setting.tokens(1 / 4)
    high = setting.tokens(3 / 4)
    written = setting.tokens(1 / 8, 256)
    samples = [draw.sample(draw.tokens(draw.rng.randint(low, high)), written) for _ in range(setting.requests or 32)]
    return {"all at once": await setting.sender.run(samples)}


async def chunked_prefill(setting: LoadSettings) -> Loads:
    """Long prompts that arrive during decodes: the effect on the decodes' time between tokens."""
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


async def prefix_caching(setting: LoadSettings) -> Loads:
    """Requests with a long prefix: each with its own, then all with the same cached one."""
    draw, count = setting.prompts, setting.requests or 16
    long = setting.tokens(1 / 2, 4096)
    short = setting.tokens(1 / 64, 32)
    written = setting.tokens(1 / 64, 16)
    cold = await setting.sender.run(random_samples(draw, count, long + short, written))
    first, *others = random_samples(draw, count + 1, short, written, prefix_tokens=long)
    await setting.sender.run([first])
    return {"cold": cold, "warm": await setting.sender.run(others)}


WORKLOADS: dict[str, Callable[[LoadSettings], Awaitable[Loads]]] = {
    workload.__name__: workload
    for workload in (baseline, continuous_batching, paged_attention, chunked_prefill, prefix_caching)
}
