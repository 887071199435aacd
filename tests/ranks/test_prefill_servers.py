"""Servers that compute prompts for others, as on two machines: tokens of one server, whatever ends on the way."""

import asyncio
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from kvern import EngineConfig
from kvern.errors import ConfigError, EngineClosed
from kvern.request.sampling_params import SamplingParams
from kvern.serving.client import EngineClient
from kvern.serving.prompt_service import PromptService
from kvern.serving.wire import Ready
from kvern.spec.facts import ModelFacts
from kvern.tiers.remote_pages import PEER_KEY
from kvern.version import __version__
from tests.support.peft_adapters import make_adapter
from tests.support.ports import free_port
from tests.support.served import Served, eventually, serving

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or importlib.util.find_spec("nixl_cu13") is None, reason="needs the extra nixl"
    ),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # within PEFT
]
OPTIONS = ("--threads", "1", "--device", "cpu", "--dtype", "float32", "--kv-cache-tokens", "4096")
PARTS = ("--max-batch-tokens", "128")
PATIENT = """
import os, sys
if any("kvern" in word for word in sys.orig_argv):
    import kvern.engine.hand_overs as hand_overs, kvern.runner.tier as tier, kvern.tiers.shelf as shelf
    hand_overs.HAND_OVER_SECONDS = shelf.FIRST_PATIENCE = shelf.LEAST_PATIENCE = 60.0
    tier.Tier.pays = lambda *given, **named: True
if "kvern.serving.process" in sys.orig_argv:
    from kvern.engine.scheduler import Scheduler
    chunk = Scheduler._chunk
    def held(self, request, budget):
        count = chunk(self, request, budget)
        is_last = request.spec.hands_over and count == request.remaining_tokens
        return 0 if is_last and os.path.exists(os.environ["HELD"]) else count
    Scheduler._chunk = held
"""
"""Processes that wait for pages however long they take, and never compute them because that is faster.

The last step of a prompt for another server does not begin while there is a file HELD.
"""
LONG = [[10 + (number * 31 + place * 7) % 110 for place in range(300)] for number in range(40)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 4, "presence_penalty": 0.5},
    "several": {"temperature": 0.9, "seed": 4, "n": 3},
    "structured": {"temperature": 0.9, "seed": 4, "extra_body": {"structured_outputs": {"regex": "[a-d]{8}"}}},
    "adapted": {"temperature": 0, "model": "one"},
}


@pytest.fixture(scope="module")
def options(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    adapter = make_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "one", 0, r=4)
    return (str(tiny_model), *OPTIONS, *PARTS, "--served-model-name", "tiny", "--adapter", f"one={adapter}")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file HELD; processes are patient."""
    folder = tmp_path_factory.mktemp("patient")
    (folder / "sitecustomize.py").write_text(PATIENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
        patch.setenv("HELD", str(folder / "held"))
        yield folder / "held"


@pytest.fixture(scope="module")
def address(held: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PEER_KEY, "a secret of all servers")
        patch.setenv("UCX_TLS", "tcp")
        yield f"127.0.0.1:{free_port()}"


def prefilling(options: tuple[str, ...], address: str) -> Any:
    return serving(*options, "--role", "prefill", "--kv-tier", "host:64MB", "--kv-tier-listen", address)


@pytest.fixture(scope="module")
def decode(
    options: tuple[str, ...], address: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """It has an adapter that the other server has not."""
    own = make_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "own", 1, r=4)
    with serving(*options, "--adapter", f"own={own}", "--role", "decode", "--prefill-server", address) as served:
        yield served


def ask(served: Served, number: int, **more: Any) -> list[str]:
    asked = {"model": "tiny", "max_tokens": 8, **more}
    found = served.client().completions.create(prompt=LONG[number], **asked)
    return [choice.text for choice in found.choices]


def handed(served: Served) -> float:
    return served.figure("prompts_handed_over_total")


def test_answers_are_those_of_one_server_whatever_becomes_of_the_other(
    options: tuple[str, ...], address: str, decode: Served, held: Path
) -> None:
    """Without the other, with it, while it is stopped, when it was killed amid a prompt, and when it is back."""
    status, _, told = decode.raw("GET", "/ready")
    assert status == 200 and "no prefill server answers" in told["degraded"]
    assert told["prefill_servers"] == [{"model": "tiny", "prefill_server": address, "ready": False, "reason": ANY}]
    assert told["waits_for"][0].startswith(f"prefill server {address}: ")
    assert ask(decode, 0, temperature=0) and not handed(decode)
    with prefilling(options, address) as prefill:
        eventually(lambda: "degraded" not in str(decode.raw("GET", "/ready")[2]))
        for number, params in enumerate(KINDS.values(), 1):
            before = handed(decode)
            found = ask(decode, number, **params)
            assert handed(decode) == before + 1
            assert found == ask(prefill, number, **params)
        [state] = decode.raw("GET", "/v1/engines")[2]["prefill_servers"]
        assert state["ready"] and state["prefill_server"] == address and not state["failed_prompts"]
        assert state["computed_prompts"] == handed(decode) and state["computed_tokens"] == 300 * handed(decode)
        assert "waits_for" not in decode.raw("GET", "/ready")[2]
        assert decode.figure("tier_hit_tokens_total", store="nixl") == 256 * handed(decode)
        before = handed(decode)
        ask(decode, 1, temperature=0)  # it is cached here
        check_explained(decode, address)
        assert handed(decode) == before
        prefill.process.send_signal(signal.SIGSTOP)
        stopped = ask(decode, 20, temperature=0)
        eventually(lambda: "degraded" in str(decode.raw("GET", "/ready")[2]))
        prefill.process.send_signal(signal.SIGCONT)
        eventually(lambda: "degraded" not in str(decode.raw("GET", "/ready")[2]))
        assert stopped == ask(prefill, 20, temperature=0)
        expected = ask(prefill, 21, temperature=0, extra_body={"cache_salt": "another cache"})
        prompts = Held(decode, held)
        asked = prompts.begin(21)
        prefill.stop(signal.SIGKILL)
        assert prompts.end(asked) == (*expected, 256), "it goes on after what was loaded meanwhile"
    with prefilling(options, address):
        eventually(prompts.loads)


class Held:
    """Prompts that the prefill server computes all but the last part of, until `end`."""

    def __init__(self, decode: Served, file: Path) -> None:
        self.decode, self.file = decode, file
        self.threads = ThreadPoolExecutor(1)
        self.fresh = itertools.count()

    def ask(self, prompt: list[int]) -> tuple[str, int]:
        """The answer, and how much of the prompt was cached."""
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = self.decode.client().completions.create(**body)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    def loaded(self) -> float:
        return self.decode.figure("tier_hit_tokens_total", store="nixl")

    def loads(self) -> bool:
        """The store is not off, as it may be after the other server was gone, and knows the other's memory."""
        before = self.loaded()
        number = next(self.fresh)
        self.ask([10 + number % 100, 10 + number // 100, *LONG[35]])
        return self.loaded() > before

    def begin(self, number: int) -> Future[tuple[str, int]]:
        """All but the last part of a prompt is computed, and loaded where it will be answered."""
        eventually(self.loads)
        self.file.touch()
        before = self.loaded()
        asked = self.threads.submit(self.ask, LONG[number])
        eventually(lambda: self.loaded() >= before + 256)
        return asked

    def end(self, asked: Future[tuple[str, int]]) -> tuple[str, int]:
        self.file.unlink()
        return asked.result()


@pytest.mark.nightly
def test_pages_are_loaded_before_the_last_step_begins(
    options: tuple[str, ...], address: str, decode: Served, held: Path
) -> None:
    """Also if the engine ends that has loaded them."""
    with prefilling(options, address) as prefill:
        eventually(lambda: "degraded" not in str(decode.raw("GET", "/ready")[2]))
        prompts = Held(decode, held)
        assert prompts.end(prompts.begin(32)) == (*ask(prefill, 32, temperature=0), 256)
        asked = prompts.begin(33)
        decode.kill_engine()
        assert [prompts.end(asked)[0]] == ask(prefill, 33, temperature=0)


def check_explained(decode: Served, address: str) -> None:
    """A prompt with an adapter that the prefill server has not is computed here, which its explanation says."""
    answer = decode.client().completions.create(model="own", prompt=LONG[30], max_tokens=2, temperature=0)
    told = decode.raw("GET", f"/v1/requests/{answer.id}/explain")[2]
    reason = f"engine {address} gives it up: it has not its adapter"
    assert reason in {event["text"] for event in told["timeline"]}
    assert "it has not its adapter" in told["summary"]
    assert not told["prompts"] and not told["moves"]
    assert [one["engine"] for one in told["records"]] == ["0"]
    shown = subprocess.run(
        [sys.executable, "-m", "kvern", "explain", answer.id, "--base-url", decode.url.removesuffix("/v1")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "it has not its adapter" in shown.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(("sizes", "by_heads"), [((2, 2), False), ((2, 1), True), ((1, 2), True), ((2, 2), True)])
def test_each_rank_reads_the_pages_of_its_heads(address: str, sizes: tuple[int, int], by_heads: bool) -> None:
    """The first rank alone asks which pages there are; with pages of single heads sizes may differ."""
    more = "--max-model-len", "1024", *(("--kv-tier-heads",) if by_heads else ())
    prefills, decodes = (("kvern-12m", *OPTIONS, *more, "--tensor-parallel-size", str(size)) for size in sizes)
    with (
        prefilling(prefills, address) as prefill,
        serving(*decodes, "--role", "decode", "--prefill-server", address) as decode,
    ):
        eventually(lambda: "degraded" not in str(decode.raw("GET", "/ready")[2]))
        for number in range(4):
            prompt = [300 + place * (number + 7) % 500 for place in range(600)]
            asked: dict[str, Any] = {"model": "kvern-12m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
            answer = decode.client().completions.create(**asked)
            assert answer.choices[0].text == prefill.client().completions.create(**asked).choices[0].text
            details = answer.usage and answer.usage.prompt_tokens_details
            assert details and details.cached_tokens == 576, "the whole pages of the prompt, of all ranks"
        assert handed(decode) == 4


@pytest.mark.nightly
def test_servers_whose_pages_differ_say_so_and_compute_alone(
    options: tuple[str, ...], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of another version, number format or division: it answers alone, and says why."""
    (tmp_path / "sitecustomize.py").write_text("import kvern.version\nkvern.version.__version__ = '0.0.1'\n")
    with prefilling(options, address) as prefill:
        expected = ask(prefill, 31, temperature=0)
        for others, reason in (
            ({}, f"it is kvern {__version__}, and this one 0.0.1: they must be equal"),
            ({"--dtype": "bfloat16"}, "both need the same weights, formats of weights and keys"),
            ({"--tensor-parallel-size": "2"}, "(-tp 1 -pp 1), and those of this one are"),
        ):
            with monkeypatch.context() as patch:
                if not others:
                    patch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
                more = [word for option in others.items() for word in option]
                with serving(*options, *more, "--role", "decode", "--prefill-server", address) as decode:

                    def refused(decode: Served = decode) -> str:
                        [state] = decode.raw("GET", "/ready")[2]["prefill_servers"]
                        assert not state["ready"]
                        return str(state["reason"])

                    eventually(lambda reason=reason, refused=refused: reason in refused())  # type: ignore[misc]
                    assert (ask(decode, 31, temperature=0) == expected) or "--dtype" in others
                    assert not handed(decode)
        assert not prefill.figure("requests_running")


def test_closing_ends_requests_whose_prompts_another_server_computes(tiny_model: Path, address: str) -> None:
    async def run() -> None:
        computing = asyncio.Event()

        async def compute(*_: object) -> str:
            computing.set()
            await asyncio.Event().wait()
            return ""

        prefill = EngineConfig(model=str(tiny_model), role="prefill", kv_tier_listen=address)
        config = EngineConfig(
            model=str(tiny_model),
            device="cpu",
            dtype="float32",
            threads=1,
            kv_cache_tokens=4096,
            role="decode",
            prefill_server=(address,),
        )
        client = EngineClient(config)

        def ready() -> Ready:
            return Ready(1000, 4, "", model=ModelFacts(vocab_size=1000), pages=client.replicas.ready.pages)

        service = PromptService(prefill, ready, lambda: None, compute, dict)
        service.start()
        news = asyncio.Event()
        async with asyncio.timeout(120):
            async with client:
                while client.replicas.degraded is not None:
                    await asyncio.sleep(0.01)
                generation = await client.replicas.submit(LONG[0], SamplingParams(max_tokens=8), news=news)
                await computing.wait()
            with pytest.raises(EngineClosed, match="the engine is closed"):
                async for _ in client.replicas.follow([generation], news):
                    pass
        await service.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"role": "decode"}, "role is decode and prefill_server not given"),
        ({"prefill_server": ("a:1",), "role": "prefill"}, "role is prefill and prefill_server a:1"),
        ({"role": "prefill"}, "give kv_tier_listen"),
        ({"role": "decode", "prefill_server": ("a:1",), "prefix_cache": False}, "needs the prefix cache"),
        ({"kv_tier_heads": True}, "kv_tier_heads is on, and kv_tier not given"),
        ({"kv_tier_heads": True, "kv_tier": ("host", "peer")}, "peer reads whole pages: leave one out"),
        ({"kv_tier_heads": True, "prefill_engines": 1, "decode_engines": 1}, "peer reads whole pages"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        EngineConfig(model="kvern-1m", **given)


def test_roles_bring_their_stores() -> None:
    config = EngineConfig(model="kvern-1m", role="decode", prefill_server=("a:1", "b:2"), kv_tier=("nixl://b:2",))
    assert config.kv_tier == ("nixl://b:2", "nixl://a:1")
    config = EngineConfig(model="kvern-1m", role="decode", prefill_server=("a:1",), kv_tier=("nixl://a:1?optional",))
    assert config.kv_tier == ("nixl://a:1?optional",)
    assert EngineConfig(model="kvern-1m", role="prefill", kv_tier_listen="a:1").kv_tier == ("host",)
