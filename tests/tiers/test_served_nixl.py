"""Two servers, as on two machines: one loads the prompts that the other has computed."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from kvern import EngineConfig
from kvern.errors import ConfigError
from kvern.tiers.remote_pages import PEER_KEY
from tests.support.ports import free_port
from tests.support.served import Served, eventually, serving

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("nixl_cu13") is None, reason="needs the extra nixl"
)
STORY = "Once upon a time there was a little dog who had a red ball. " * 20
# The larger model, whose prompts take longer to compute than to load on any processor.
OPTIONS = ("kvern-12m", "--threads", "1", "--max-model-len", "1024", "--device", "cpu", "--kv-cache-tokens", "2048")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEER_KEY, "a secret of all servers")
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def first(secret: None, address: str) -> Iterator[Served]:
    with serving(*OPTIONS, "--dtype", "float32", "--kv-tier", "host:64MB", "--kv-tier-listen", address) as served:
        yield served


def ask(served: Served, number: int) -> str:
    prompt = f"{number} {STORY}"
    answer = served.client().completions.create(model="kvern-12m", prompt=prompt, max_tokens=8, temperature=0)
    return answer.choices[0].text


def test_a_server_loads_what_another_has_computed_whatever_becomes_of_that(first: Served, address: str) -> None:
    hits = 0.0

    def asked(number: int) -> bool:
        """Ask both; returns whether the second has loaded something."""
        nonlocal hits
        expected = ask(first, number)
        before = first.figure("tier_stored_tokens_total", store="host")
        assert ask(second, number) == expected
        earlier, hits = hits, second.figure("tier_hit_tokens_total", store="nixl")
        assert before or not hits
        return hits > earlier

    with serving(*OPTIONS, "--dtype", "float32", "--kv-tier", "host:64MB", "--kv-tier", f"nixl://{address}") as second:
        numbers = iter(range(1000))
        eventually(lambda: asked(next(numbers)))
        first.kill_engine()  # the memory is the server's
        eventually(lambda: first.figure("engine_ready") == 1)
        eventually(lambda: asked(next(numbers)))
        pages = first.child("kvern.tiers.page_server")
        os.kill(pages, signal.SIGKILL)
        eventually(lambda: asked(next(numbers)))  # there is another one
        pages = first.child("kvern.tiers.page_server")
        os.kill(pages, signal.SIGSTOP)
        assert not asked(next(numbers))
        os.kill(pages, signal.SIGCONT)
        second_reader = second.engine_pid()
        first.stop(signal.SIGKILL)
        assert ask(second, 0) and second.engine_pid() == second_reader


def test_pages_of_another_number_format_are_misses(first: Served, address: str) -> None:
    with serving(*OPTIONS, "--dtype", "bfloat16", "--kv-tier", f"nixl://{address}") as second:
        for number in range(4):
            ask(first, number)
            assert ask(second, number)
        assert not second.figure("tier_hit_tokens_total", store="nixl")
        assert not second.figure("tier_corrupt_pages_total", store="nixl")
        assert not second.figure("tier_failures_total", store="nixl")


def test_memory_that_nobody_has_is_not_offered() -> None:
    with pytest.raises(ConfigError, match=r"kv_tier_listen is 127.0.0.1:1: .* give kv_tier host"):
        EngineConfig(model="kvern-1m", kv_tier_listen="127.0.0.1:1")
