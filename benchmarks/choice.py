"""What the choice of an engine takes for each request: its prompt's names, and the choice among simulated engines.

    python benchmarks/choice.py --output benchmarks/results/choice.json

Engines have a system message that all share and prompts of their own, and loads drawn evenly. Microseconds of the
thread, the median of the prompts: `choice` is that of an engine for a prompt of which the system message alone is
cached, with the names that it needs; `new` is all that such a request costs the server for its place, with the names
that its engine will have, `tiered` is the choice where every other engine has the system message in its host memory and
all read a store, and `cached` the same of one that is cached whole; `all_names` makes all names; `told` is
what the index takes to hear of a prompt from an engine, and `journal` what a prompt of blocks of 16 tokens costs the
engine itself, which keeps and tells its names, if the prompt before is forgotten for it.

In the record `before` is of the version that asked every engine, and `eager` (`new`, `cached`) of the one that made all
names.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvern.bench.record import keep, read_record
from kvern.cache.block_pool import BlockPool
from kvern.cache.journal import CacheJournal, NameLedger
from kvern.cache.prefix_names import PrefixNames, prompt_names
from kvern.cache.radix import Node, RadixCache
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.store_figures import StorePrice
from kvern.serving.choice import EngineLoads, Load
from kvern.serving.engine_cache import MOST_NAMES
from kvern.serving.prefix_index import PrefixIndex, cached_tokens
from kvern.serving.wire import CacheChanges

SYSTEM_TOKENS = 256
BLOCK_TOKENS = 16
PROMPTS = 200
PARAMS = SamplingParams().resolved({})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the results")
    output = parser.parse_args().output
    gc.disable()
    results = [measured(count, length) for length in (512, 8192) for count in (1, 8, 64, 1000)]
    for row in results:
        print(json.dumps(row))
    kept = read_record(output).findings if output is not None and output.exists() else {}
    keep(output, "choice", None, {}, findings=kept | {"now": results})


def measured(count: int, length: int) -> dict[str, float]:
    dice = random.Random(count)
    system = [dice.randrange(100_000) for _ in range(SYSTEM_TOKENS)]
    prompts = [[*system, *(dice.randrange(100_000) for _ in range(length - SYSTEM_TOKENS))] for _ in range(PROMPTS)]
    index, loads = PrefixIndex(), EngineLoads()
    tiered = PrefixIndex()
    prices = {"host": StorePrice(20.0, 0.25, 1 << 20), "disk": StorePrice(100.0, 0.5)}
    for number in range(count):
        index.begin(number)
        index.hear(number, CacheChanges(0, [*names_of(system)], []))
        tiered.begin(number)
        tiered.hear(number, CacheChanges(0, [*names_of(system)], [], prices))
        if number % 2:
            tiered.hear(number, CacheChanges(1, [], [*names_of(system)][2:], prices))
        loads.put(Load(False, dice.randrange(9000), 0, number))
    told = [0] * count
    hearing = []
    for prompt in prompts[::2]:
        number, names = dice.randrange(count), [*names_of(prompt)]
        told[number] += 1
        changes = CacheChanges(told[number], names, [])
        hearing.append(seconds(lambda: index.hear(number, changes)))  # noqa: B023 (called at once)

    def choose(prompt: list[int], index: PrefixIndex = index) -> None:
        loads.cheapest(index.levels(names_of(prompt)), lambda _: True)

    def give(prompt: list[int]) -> None:
        """What the server does for a request, from its tokens to its end."""
        names = names_of(prompt)
        levels = index.levels(names)
        number = loads.cheapest(levels, lambda _: True)
        assert number is not None
        cached_tokens(levels, number)
        expected = index.expect(number, names)
        if expected is not None:
            index.withdraw(expected)

    figures = {
        "all_names": [seconds(lambda: [*names_of(prompt)]) for prompt in prompts],  # noqa: B023
        "choice": [seconds(lambda: choose(prompt)) for prompt in prompts[1::2]],  # noqa: B023
        "tiered": [seconds(lambda: choose(prompt, tiered)) for prompt in prompts[1::2]],  # noqa: B023
        "new": [seconds(lambda: give(prompt)) for prompt in prompts[1::2]],  # noqa: B023
        "cached": [seconds(lambda: give(prompt)) for prompt in prompts[::2]],  # noqa: B023
        "told": hearing,
        "journal": journal_seconds(prompts),
    }
    return {"engines": count, "prompt_tokens": length} | {
        name: round(1e6 * statistics.median(values), 1) for name, values in figures.items()
    }


def names_of(prompt: list[int]) -> PrefixNames:
    return prompt_names(RequestSpec("1", PromptInput(prompt), PARAMS, 8))


def seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def journal_seconds(prompts: Sequence[list[int]]) -> list[float]:
    """What each prompt takes more in a prefix tree that is watched."""
    differences = []
    trees = [RadixCache(BlockPool(8192 // BLOCK_TOKENS), BLOCK_TOKENS) for _ in range(2)]
    ledger = CacheJournal(trees[1]).ledger
    for prompt in prompts[:50]:
        plain = seconds(lambda: enter(trees[0], prompt))  # noqa: B023
        differences.append(seconds(lambda: enter(trees[1], prompt, ledger)) - plain)  # noqa: B023
    return differences


def enter(tree: RadixCache, prompt: list[int], ledger: NameLedger | None = None) -> None:
    """A prompt is cached in the place of the one before."""
    if ledger is not None:
        ledger.take(MOST_NAMES)
    tree.clear()
    path: list[Node] = []
    blocks = tree._pool.allocate(len(prompt) // BLOCK_TOKENS)
    for place, block in enumerate(blocks):
        tokens = tuple(prompt[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
        path.append(tree.insert(b"", path[-1] if path else None, tokens, block, 0))
        tree.acquire(path[-1:])
    tree.release(path)
    tree._pool.release(blocks)


if __name__ == "__main__":
    main()
