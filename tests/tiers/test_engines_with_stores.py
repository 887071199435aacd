"""Engines with stores on disks and servers: the bits of the prefix tree, after a restart too, and servers that die."""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.cli.main import main
from kvern.errors import ConfigError
from tests.support.mooncake_master import mooncake_master, needs_mooncake
from tests.support.redis_server import needs_server, redis_server
from tests.support.served import eventually
from tests.support.tiers import PAGE_TOKENS, answer, check_hits, figures, forget, settle, tier_of, trust

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 120,
    "max_batch_requests": 2,
}
PROMPT = [*range(20, 61)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)


@contextlib.contextmanager
def on_disk(folder: Path) -> Iterator[str]:
    yield f"disk:{folder / 'pages'}:1GB"


@contextlib.contextmanager
def on_valkey(folder: Path) -> Iterator[str]:
    with redis_server(folder) as server:
        yield f"valkey://127.0.0.1:{server.port}"


@contextlib.contextmanager
def on_mooncake(folder: Path) -> Iterator[str]:
    with mooncake_master() as master:
        yield f"mooncake://127.0.0.1:{master.port}?segment=64MB"


STORES = [
    pytest.param(on_disk, id="disk"),
    pytest.param(on_valkey, id="valkey", marks=needs_server),
    pytest.param(on_mooncake, id="mooncake", marks=needs_mooncake),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("made", STORES)
def test_a_hit_gives_the_bits_of_the_prefix_tree(
    made: Callable[[Path], AbstractContextManager[str]], tiny_model: Path, tmp_path: Path
) -> None:
    with made(tmp_path) as option, LLM(tiny_model, kv_tier=(option,), **OPTIONS) as llm:
        assert check_hits(llm, PROMPT) == 40


@pytest.mark.parametrize("made", STORES[:2])
def test_another_engine_finds_the_pages(
    made: Callable[[Path], AbstractContextManager[str]], tiny_model: Path, tmp_path: Path
) -> None:
    with made(tmp_path) as option:
        with LLM(tiny_model, kv_tier=(option,), **OPTIONS) as first:
            expected, _ = answer(first, PROMPT)
            settle(first)
        with LLM(tiny_model, kv_tier=(option,), **OPTIONS) as second:
            trust(second)
            if made is on_disk:
                store = tier_of(second).shelf.stores[0].store
                eventually(lambda: any(len(names) for names in store._index))  # type: ignore[attr-defined]
            found, cached = answer(second, PROMPT)
        assert cached == 40 and found.token_ids == expected.token_ids


@needs_server
def test_a_server_that_dies_changes_no_answer(tiny_model: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        option = f"valkey://127.0.0.1:{server.port}?timeout=0.2"
        with LLM(tiny_model, kv_tier=("host:32MB", option), **OPTIONS) as llm:
            trust(llm)
            expected, _ = answer(llm, PROMPT)
            settle(llm)
            forget(llm)
            server.kill()
            for _ in range(3):
                found, _ = answer(llm, PROMPT)
                assert found.token_ids == expected.token_ids
                forget(llm)


def test_kvern_cache_knows_the_model(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(tiny_model, kv_tier=(f"disk:{tmp_path}/pages:1GB",), kv_tier_max_age="7d", **OPTIONS) as llm:
        answer(llm, PROMPT)
        settle(llm)
        stored = figures(llm).stored_tokens
        assert stored
        assert main(["cache", "ls", f"{tmp_path}/pages", "--json"]) == 0
    [kept] = json.loads(capsys.readouterr().out)
    assert kept["model"] == str(tiny_model) and kept["pages"] >= stored // 8


def test_a_wrong_age_is_named(tiny_model: Path, tmp_path: Path) -> None:
    for option, age, message in (
        (f"disk:{tmp_path}/pages", "long", "kv_tier_max_age: the age 'long' must be a time above 0"),
        ("mooncake://127.0.0.1", "7d", "does not know how old a page is"),
    ):
        if option.startswith("mooncake") and needs_mooncake.args[0]:
            continue
        with pytest.raises(ConfigError, match=message):
            LLM(tiny_model, kv_tier=(option,), kv_tier_max_age=age, **OPTIONS)
