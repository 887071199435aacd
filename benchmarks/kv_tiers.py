"""What tiers of the KV cache are worth: `python benchmarks/kv_tiers.py --case hit saving conversations slow`.

    hit            milliseconds to the first token of a prompt of each of `--tokens`: computed, from the device's prefix
                   cache, and after other prompts took its place there. `cached` says how much of it came from anywhere
    saving         tokens a second of `--requests` that decode `--answer` tokens each, and of as many prompts of
                   `--prompt` tokens that nobody has sent before, without a tier and with it, in turn
    conversations  `--conversations` of `--turns`, each turn `--added` tokens (the first `--prompt`) and an answer of
                   `--answer`, over a cache that holds `--fraction` of them: tokens a second, of prompts and answers,
                   without a tier, with it, and with a cache on the device that holds all
    slow           the same without a tier, with a store whose pages always come too late, and with one that gives
                   200 MB/s

    python benchmarks/kv_tiers.py --model kvern-12m --tier host:1GB --tokens 512
    python benchmarks/kv_tiers.py --model benchmarks/models/llama-3.1-8b --load-format dummy --tier host:64GB \\
        --tokens 2048 8192 --set max_batch_tokens=8192

All prompts are random tokens, the same for all engines. A first round does not count.
"""

import argparse
import gc
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvern import SamplingParams
from kvern.bench.record import keep
from kvern.config import EngineConfig
from kvern.engine.engine import Engine
from kvern.io.interpreter import settle as settle_interpreter
from kvern.request.outputs import RequestOutput
from kvern.tiers.host import HostStore
from kvern.tiers.store import STORES, Identity, read_bytes

PATIENCE = 30.0
"""Seconds within which a page must have been saved."""
SPARE = 128
"""Tokens of a cache for each request beside its own."""
LATE_SECONDS = 5.0
Figures = dict[str, Any]


# Stores that nobody should use


class SlowStore:
    """Host memory behind a line of so many bytes a second, or one from which everything comes too late."""

    is_local = True

    def __init__(self, size: int, rate: float | None) -> None:
        self._pages = HostStore(size)
        self._rate = rate
        self._line = threading.Lock()

    def _pass(self, places: Sequence[memoryview]) -> None:
        if self._rate is not None:
            with self._line:
                time.sleep(sum(map(len, places)) / self._rate)

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """See `Store`."""
        return self._pages.has(names)

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """See `Store`."""
        if self._rate is None:
            time.sleep(LATE_SECONDS)
        self._pass(places)
        return self._pages.get(names, places)

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """See `Store`."""
        self._pass(places)
        return self._pages.put(names, places)

    def drop(self, names: Sequence[bytes]) -> None:
        """See `Store`."""
        self._pages.drop(names)

    def close(self) -> None:
        """See `Store`."""


def slow_store(rest: str, identity: Identity) -> SlowStore:
    """Makes the store of slow:SIZE:RATE, where RATE is bytes a second or `late`."""
    size, _, rate = rest.partition(":")
    return SlowStore(read_bytes(size), None if rate == "late" else float(read_bytes(rate)))


STORES.register("slow")(slow_store)


# Engines


@contextmanager
def engine_of(arguments: argparse.Namespace, tokens: int, tier: Sequence[str], **more: Any) -> Iterator[Engine]:
    """An engine whose cache on the device holds so many tokens, in a process as a server's engine has, half a minute
    after its start: the host's memory is pinned. It is gone afterwards."""
    options = {"model": arguments.model, "load_format": arguments.load_format, "kv_cache_tokens": tokens}
    engine = Engine(EngineConfig(**options | more | dict(arguments.set), kv_tier=tuple(tier)))
    settle_interpreter()
    for thread in threading.enumerate():
        if thread.name == "kvern-pin":
            thread.join()
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def random_tokens(engine: Engine, count: int, dice: random.Random) -> list[int]:
    """A prompt that nobody has sent before."""
    return [dice.randrange(engine.spec.vocab_size) for _ in range(count)]


def answered(engine: Engine, prompts: Sequence[Sequence[int]], answer: int) -> tuple[float, list[RequestOutput]]:
    """Seconds in which all prompts have been answered by so many tokens, and the answers."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    began = time.perf_counter()
    outputs = [engine.add(str(number), list(prompt), params) for number, prompt in enumerate(prompts)]
    while not all(output.finished for output in outputs):
        engine.step()
    return time.perf_counter() - began, outputs


def settle(engine: Engine) -> None:
    """Wait until what is written has been saved."""
    while engine.has_work:
        engine.step()
    deadline, last = time.perf_counter() + PATIENCE, ""
    while time.perf_counter() < deadline:
        now = str([(one.stored_tokens, one.skipped_tokens) for one in engine.statistics().stores.values()])
        if now == last:
            return
        last = now
        time.sleep(0.1)


def stores(engine: Engine) -> Figures:
    """What the stores of an engine have counted."""
    found = engine.statistics().stores
    return {
        name: {key: getattr(one, key) for key in one.__struct_fields__ if getattr(one, key)}
        for name, one in found.items()
    }


def spread(values: Sequence[float]) -> list[float]:
    """The median, the least and the most."""
    return [round(value, 2) for value in (statistics.median(values), min(values), max(values))]


# The cases


def hit(arguments: argparse.Namespace) -> Figures:
    """Milliseconds to the first token, by where the prompt comes from, and how much of it was cached."""
    longest = max(arguments.tokens)
    found: Figures = {}
    with engine_of(arguments, longest * 3 // 2 + SPARE, arguments.tier, max_model_len=longest + SPARE) as engine:
        dice = random.Random(0)
        for count in arguments.tokens:
            rows: dict[str, list[float]] = {"computed": [], "device": [], "tier": []}
            cached: dict[str, list[int]] = {name: [] for name in rows}
            for number in range(arguments.rounds + 2):
                wanted = random_tokens(engine, count, dice)
                for name in rows:
                    if name == "tier":
                        settle(engine)
                        for _ in range(2):  # neither leaves space for the prompt
                            answered(engine, [random_tokens(engine, longest, dice)], 1)
                        settle(engine)
                    seconds, [output] = answered(engine, [wanted], 1)
                    if number > 1:
                        rows[name].append(1000 * seconds)
                        cached[name].append(output.cached_tokens)
            found[str(count)] = {name: {"ms": spread(times), "cached": cached[name]} for name, times in rows.items()}
        found["stores"] = stores(engine)
    return found


def saving(arguments: argparse.Namespace) -> Figures:
    """Tokens a second without a tier and with it, in turn, and their ratio in each round."""
    length = arguments.prompt + arguments.answer
    options = {"max_model_len": length + SPARE, "max_batch_requests": arguments.requests}
    tokens = arguments.requests * (length + SPARE)
    rates: dict[str, dict[str, list[float]]] = {"decoding": {}, "prompts": {}}
    with (
        engine_of(arguments, tokens, (), **options) as plain,
        engine_of(arguments, tokens, arguments.tier, **options) as tiered,
    ):
        for number in range(arguments.rounds + 1):
            dice = random.Random(number)
            short = [random_tokens(plain, 32, dice) for _ in range(arguments.requests)]
            long = [random_tokens(plain, arguments.prompt, dice) for _ in range(arguments.requests)]
            pair = [("without", plain), ("with", tiered)]
            for name, engine in pair if number % 2 else reversed(pair):
                decoding, _ = answered(engine, short, arguments.answer)
                prompts, _ = answered(engine, long, 1)
                if number:
                    rates["decoding"].setdefault(name, []).append(arguments.requests * arguments.answer / decoding)
                    rates["prompts"].setdefault(name, []).append(arguments.requests * arguments.prompt / prompts)
        kept = stores(tiered)
    found: Figures = {}
    for what, each in rates.items():
        ratios = [after / before for before, after in zip(each["without"], each["with"], strict=True)]
        found[what] = {"tokens_per_second": each, "ratio": spread(ratios)}
    return found | {"stores": kept}


@dataclass
class Talk:
    """A conversation: what has been said, and the turns that are left."""

    said: list[int]
    left: int


def converse(engine: Engine, arguments: argparse.Namespace, seed: int, talks: int, turns: int) -> tuple[float, int]:
    """Seconds of so many conversations, each with a next turn as soon as it has its answer, and the tokens computed of
    prompts."""
    dice = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=arguments.answer, ignore_eos=True)
    running: dict[str, Talk] = {}
    computed = 0
    later = [[random_tokens(engine, arguments.added, dice) for _ in range(turns)] for _ in range(talks)]
    for number in range(talks):
        running[str(number)] = Talk(random_tokens(engine, arguments.prompt, dice), turns - 1)
    began = time.perf_counter()
    for name, talk in running.items():
        engine.add(name, list(talk.said), params)
    while running:
        for output in engine.step():
            if not output.finished:
                continue
            name = output.request_id
            talk = running[name]
            computed += len(output.prompt_token_ids) - output.cached_tokens
            talk.said += [*output.outputs[0].token_ids, *later[int(name)][talk.left]]
            talk.left -= 1
            if talk.left < 0:
                del running[name]
            else:
                engine.add(name, list(talk.said), params)
    return time.perf_counter() - began, computed


def compared(arguments: argparse.Namespace, engines: dict[str, tuple[float, Sequence[str]]]) -> Figures:
    """Tokens a second of conversations by engines that follow each other: (share of all that fits, tier) each."""
    last = arguments.prompt + arguments.turns * (arguments.answer + arguments.added)
    turns = [arguments.prompt + turn * (arguments.answer + arguments.added) for turn in range(arguments.turns)]
    count = arguments.conversations * sum(length + arguments.answer for length in turns)
    found: Figures = {}
    for name, (share, tier) in engines.items():
        tokens = int(share * arguments.conversations * (last + SPARE))
        options = {"max_model_len": last + SPARE, "max_batch_requests": arguments.requests}
        with engine_of(arguments, tokens, tier, **options) as engine:
            converse(engine, arguments, -1, min(8, arguments.conversations), 2)
            runs = []
            for number in range(arguments.rounds):
                runs.append(converse(engine, arguments, number, arguments.conversations, arguments.turns))
                print(f"{name}: {runs[-1][0]:.2f} s, {runs[-1][1]} tokens of prompts computed", flush=True)
            found[name] = {
                "cache_tokens": tokens,
                "tokens_per_second": [round(count / seconds, 1) for seconds, _ in runs],
                "computed": [computed for _, computed in runs],
                "stores": stores(engine),
            }
    base = statistics.median(next(iter(found.values()))["tokens_per_second"])
    for each in found.values():
        each["ratio"] = round(statistics.median(each["tokens_per_second"]) / base, 3)
    return found


def conversations(arguments: argparse.Namespace) -> Figures:
    """Conversations without a tier, with it, and over a cache for all."""
    share = arguments.fraction
    return compared(arguments, {"no tier": (share, ()), "tier": (share, arguments.tier), "endless cache": (1.0, ())})


def slow(arguments: argparse.Namespace) -> Figures:
    """Conversations without a tier, and with stores that are worth nothing."""
    share, size = arguments.fraction, arguments.slow_size
    stores = {"late": f"slow:{size}:late", "200 MB/s": f"slow:{size}:200MB"}
    return compared(arguments, {"no tier": (share, ()), **{name: (share, (tier,)) for name, tier in stores.items()}})


CASES: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "hit": hit,
    "saving": saving,
    "conversations": conversations,
    "slow": slow,
}


def option(text: str) -> tuple[str, Any]:
    """A field of EngineConfig and its value: NAME=JSON, or NAME=TEXT."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    """Print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tier", action="append", default=[], help="as of kvern serve --kv-tier; host:1GB if left out")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="lengths of prompts of `hit`")
    parser.add_argument("--requests", type=int, default=16, help="that run at the same time")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--added", type=int, default=64, help="tokens of a turn after the first")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--slow-size", default="1GB", help="of the stores of `slow`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", type=option, action="append", default=[], metavar="NAME=VALUE", help="of EngineConfig")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.tier = arguments.tier or ["host:1GB"]
    found: Figures = {}
    for case in arguments.case:
        found[case] = CASES[case](arguments)
        print(case, json.dumps(found[case], indent=1), flush=True)
        keep(arguments.output, "kv_tiers", arguments.model, vars(arguments), findings=found)


if __name__ == "__main__":
    main()
