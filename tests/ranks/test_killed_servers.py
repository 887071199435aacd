"""A prefill and a decode server, each of whose processes is killed or stopped at any point: no answer shows it."""

import contextlib
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvern import LLM, SamplingParams
from kvern.tiers.remote_pages import PEER_KEY
from tests.support import checked_engines
from tests.support.ports import free_port
from tests.support.served import ENGINE, Served, child_of, children_of, command_of, eventually

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("nixl_cu13") is None, reason="needs the extra nixl"
)
OPTIONS = ("kvern-1m", "--threads", "1", "--device", "cpu", "--dtype", "float32", "--max-model-len", "512")
CACHE = ("--kv-cache-tokens", "4096", "--max-batch-tokens", "256", "--engine-timeout", "5")
"""Prompts are computed and loaded in parts."""
PAGES, READER, SERVER = "kvern.tiers.page_server", "kvern.tiers.nixl_reader", ""
TOKENS, STREAMS = 40, 4


class Blow(NamedTuple):
    """A signal for a process of one of the servers."""

    side: str
    process: str
    how: signal.Signals


BLOWS = [
    Blow(side, process, how)
    for how in (signal.SIGKILL, signal.SIGSTOP)
    for side, process in (
        ("prefill", ENGINE),
        ("decode", ENGINE),
        ("prefill", PAGES),
        ("decode", READER),
        ("prefill", SERVER),
        ("decode", SERVER),
    )
]


class Pair:
    """Both servers, which are started again when they were killed, and the answers that they gave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.servers: dict[str, Served] = {}
        self.answers: list[tuple[list[int], str]] = []
        self.held: list[float] = []
        """The seconds for which something was still held after each blow, when the answers had ended."""

    def start(self, side: str) -> None:
        prefill = "--role", "prefill", "--kv-tier", "host:64MB", "--kv-tier-listen", self.address
        decode = "--role", "decode", "--prefill-server", self.address
        log = self.folder / f"{side}-{len([*self.folder.glob('*.log')])}.log"
        self.servers[side] = Served(*OPTIONS, *CACHE, *(prefill if side == "prefill" else decode), log=log)

    def process(self, blow: Blow) -> int:
        """The process that a blow is for; its reader of pages is a child of the engine."""
        server = self.servers[blow.side]
        if blow.process == SERVER:
            return server.process.pid
        return child_of(server.engine_pid() if blow.process == READER else server.process.pid, blow.process)

    def wait(self) -> None:
        """Both do what they are for, nothing is held by anybody, and the engines' own checks say so."""
        began = time.monotonic()
        for server in self.servers.values():
            for name in ("requests_running", "requests_waiting", "kv_cache_usage"):
                eventually(lambda name=name, server=server: not server.figure(name))  # type: ignore[misc]
        self.held.append(time.monotonic() - began)
        (self.folder / "checked").write_text("")
        for server in self.servers.values():
            eventually(lambda server=server: self._checks_engine(server.process.pid))  # type: ignore[misc]
        decode = self.servers["decode"]
        eventually(lambda: not {"degraded", "waits_for"} & decode.raw("GET", "/ready")[2].keys())

    def _checks_engine(self, server: int) -> bool:
        checked = (self.folder / "checked").read_text().split()
        return any(str(child) in checked and ENGINE in command_of(child) for child in children_of(server))

    def stream(self, prompt: list[int], came: list[None]) -> None:
        """Asks for an answer, and notes what came. Raises what the client does."""
        text, client = "", self.servers["decode"].client()
        more: dict[str, Any] = {"temperature": 0.9, "seed": 4, "extra_body": {"ignore_eos": True}}
        for chunk in client.completions.create(model="kvern-1m", prompt=prompt, max_tokens=TOKENS, stream=True, **more):
            text += "".join(choice.text for choice in chunk.choices)
            came.append(None)
        self.answers.append((prompt, text))

    def strike(self, number: int, blow: Blow, chance: random.Random) -> None:
        """One blow while prompts are computed, handed over or answered."""
        prompts = [[1, *(chance.randrange(300, 1000) for _ in range(chance.randrange(280, 460)))] for _ in range(4)]
        came: list[None] = []
        decode, handed = self.servers["decode"], chance.randrange(STREAMS + 1)
        before = decode.figure("prompts_handed_over_total")
        point = chance.randrange(TOKENS * STREAMS // 2) if chance.random() < 0.5 else 0
        with ThreadPoolExecutor(STREAMS) as threads:
            asked = [threads.submit(self.stream, prompt, came) for prompt in prompts]
            eventually(
                lambda: (
                    all(one.done() for one in asked)  # engines here computed the prompts
                    or (point and len(came) >= point)
                    or (not point and decode.figure("prompts_handed_over_total") >= before + handed)
                )
            )
            victim = self.process(blow)
            os.kill(victim, blow.how)
            try:
                if blow.side == "decode" and blow.process == SERVER and blow.how == signal.SIGSTOP:
                    os.kill(victim, signal.SIGCONT)
                for one in asked:
                    if blow == Blow("decode", SERVER, signal.SIGKILL):
                        one.exception()  # it spoke with their clients
                    else:
                        one.result()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGCONT)
        for side, server in self.servers.items():
            if blow == Blow(side, SERVER, signal.SIGKILL):
                server.close()
                self.start(side)

    def close(self) -> None:
        for server in self.servers.values():
            if server.process.poll() is None:
                server.stop()


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv(PEER_KEY, "a secret of all servers")
    monkeypatch.setenv("UCX_TLS", request.param)
    [folder] = checked_engines.__path__
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("CHECKED_ENGINES", str(tmp_path / "checked"))
    pair = Pair(tmp_path)
    try:
        with ThreadPoolExecutor() as threads:
            [*threads.map(pair.start, ("prefill", "decode"))]
        yield pair
    finally:
        pair.close()


def check(pair: Pair, blows: list[Blow], seed: int) -> None:
    chance = random.Random(seed)
    pair.wait()
    for number, blow in enumerate(blows):
        pair.strike(number, blow, chance)
        pair.wait()
    assert pair.servers["decode"].figure("prompts_handed_over_total")
    for log in pair.folder.glob("*.log"):
        assert "AssertionError" not in log.read_text()
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=TOKENS, ignore_eos=True)
    with LLM("kvern-1m", threads=1, device="cpu", dtype="float32", max_model_len=512) as llm:
        outputs = llm.generate([prompt for prompt, _ in pair.answers], params)
    print(f"{len(blows)} blows, {len(pair.answers)} answers, held for {max(pair.held):.2f} s at most")
    assert [text for _, text in pair.answers] == [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_streams_do_not_show_what_is_killed_or_stands_still(pair: Pair) -> None:
    """The processes that start again fastest."""
    check(pair, [BLOWS[0], BLOWS[2], BLOWS[3]], 1)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", ["tcp", "shm,tcp"], indirect=True)
def test_fifty_blows(pair: Pair) -> None:
    check(pair, (BLOWS * 3)[:25], 2)
