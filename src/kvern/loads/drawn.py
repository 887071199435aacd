"""Loads drawn by chance from one line of properties, such as `rate=16,input=lognormal:1024:0.8,turns=uniform:1:6`.

The same line is the same load on every machine. Each property has random numbers of its own, so that another rate
changes arrivals and nothing else.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvern.config import read_seconds
from kvern.errors import ConfigError, did_you_mean
from kvern.loads.arrivals import arrivals
from kvern.loads.file import MOST_TOKENS
from kvern.loads.request import BLOCK_TOKENS, LoadRequest

Draw = Callable[[random.Random], int]
MOST_TURNS = 1000
LONGEST_TALK = 1 << 24
"""The limit of a conversation's tokens."""
MOST_CHOICES = 1_000_000
"""The limit of tenants and of the prefixes of each."""


@dataclass(frozen=True)
class Properties:
    """The properties of a load, as texts."""

    rate: str
    """Conversations that begin in a second; 4..32:60s goes from 4 to 32 within 60 s; inf: all at once."""
    requests: str = "1000"
    """Requests of all conversations; the last one may be cut."""
    burstiness: str = "1"
    """Shape of the gamma distribution of arrivals: 1 is Poisson, less is burstier."""
    input: str = "1024"
    """Tokens of a prompt beside its prefix and earlier turns: N, uniform:LOW:HIGH, or lognormal:MEAN:SIGMA:MOST, whose
    MOST may be left out."""
    output: str = "128"
    prefix: str = "0"
    """TOKENS:COUNT:ZIPF: each prompt begins with one of COUNT prefixes of its tenant, the k-th as often as k ** -ZIPF
    says."""
    turns: str = "1"
    """Requests of a conversation; each but the first begins with the prompt and the answer before."""
    think: str = "10s"
    """Mean time between two requests of a conversation, exponentially distributed."""
    tenants: str = "0"
    """COUNT:ZIPF: tenants that ask, the k-th as often as k ** -ZIPF says."""
    seed: str = "0"


def draw(text: str) -> Iterator[LoadRequest]:
    """Yields the requests of a load in order of arrival. Raises ConfigError before the first."""
    return _Load(_properties(text)).requests()


def _properties(text: str) -> Properties:
    given: dict[str, str] = {}
    known = Properties.__dataclass_fields__
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise ConfigError(f"load has {pair.strip()!r:.60}: it must be NAME=VALUE, with commas between")
        if name not in known:
            hint = did_you_mean(name, known) or f": there are {', '.join(known)}"
            raise ConfigError(f"load has {name!r:.60}, which is no property{hint}")
        if name in given:
            raise ConfigError(f"load has {name} twice: {given[name]} and {value}")
        given[name] = value
    if "rate" not in given:
        raise ConfigError("load has no rate: give the requests a second, as in rate=16, or rate=inf for all at once")
    return Properties(**given)


class _Load:
    """Draws conversations as they begin, and their turns with them."""

    def __init__(self, given: Properties) -> None:
        self._count = _whole("requests", given.requests)
        self._seed = _whole("seed", given.seed, 0)
        self._input = _lengths("input", given.input)
        self._output = _lengths("output", given.output)
        self._turns = _lengths("turns", given.turns)
        self._think = read_seconds("load's think", given.think)
        self._prefix_tokens, self._prefix, self._prefixes = _prefixes(given.prefix)
        self._tenant, self._tenants = _choice("tenants", given.tenants.split(":"))
        rate, _, ramp = given.rate.partition(":")
        first, dots, last = rate.partition("..")
        if bool(dots) != bool(ramp):
            raise ConfigError(f"load has rate={given.rate}: it must be like 16, inf, or 4..32:60s")
        rates = [_number("rate", part) for part in ([first, last] if dots else [first])]
        if dots and math.inf in rates:
            raise ConfigError(f"load has rate={given.rate}: a rate that changes must be finite")
        burstiness = _number("burstiness", given.burstiness)
        seconds = read_seconds("load's rate", ramp) if dots else 0.0
        self._starts = arrivals(self._rng("rate"), rates[0], burstiness, rates[-1], seconds, "load's rate")
        own = ("tenants", "prefix", "turns", "input", "output", "think")
        self._rngs = {name: self._rng(name) for name in own}
        shared = self._prefix_tokens // BLOCK_TOKENS * self._prefixes * max(1, self._tenants)
        self._fresh = itertools.count(shared)
        """The hashes of blocks that no other conversation has; those of prefixes are below."""

    def requests(self) -> Iterator[LoadRequest]:
        """Yields requests by arrival, those of a conversation in order."""
        coming: list[tuple[float, int, LoadRequest]] = []
        drawn = 0
        for session, at in enumerate(self._starts):
            while coming and coming[0][0] <= at:
                yield heapq.heappop(coming)[2]
            for request in itertools.islice(self._conversation(at, session), self._count - drawn):
                drawn += 1
                heapq.heappush(coming, (request.arrival, drawn, request))
            if drawn == self._count:
                break
        while coming:
            yield heapq.heappop(coming)[2]

    def _conversation(self, at: float, session: int) -> Iterator[LoadRequest]:
        rngs = self._rngs
        tenant = self._tenant(rngs["tenants"])
        first = (tenant * self._prefixes + self._prefix(rngs["prefix"])) * (self._prefix_tokens // BLOCK_TOKENS)
        blocks = tuple(range(first, first + self._prefix_tokens // BLOCK_TOKENS))
        tokens = self._prefix_tokens
        turns = self._turns(rngs["turns"])
        if turns > MOST_TURNS:
            raise ConfigError(f"load has a conversation of {turns} turns: {MOST_TURNS} are the limit")
        names = str(tenant + 1) if self._tenants else "", str(session + 1) if turns > 1 else ""
        for turn in range(turns):
            if turn and self._think:
                at += rngs["think"].expovariate(1 / self._think)
            tokens += self._input(rngs["input"])
            more = math.ceil(tokens / BLOCK_TOKENS) - len(blocks)
            blocks += tuple(itertools.islice(self._fresh, more))
            written = self._output(rngs["output"])
            if tokens + written > LONGEST_TALK:
                raise ConfigError(f"load has a conversation of {tokens + written} tokens: {LONGEST_TALK} are the limit")
            yield LoadRequest(round(at, 6), tokens, written, blocks, *names)
            tokens += written

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"load {self._seed} {name}")


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ConfigError(f"load has {name}={text!r:.60}: it must be a number")
    return number


def _whole(name: str, text: str, least: int = 1, most: int = MOST_TOKENS - 1) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
    if not least <= number <= most:
        raise ConfigError(f"load has {name}={text!r:.60}: it must be a whole number from {least} to {most}")
    return number


def _lengths(name: str, text: str) -> Draw:
    """Reads a distribution of lengths. Raises ConfigError."""
    kind, *values = text.split(":")
    if kind == "uniform" and len(values) == 2:
        low, high = (_whole(name, value) for value in values)
        if low > high:
            raise ConfigError(f"load has {name}={text}: {low} must not be above {high}")
        return lambda rng: rng.randint(low, high)
    if kind == "lognormal" and len(values) in (2, 3):
        mean, sigma = _whole(name, values[0]), _number(name, values[1])
        most = _whole(name, values[2]) if len(values) > 2 else MOST_TOKENS // 4
        if not 0 <= sigma <= 4:
            raise ConfigError(f"load has {name}={text}: sigma must be between 0 and 4")
        middle = math.log(mean) - sigma * sigma / 2
        return lambda rng: max(1, min(most, round(math.exp(middle + sigma * rng.normalvariate(0.0, 1.0)))))
    if values or not text.isdecimal():
        forms = "a number, uniform:LOW:HIGH or lognormal:MEAN:SIGMA:MOST"
        raise ConfigError(f"load has {name}={text!r:.60}: it must be {forms}")
    fixed = _whole(name, text)
    return lambda rng: fixed


def _prefixes(text: str) -> tuple[int, Draw, int]:
    """Reads the tokens of a prefix, a draw of one of them, and their number. Raises ConfigError."""
    tokens, *choice = text.split(":")
    length = _whole("prefix", tokens, 0)
    if length % BLOCK_TOKENS:
        raise ConfigError(f"load has prefix={text}: its tokens must be a multiple of {BLOCK_TOKENS}")
    drawn, count = _choice("prefix", choice or ["1"])
    return length, drawn, max(1, count)


def _choice(name: str, parts: list[str]) -> tuple[Draw, int]:
    """Reads COUNT:ZIPF as a draw of a number below COUNT, and COUNT. Raises ConfigError."""
    if len(parts) > 2:
        raise ConfigError(f"load has {name}=...{':'.join(parts):.60}: it ends with COUNT or COUNT:ZIPF")
    count = _whole(name, parts[0], 0, MOST_CHOICES)
    power = _number(name, parts[1]) if len(parts) > 1 else 0.0
    if not 0 <= power <= 10:
        raise ConfigError(f"load has {name}=...{':'.join(parts)}: the exponent must be between 0 and 10")
    if count < 2:
        return lambda rng: 0, count
    weights = list(itertools.accumulate((number + 1) ** -power for number in range(count)))
    return lambda rng: rng.choices(range(count), cum_weights=weights)[0], count
