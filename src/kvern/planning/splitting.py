"""Estimates of engines of which some compute prompts and others answers, beside the same engines when each does both.

  both     an engine's time = prompts + decode steps; a step with a part of a prompt takes as long as both
  p + d    requests a second = the least of what p engines compute of prompts, what d engines decode, and what so many
           concurrent requests ask for; every handed prompt costs two copies of what its last step writes, and some
           tokens in the decode engine. Pages of the steps before are copied meanwhile, of models without windows and
           states

Requests come at random and wait for prompts before them as in a queue M/D/1. Decode engines compute short prompts. They
are estimates from the seconds of steps, without prefix hits, and without `--target-itl`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvern.cache.shared_prompt import before_last_part
from kvern.planning.estimate import Estimate, Model, Split, Workload, decode_seconds, prompt_seconds
from kvern.planning.hardware import Card
from kvern.runner.plan import BATCH_REQUESTS, BATCH_TOKENS

COPIED = 47e9
"""Bytes per second between a GPU and pinned host memory beside steps, one way, as measured on an H200 (PCIe 5)."""
SHORT_TOKENS = 256
"""The tokens of a short prompt; shorter ones are not handed over."""
REST_TOKENS = 64
"""The most tokens of a handed prompt that the decode engine computes."""
MOST_BUSY = 0.95
"""The largest share of time for which a queue's length is told."""
RARE = 0.01
"""The share of intervals between tokens beyond the 99th percentile."""
AS_MUCH = 0.97
"""The share of the rate that counts as equal."""
EVENER = 0.95
"""The share of the time between tokens up to which that counts as less."""
LATER = 1.25
"""The share of the time to the first token from which on that counts as more."""


@dataclass(frozen=True)
class Roles:
    """Estimates of engines of one split, `prefill` of which compute prompts for `decode` others; 0: each does both.

    `rate`: generated tokens per second of all. Seconds: `first_short` and `first_long` until the first token of a short
    prompt and of one of the workload, `between` tokens of an answer, the 99th percentile.
    """

    split: Split
    prefill: int
    decode: int
    rate: float
    first_short: float
    first_long: float
    between: float

    @property
    def name(self) -> str:
        """The numbers of engines, for people."""
        return f"{self.prefill} prefill + {self.decode} decode" if self.prefill else f"{self.decode} do both"


def roles(model: Model, card: Card, found: Sequence[Estimate], workload: Workload) -> list[Roles]:
    """Returns the estimates for the best split with several engines: first that each does both, then all divisions.

    It is empty if there is none, or if prompts are too short to be handed over. `found` is sorted, best first.
    """
    several = (item for item in found if item.split.data > 1 and item.split.pipeline == 1 and not item.lacks)
    best = next(several, None)
    if best is None or card.host or workload.input < SHORT_TOKENS:
        return []
    costs = _Costs(model, card, best, workload)
    engines = best.split.data
    return [costs.both(engines), *(costs.divided(prefill, engines - prefill) for prefill in range(1, engines))]


def advice(found: Sequence[Roles]) -> str:
    """Returns whether a division pays, and what it costs; the first of `found` is that each engine does both."""
    both, *divisions = found
    best = max(divisions, key=lambda item: (not _costs(item, both), item.rate))
    numbers = (
        f"--prefill-engines {best.prefill} --decode-engines {best.decode} would give "
        f"{abs(best.rate / both.rate - 1):.0%} {'more' if best.rate > both.rate else 'fewer'} tokens/s, "
        f"{1000 * best.between:.1f} ms between tokens (p99) in place of {1000 * both.between:.1f}, and first tokens "
        f"after {1000 * best.first_long:.0f} ms in place of {1000 * both.first_long:.0f}"
    )
    if best.between > EVENER * both.between:
        return f"Prefill engines do not pay by this estimate: {numbers}."
    if not (costs := _costs(best, both)):
        return f"Prefill engines pay by this estimate: {numbers}."
    return (
        f"Prefill engines cost {' and '.join(costs)} by this estimate: {numbers}. They pay only where tokens must come "
        "that evenly, and --target-itl does not bound them well enough."
    )


def _costs(divided: Roles, both: Roles) -> list[str]:
    """Names what is worse than with engines that do both."""
    worse = {
        "throughput": divided.rate < AS_MUCH * both.rate,
        "time to the first token": divided.first_long > LATER * both.first_long,
    }
    return [name for name, is_worse in worse.items() if is_worse]


class _Costs:
    """Seconds of the requests of a workload in an engine of a split."""

    def __init__(self, model: Model, card: Card, found: Estimate, workload: Workload) -> None:
        self._model = model
        self._card = card
        self._found = found
        self._split = found.split
        self._workload = workload
        self._prompt = self._computing(workload.input)
        self._steps = -(-workload.input // BATCH_TOKENS["cuda"])
        """Steps of a prompt."""

    def both(self, engines: int) -> Roles:
        """Each engine computes prompts and answers."""
        batch = self._found.batch
        decode = self._found.decode
        busy = batch * self._prompt / (batch * self._prompt + self._workload.output * decode)
        waits = self._queue(busy) + (1 - busy) * decode / 2
        often = batch * self._steps > RARE * self._workload.output
        return Roles(
            split=self._split,
            prefill=0,
            decode=engines,
            rate=self._found.rate,
            first_short=waits + self._computing(SHORT_TOKENS) + decode,
            first_long=waits + self._prompt + self._steps * decode,
            between=decode + (self._prompt / self._steps if often else 0.0),
        )

    def divided(self, prefill: int, decode: int) -> Roles:
        """Some engines compute prompts for others."""
        output = self._workload.output
        rest = self._computing(REST_TOKENS)
        copies = self._copies()
        most = min(BATCH_REQUESTS["cuda"], self._found.cache_tokens // (self._workload.input + output))
        step = self._decoding(1)
        batch = rate = there = 0.0
        for size in range(1, most + 1):
            slower = self._decoding(size)
            rate = decode * size / (output * slower + size * rest)
            total = rate * (self._prompt + copies) + decode * size
            share = min(1.0, (self._workload.requests - there) / (total - there))
            batch = size - 1 + share  # the share of the time in which there are so many, not one less
            step += share * (slower - step)
            there = total
            if share < 1 or rate * self._prompt >= prefill:
                break
        rate = decode * batch / (output * step + batch * rest)
        alone = self._prompt + copies + rest + output * step
        rate = min(rate, prefill / self._prompt, self._workload.requests / alone)
        waits = min(self._queue(rate * self._prompt / prefill), self._workload.requests / rate - alone)
        if rate * self._prompt >= MOST_BUSY * prefill:  # all that do not decode wait there
            waits = self._workload.requests / rate - alone
        return Roles(
            split=self._split,
            prefill=prefill,
            decode=decode,
            rate=rate * output,
            first_short=step / 2 + self._computing(SHORT_TOKENS) + step,
            first_long=max(waits, 0.0) + self._prompt + copies + rest + step,
            between=step + (rest if batch > RARE * output else 0.0),
        )

    def _copies(self) -> float:
        """The seconds from the last step of a prompt until its pages have come."""
        tokens, second = self._workload.input, COPIED / self._found.token_bytes
        last = tokens - before_last_part(tokens) or tokens
        spec = self._model.spec
        if last == tokens or self._model.state_bytes or any(item.window for item in spec.attentions):
            return 2 * tokens / second
        before = min(tokens - last, BATCH_TOKENS["cuda"])
        beside = self._prompt - self._computing(tokens - last)
        return max(last / second, 2 * before / second - beside) + last / second

    def _queue(self, busy: float) -> float:
        """The seconds that a prompt waits for those before it."""
        busy = min(busy, MOST_BUSY)
        return busy * self._prompt / (2 * (1 - busy))

    def _computing(self, tokens: int) -> float:
        return prompt_seconds(self._model, self._card, self._split, tokens, BATCH_TOKENS["cuda"])

    def _decoding(self, batch: int) -> float:
        middle = self._workload.input + self._workload.output // 2
        return decode_seconds(self._model, self._card, self._split, batch, middle)
