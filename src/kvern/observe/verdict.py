"""The verdict on an engine: the cause of most of its time, the evidence in numbers, and the action that helps most."""

from collections import deque
from typing import NamedTuple

from kvern.request.events import CAUSES, EngineStatistics

WINDOW = 20.0
"""The seconds of the engine that a verdict is about."""
LEAST = 5.0
"""The fewest seconds, after a start."""
IDLE = CAUSES.index("idle")
EVERY = 1.0
"""The engine's seconds between two looks."""
LEAD = 0.1
"""The share by which a cause must be ahead of the present one, so that two of like size do not alternate."""
SAYS = {
    "weights": (
        "decode reads weights{speed}, for {requests:.1f} requests a step",
        "only more requests a step, fewer bits or a second card make it faster",
    ),
    "keys": (
        "decodes of {requests:.1f} requests a step read keys and values{speed}",
        "shorter contexts, --kv-cache-dtype fp8 or a second card make it faster",
    ),
    "products": (
        "steps multiply{speed}, {tokens:.0f} tokens a step of which {prompts:.0%} are of prompts",
        "weights in 8 bits or a second card make it faster, and prompts that begin alike spare it",
    ),
    "collectives": (
        "cards exchange sums, {tokens:.0f} tokens a step",
        "fewer cards for each replica and more replicas (--data-parallel-size) make it faster",
    ),
    "step": (
        "steps of {requests:.1f} requests run, whose parts are not estimated here",
        "kvern profile shows which part of them takes longest",
    ),
    "host": (
        "the device waits for the engine's process, {steps:.0f} steps a second",
        "more requests a step, or a faster processor with fewer other programs, make it faster",
    ),
    "blocks": (
        "requests wait for blocks of the KV cache, of which {usage:.0%} are in use",
        "more --kv-cache-tokens or --gpu-memory-share, --kv-cache-dtype fp8 or a second card let more of them run",
    ),
    "rows": (
        "{waiting} requests wait while {running} run, as many as may",
        "a higher --max-batch-requests lets more of them run",
    ),
    "adapter": (
        "requests wait for a place of their adapter",
        "more --max-adapters let more of them run",
    ),
    "batch": (
        "requests wait until the batch has ended",
        "--batching continuous lets them run at once",
    ),
    "tier": (
        "requests wait for keys and values from a KV tier",
        "a faster store, or one that is nearer, makes them come sooner",
    ),
    "images": (
        "requests wait for images to be decoded",
        "smaller images or more cores make them come sooner",
    ),
    "grammar": (
        "requests wait for their grammars to be prepared",
        "smaller schemas, or the same ones again, make them come sooner",
    ),
    "idle": ("there are no requests", "there is room for more"),
}
"""Evidence and action of each cause."""
AGAIN = 0.1
"""The share of tokens that were computed before from which on the verdict on `products` says so."""
SAYS_AGAIN = (
    "{again:.0%} of them computed before",
    "more --kv-cache-tokens or --gpu-memory-share, or --kv-tier host:SIZE, spare what is computed again",
)
"""Its evidence in addition, and its action instead."""


class Verdict(NamedTuple):
    """The cause of the largest part of a time."""

    cause: str
    share: float
    evidence: str
    action: str

    def __str__(self) -> str:
        return f"{self.evidence} ({self.share:.0%} of the time): {self.action}"


def judge(earlier: EngineStatistics, later: EngineStatistics, present: str | None = None) -> Verdict | None:
    """Returns the verdict on the time between two statistics of an engine; None if its seconds are not counted.

    The cause of the `present` verdict stays until another is clearly ahead.
    """
    before = earlier.seconds or (0.0,) * len(later.seconds)
    spent = {cause: b - a for cause, a, b in zip(CAUSES, before, later.seconds, strict=False)}
    whole = sum(spent.values())
    if whole <= 0:
        return None
    cause = max(spent, key=lambda name: spent[name])
    if present is not None and spent[cause] < spent[present] + LEAD * whole:
        cause = present
    evidence, action = SAYS[cause]
    steps = later.steps - earlier.steps
    tokens = later.computed_tokens - earlier.computed_tokens
    again = (later.recomputed_tokens - earlier.recomputed_tokens) / max(tokens, 1)
    if cause == "products" and again >= AGAIN:
        evidence, action = f"{evidence}, {SAYS_AGAIN[0]}", SAYS_AGAIN[1]
    said = evidence.format(
        speed=_speed(cause, earlier, later),
        requests=(later.scheduled - earlier.scheduled) / max(steps, 1),
        tokens=tokens / max(steps, 1),
        prompts=(later.prefill_tokens - earlier.prefill_tokens) / max(tokens, 1),
        again=again,
        steps=steps / whole,
        usage=later.kv_cache_usage,
        waiting=later.waiting,
        running=later.running,
    )
    return Verdict(cause, spent[cause] / whole, said, action)


def _speed(cause: str, earlier: EngineStatistics, later: EngineStatistics) -> str:
    """Returns the part of the card's bandwidth or rate that was reached, in words; nothing if nobody knows."""
    computes = cause == "products"
    after, most, unit = (later.computing, later.rate, "FLOP/s") if computes else (later.reading, later.bandwidth, "B/s")
    before = (earlier.computing if computes else earlier.reading) or (0.0, 0.0)
    if not after or after[1] <= before[1]:
        return ""
    size, letter = (1e12, "T") if most >= 1e12 else (1e9, "G")
    return f" at {(after[0] - before[0]) / (after[1] - before[1]):.0%} of {most / size:.3g} {letter}{unit}"


class VerdictWatch:
    """The verdict on the last seconds of a running engine."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        self._seen: deque[tuple[float, EngineStatistics]] = deque()
        """Statistics, with the engine's seconds until then; of more than the window by one at most."""

    def hear(self, statistics: EngineStatistics) -> bool:
        """Takes the newest statistics, which must not change later; returns whether the cause is another now."""
        now = sum(statistics.seconds)
        if self._seen:
            last, before_it = self._seen[-1]
            if now < last + EVERY:
                return False
            if _idle(statistics) - _idle(before_it) > WINDOW:  # it is told at once, after requests have come
                self.forget()
        self._seen.append((now, statistics))
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
        begun, earlier = self._seen[0]
        if now - begun < LEAST:
            return False
        before = None if self.verdict is None else self.verdict.cause
        self.verdict = judge(earlier, statistics, before)
        return self.verdict is not None and self.verdict.cause != before

    def forget(self) -> None:
        """Forgets what was, as it says nothing about the next seconds."""
        self._seen.clear()
        self.verdict = None


def _idle(statistics: EngineStatistics) -> float:
    return statistics.seconds[IDLE] if statistics.seconds else 0.0
