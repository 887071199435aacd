"""Each cause of an engine's seconds that a CPU can have, provoked on a real server: it is named, and no other."""

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvern.config import EngineConfig
from kvern.models.folder import model_folder
from tests.support.peft_adapters import make_adapter
from tests.support.served import Served, serving

pytestmark = pytest.mark.nightly
PATIENCE = 60.0
SERVER = ("--threads", "1", "--dtype", "float32", "--no-prefix-cache")
NUMBERS = itertools.count()
Body = dict[str, Any]


def story(tokens: int = 200, model: str = "kvern-12m", **more: Any) -> Body:
    """A body whose answer has so many tokens, to a prompt that nobody asked before."""
    return {"model": model, "prompt": f"Once {next(NUMBERS)}", "max_tokens": tokens, "ignore_eos": True, **more}


def long_prompt() -> Body:
    return {**story(1), "prompt": " ".join(str(next(NUMBERS)) for _ in range(120))}


def half_of_the_cache() -> Body:
    """A body of which two do not fit into 256 tokens, and whose prompt takes less time than its answer."""
    return {**story(120), "prompt": " ".join(str(next(NUMBERS)) for _ in range(40))}


@contextlib.contextmanager
def asked(served: Served, *bodies: Callable[[], Body]) -> Iterator[None]:
    """As many clients as bodies ask one after the other, each for its own, until the block ends."""
    ended = threading.Event()

    def client(body: Callable[[], Body]) -> None:
        while not ended.is_set():
            status, _, answer = served.raw("POST", "/v1/completions", json.dumps(body()).encode())
            assert status == 200, answer

    with ThreadPoolExecutor(max(len(bodies), 1)) as pool:
        clients = [pool.submit(client, body) for body in bodies]
        try:
            yield
        finally:
            ended.set()
            for one in clients:
                one.result()


def check(served: Served, cause: str, before: str, *bodies: Callable[[], Body]) -> None:
    """What these bodies provoke is named in time, and none but this cause and the one before it."""
    found: list[str] = []
    until = time.monotonic() + PATIENCE
    with asked(served, *bodies):
        while found[-1:] != [cause] and time.monotonic() < until:
            (state,) = served.raw("GET", "/v1/engines")[2]["data"]
            if (verdict := state["verdict"]) is not None and verdict["cause"] not in found[-1:]:
                found.append(verdict["cause"])
            time.sleep(0.2)
    assert found[-1:] == [cause] and {*found} <= {before, cause}, found


def test_without_requests_and_with_steps_that_are_too_short() -> None:
    with serving("kvern-1m", *SERVER) as served:
        check(served, "idle", "idle")
        check(served, "host", "idle", lambda: story(model="kvern-1m"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_causes_that_follow_each_other(tmp_path: Path) -> None:
    made = [
        make_adapter(model_folder(EngineConfig("kvern-12m")), tmp_path / name, seed) for seed, name in enumerate("ab")
    ]
    adapters = [f"--adapter={folder.name}={folder}" for folder in made]
    with serving("kvern-12m", *SERVER, "--max-adapters", "1", *adapters) as served:
        served.raw("POST", "/v1/completions", json.dumps(story(5)).encode())  # the first steps are slow
        check(served, "idle", "idle")
        check(served, "weights", "idle", story)
        check(served, "adapter", "weights", lambda: story(model="a"), lambda: story(model="b"))
        check(served, "products", "adapter", *[long_prompt] * 4)


SHORT = {
    "rows": (("--max-batch-requests", "1"), story),
    "blocks": (("--max-model-len", "256", "--kv-cache-tokens", "256"), half_of_the_cache),
    "batch": (("--batching", "static"), story),
}


@pytest.mark.parametrize("cause", SHORT)
def test_what_is_short(cause: str) -> None:
    options, body = SHORT[cause]
    with serving("kvern-12m", *SERVER, *options) as served:
        check(served, cause, "idle", *[body] * 3)


STORE = """
import pathlib
import time

SECONDS = pathlib.Path(__file__).with_name("seconds")


class SlowStore:
    is_local = True

    def __init__(self, rest, identity):
        self.pages = {}

    def has(self, names):
        return [name in self.pages for name in names]

    def get(self, names, places):
        time.sleep(float(SECONDS.read_text()))
        for name, place in zip(names, places):
            place[:] = self.pages[name]
        return [True] * len(names)

    def put(self, names, places):
        self.pages.update((name, bytes(place)) for name, place in zip(names, places))
        return [True] * len(names)

    def drop(self, names):
        for name in names:
            self.pages.pop(name, None)

    def close(self):
        pass
"""


def test_a_store_that_is_slow_and_still_faster_than_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of which the KV cache has room for one come from the store by turns."""
    (tmp_path / "slow_store.py").write_text(STORE)
    (tmp_path / "slow_store-1.0.dist-info").mkdir()
    (tmp_path / "slow_store-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slow-store\nVersion: 1.0\n"
    )
    (tmp_path / "slow_store-1.0.dist-info" / "entry_points.txt").write_text(
        "[kvern.kv_tiers]\nslow = slow_store:SlowStore\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")

    def prompt(number: int) -> Body:
        return {**story(1), "prompt": [3 + (number + place * (number + 1)) % 1000 for place in range(1900)]}

    options = ("--max-model-len", "2048", "--kv-cache-tokens", "2048", "--kv-tier", "slow:any")
    with serving("kvern-12m", *SERVER[:-1], *options) as served:
        began = time.monotonic()
        served.raw("POST", "/v1/completions", json.dumps(prompt(next(NUMBERS))).encode())
        (tmp_path / "seconds").write_text(str((time.monotonic() - began) / 4))
        check(served, "products", "idle", lambda: prompt(next(NUMBERS)))
        turns = itertools.cycle(range(10**6, 10**6 + 3))
        check(served, "tier", "products", lambda: prompt(next(turns)))


def test_grammars_that_are_larger_than_what_is_kept_of_them() -> None:
    """Each of them is known to the server, and dropped by the engine when it comes again."""
    forms = [[f"the number {number * 7919 % 1000003}" for number in range(first, first + 5000)] for first in range(20)]
    turns = itertools.cycle(forms)

    def body() -> Body:
        return {"model": "kvern-12m", "prompt": "Once", "max_tokens": 1, "guided_choice": next(turns)}

    with serving("kvern-12m", *SERVER) as served:
        check(served, "grammar", "idle", body)
