"""Cache servers that are killed or stopped between two bytes of a page: the same tokens, and nothing is held.

A proxy counts the bytes between engine and server. What happens there without a fault says where the points can be;
they are drawn among all bytes of pages that are written and read.
"""

import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.support.idle import core_here, is_idle
from tests.support.latched_proxy import LatchedProxy, latched_proxy
from tests.support.mooncake_master import mooncake_master, needs_mooncake
from tests.support.redis_server import needs_server, redis_server
from tests.support.served import eventually, serving
from tests.support.tiers import PAGE_TOKENS, tier_of

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 120,
    "max_batch_requests": 2,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TALKS = [list(range(20 + 40 * talk, 60 + 40 * talk)) for talk in range(3)]
ROUNDS = 3
Server = Any
"""With `kill` and `send`."""
Made = Callable[[Path], AbstractContextManager[tuple[Server, LatchedProxy, str]]]


@contextlib.contextmanager
def on_valkey(folder: Path) -> Iterator[tuple[Server, LatchedProxy, str]]:
    with redis_server(folder) as server, latched_proxy(server.port) as proxy:
        yield server, proxy, f"valkey://127.0.0.1:{proxy.port}?timeout=0.5"


@contextlib.contextmanager
def on_mooncake(folder: Path) -> Iterator[tuple[Server, LatchedProxy, str]]:
    with mooncake_master() as master, latched_proxy(master.port) as proxy:
        yield master, proxy, f"mooncake://127.0.0.1:{proxy.port}?segment=64MB"


VALKEY = pytest.param(on_valkey, id="valkey", marks=needs_server)
MOONCAKE = pytest.param(on_mooncake, id="mooncake", marks=needs_mooncake)


def talked(llm: LLM) -> list[list[Sequence[int]]]:
    """What an engine answers to conversations that push each other out of the cache, again and again."""
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([output.outputs[0].token_ids for output in llm.generate(TALKS, PARAMS)])
        core_here(llm).scheduler.cache.tree.clear()
    return rounds


def traffic(made: Made, model: Path, folder: Path) -> int:
    """The bytes of conversations without a fault."""
    with made(folder) as (_, proxy, option), LLM(model, kv_tier=(option,), **OPTIONS) as llm:
        tier_of(llm).computing = None
        before = proxy.passed()
        talked(llm)
        eventually(lambda: tier_of(llm).shelf.is_quiet)
        return proxy.passed() - before


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[Sequence[int]]]:
    with LLM(tiny_model, **OPTIONS) as llm:
        return talked(llm)


POINTS = [
    pytest.param(on_valkey, 0, signal.SIGKILL, 0.2, id="valkey killed", marks=needs_server),
    pytest.param(on_valkey, 1, signal.SIGSTOP, 0.5, id="valkey stopped", marks=needs_server),
    pytest.param(on_mooncake, 2, signal.SIGKILL, 0.7, id="mooncake killed", marks=needs_mooncake),
]


def drawn() -> list[Any]:
    """Fifty random points for a nightly run."""
    dice = random.Random(50)
    found = []
    for number in range(50):
        made, marks = dice.choice([(on_valkey, needs_server), (on_valkey, needs_server), (on_mooncake, needs_mooncake)])
        how = dice.choice([signal.SIGKILL, signal.SIGSTOP])
        share = dice.random()
        name = f"{made.__name__[3:]}-{how.name}-{share:.3f}"
        found.append(pytest.param(made, number, how, share, id=name, marks=[pytest.mark.nightly, marks]))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("made", "seed", "how", "share"), [*POINTS, *drawn()])
def test_a_server_that_ends_between_two_bytes(
    made: Made,
    seed: int,
    how: signal.Signals,
    share: float,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[Sequence[int]]],
) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)
    total = traffic(made, tiny_model, tmp_path)
    with made(tmp_path) as (server, proxy, option), LLM(tiny_model, kv_tier=("host:32MB", option), **OPTIONS) as llm:
        tier_of(llm).computing = None
        proxy.latch(int(share * total / 2), how, server.pid)
        assert talked(llm) == expected
        while not proxy.has_acted.is_set():
            assert talked(llm) == expected
            core_here(llm).scheduler.cache.tree.clear()
        assert talked(llm) == expected
        while llm._engine.has_work:
            llm._engine.step()
        assert is_idle(llm)
        if how is signal.SIGSTOP:
            server.send(signal.SIGCONT)
        eventually(lambda: tier_of(llm).shelf.is_quiet)


SERVER = ("kvern-1m", "--threads", "1", "--max-model-len", "1024", "--dtype", "float32", "--kv-cache-tokens", "1024")
STORIES = [f"Once upon a time there were {count} little dogs who had a red ball. " * 12 for count in range(2, 14)]
LENGTH = 24


def drawn_engines() -> list[Any]:
    """Random points for a nightly run."""
    dice = random.Random(12)
    found = []
    for number in range(10):
        how = [signal.SIGKILL, signal.SIGSTOP][number % 2]
        share = dice.random()
        found.append(pytest.param(how, share, id=f"{how.name}-{share:.3f}"))
    return found


@needs_server
@pytest.mark.nightly
@pytest.mark.parametrize(("how", "share"), drawn_engines())
def test_an_engine_that_ends_between_two_bytes_of_a_page(how: signal.Signals, share: float, tmp_path: Path) -> None:
    """Its streams go on in another, which loads from the host's memory at once."""
    with redis_server(tmp_path) as redis, latched_proxy(redis.port) as proxy:
        tiers = ("--kv-tier", "host:64MB", "--kv-tier", f"valkey://127.0.0.1:{proxy.port}?timeout=2")
        with serving(*SERVER, *tiers, "--engine-timeout", "3") as served, ThreadPoolExecutor(4) as pool:
            asked: Any = {
                "model": "kvern-1m",
                "temperature": 0,
                "max_tokens": LENGTH,
                "extra_body": {"ignore_eos": True},
            }

            def stream(story: str) -> str:
                chunks = served.client().completions.create(prompt=story, stream=True, **asked)
                return "".join(chunk.choices[0].text for chunk in chunks)

            def stored() -> bool:
                return all(
                    served.figure("tier_stored_tokens_total", store=name) >= 4 * 128 for name in ("host", "valkey")
                )

            before = proxy.passed()
            list(pool.map(stream, STORIES[:4]))
            eventually(stored)
            proxy.latch(int(share * 0.9 * (proxy.passed() - before)), how, served.engine_pid())
            texts = list(pool.map(stream, STORIES[4:8]))
            more = iter(STORIES[8:])
            while not proxy.has_acted.is_set():
                stream(next(more))
            eventually(lambda: served.figure("engine_restarts_total") == 1 and served.figure("engine_ready") == 1)

            def from_host(story: str) -> int:
                usage: Any = served.client().completions.create(prompt=story, **asked).usage
                return int(usage.prompt_tokens_details.cached_tokens_details["host"])

            eventually(lambda: sum(map(from_host, STORIES[:8])) >= 64)  # one or another may be late, and is computed
            assert list(pool.map(stream, STORIES[4:8])) == texts
            assert served.figure("engine_restarts_total") == 1
            eventually(lambda: not served.figure("num_requests_running") and not served.figure("kv_cache_usage_perc"))
