"""Engines that die, hang or do not start: who is to blame ends, everybody else gets their answer to the letter."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvern.serving.workload
from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.errors import RequestFailed
from kvern.serving.child import EngineChild
from kvern.serving.client import EngineClient
from kvern.serving.link import EngineLink
from kvern.serving.wire import AddRequest, WireMessage, encode
from kvern.serving.workload import Generation
from tests.support.engine_deaths import LENGTH, PROMPTS, Streams, deadly, with_processors
from tests.support.served import ENGINE, PATIENCE, SMALL, STORY, Served, child_of, command_of, eventually, serving
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Each stream's text, of an engine that nobody disturbs."""
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=LENGTH, ignore_eos=True)
    with LLM("kvern-1m", threads=1, dtype="float32") as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_deadly_requests_among_thirty_streams(tmp_path: Path, expected: list[str], count: int) -> None:
    with with_processors(tmp_path) as served, concurrent.futures.ThreadPoolExecutor(64) as pool:
        client = served.client().with_options(timeout=500)
        streams = Streams(client, pool)
        streams.begun.wait(PATIENCE)
        errors = [pool.submit(deadly, client, "exit", number % 4) for number in range(count)]
        assert all("was alone when the engine died" in error.result(400) for error in errors)
        assert streams.texts() == expected
        assert served.figure("requests_refused_total", reason="crash") == count
        eventually(lambda: served.figure("engine_ready") == 1)  # the last may have died when all streams had ended


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_request_by_which_the_engine_is_killed_or_hangs(tmp_path: Path, expected: list[str], how: str) -> None:
    with with_processors(tmp_path, "--engine-timeout", "3") as served:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            client = served.client()
            streams = Streams(client, pool)
            streams.begun.wait(PATIENCE)
            assert "was alone when the engine died" in deadly(client, how, 2)
            assert streams.texts() == expected
        most = 7 if how == "kill" else 3  # fewer where streams end before it is tried alone
        assert 2 <= served.figure("engine_restarts_total") <= most


@pytest.mark.nightly
@pytest.mark.parametrize("count", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_kills_in_quick_succession_blame_nobody(expected: list[str], count: int) -> None:
    """Also while the next engine loads, as soon as it computes, and by other signals that come from outside."""
    with serving(*SMALL) as served, concurrent.futures.ThreadPoolExecutor(32) as pool:
        streams = Streams(served.client(), pool)
        streams.begun.wait(PATIENCE)
        for number, sent in enumerate([signal.SIGKILL, signal.SIGHUP, *[signal.SIGKILL] * (count - 2)]):
            dead = kill(served, sent)
            eventually(lambda dead=dead: engine_pid(served) not in (None, dead))
            if number % 3 < 2:
                eventually(lambda: served.figure("engine_ready") == 1)
        assert streams.texts() == expected
        assert served.figure("requests_refused_total", reason="crash") == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "guessing", [["--draft-model", "kvern-1m"], pytest.param(["--proposer", "ngram"], marks=pytest.mark.nightly)]
)
def test_streams_whose_drafts_die_with_the_engine(guessing: list[str]) -> None:
    """Greedy and drawn, they go on as without drafts, and with others."""
    prompts = ["one two three four five six seven " * 4, "Once upon a time"]
    params = [SamplingParams(temperature=float(i % 2), seed=9, max_tokens=LENGTH, ignore_eos=True) for i in range(4)]
    with LLM("kvern-12m", threads=1, dtype="float32", max_model_len=512, speculation="off") as llm:
        outputs = llm.generate([prompts[i // 2] for i in range(4)], params)
    expected = [output.outputs[0].text for output in outputs]
    with serving("kvern-12m", *SMALL[1:], *guessing) as served, concurrent.futures.ThreadPoolExecutor(4) as pool:
        begun = threading.Barrier(5)

        def read(place: int) -> str:
            asked = STORY | {"model": "kvern-12m", "max_tokens": LENGTH, "temperature": place % 2}
            stream = served.client().completions.create(prompt=prompts[place // 2], seed=9, stream=True, **asked)
            text = "".join(next(stream).choices[0].text for _ in range(10))
            begun.wait(PATIENCE)
            return text + "".join(chunk.choices[0].text for chunk in stream)

        texts = [pool.submit(read, place) for place in range(4)]
        begun.wait(PATIENCE)
        kill(served, signal.SIGKILL)
        assert [text.result() for text in texts] == expected
        assert served.figure("engine_restarts_total") == 1
        assert served.figure("spec_decode_num_draft_tokens_total") > 0


@pytest.mark.nightly
def test_an_engine_that_stops_while_it_loads_is_replaced(expected: list[str]) -> None:
    with serving(*SMALL, "--engine-timeout", "3") as served, concurrent.futures.ThreadPoolExecutor(32) as pool:
        streams = Streams(served.client(), pool)
        streams.begun.wait(PATIENCE)
        dead = kill(served, signal.SIGKILL)
        eventually(lambda: engine_pid(served) not in (None, dead))
        kill(served, signal.SIGSTOP)
        assert streams.texts() == expected


@pytest.mark.nightly
def test_no_engine_for_a_while(tmp_path: Path) -> None:
    """Streams wait; others are told when to come again, and why; nobody has to start the server again."""
    folder = make_tiny_model(tmp_path / "model")
    body: dict[str, Any] = {"prompt": "a b c", "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}
    log = tmp_path / "log"
    with serving("--model", str(folder), "--threads", "1", "--served-model-name", "tiny", log=log) as served:
        client = served.client()
        whole = client.completions.create(model="tiny", **body).choices[0].text
        stream = client.completions.create(model="tiny", stream=True, **body)
        text = next(stream).choices[0].text
        folder.rename(tmp_path / "away")
        kill(served, signal.SIGKILL)
        eventually(lambda: "does not stay alive" in str(served.raw("GET", "/ready")[2]))
        status, headers, refused = served.raw("POST", "/v1/completions", json.dumps({"prompt": "a"}).encode())
        assert status == 503 and 1 <= int(headers["retry-after"]) <= 60
        assert "does not stay alive" in refused["error"]["message"]
        assert served.figure("engine_ready") == 0 and served.raw("GET", "/health")[0] == 200
        (tmp_path / "away").rename(folder)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == whole
        assert served.raw("GET", "/ready")[2] == {"ready": True}
    assert "another engine is started in" in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.nightly
def test_the_folder_of_the_socket_may_go(expected: list[str]) -> None:
    """As cleaners of temporary folders do."""
    with serving(*SMALL) as served:
        client = served.client()
        [folder] = {Path(part).parent for part in command_of(served.engine_pid()).split("\0") if "/running" in part}
        stream = client.completions.create(prompt=PROMPTS[0], seed=9, stream=True, **(STORY | {"max_tokens": LENGTH}))
        text = next(stream).choices[0].text
        shutil.rmtree(folder)
        kill(served, signal.SIGKILL)
        assert text + "".join(chunk.choices[0].text for chunk in stream) == expected[0]
    assert not list(folder.parent.glob(folder.name))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", ["died", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("resume", "hear", "prepare"))]
)
def test_the_supervisor_outlives_what_its_owner_raises(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_raise_once(method, monkeypatch))


async def _raise_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    async with EngineClient(EngineConfig(model="kvern-1m", threads=1, dtype="float32")) as client:

        async def answer(disturb: bool = False) -> list[int]:
            news = asyncio.Event()
            generation = await client.replicas.submit("Once upon a time", params, news=news)
            async for _ in client.replicas.follow([generation], news):
                if disturb and generation.output.outputs[0].token_ids:
                    disturb = False
                    os.kill(child_of(os.getpid(), ENGINE), signal.SIGKILL)
            return generation.output.outputs[0].token_ids

        [replica] = client.replicas
        expected, whole, raised = await answer(), getattr(replica, method), threading.Event()

        def broken(*arguments: object) -> object:
            if not raised.is_set():
                raised.set()
                raise ArithmeticError("as planned")
            return whole(*arguments)

        monkeypatch.setattr(replica, method, broken)
        assert await answer(disturb=True) == expected
        assert raised.is_set()
        assert await answer() == expected


PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


async def tokens_of(client: EngineClient, prompt: str) -> list[int]:
    news = asyncio.Event()
    generation = await client.replicas.submit(prompt, PARAMS, news=news)
    async for _ in client.replicas.follow([generation], news):
        pass
    return generation.output.outputs[0].token_ids


@pytest.mark.nightly
def test_who_ends_the_engine_before_any_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the engine dies as it gets the request."""

    async def run() -> None:
        async with EngineClient(EngineConfig(model="kvern-1m", threads=1, dtype="float32")) as client:
            expected = [await tokens_of(client, prompt) for prompt in PROMPTS[:3]]
            marked = client.tokenizer.encode("I end it")

            def deadly(message: WireMessage) -> bytes:
                if isinstance(message, AddRequest) and message.spec.prompt.token_ids == marked:
                    os.kill(child_of(os.getpid(), ENGINE), signal.SIGKILL)
                return encode(message)

            monkeypatch.setattr(kvern.serving.workload, "encode", deadly)
            others = [asyncio.create_task(tokens_of(client, prompt)) for prompt in PROMPTS[:3]]
            with pytest.raises(RequestFailed, match="was alone when the engine died"):
                await tokens_of(client, "I end it")
            assert await asyncio.gather(*others) == expected

    asyncio.run(run())


class Unheard(EngineChild):
    """A process that cannot be listened to, as where no port is free."""

    def listen(self, socket: object) -> None:
        raise OSError("as planned")


def test_an_engine_that_cannot_be_listened_to_leaves_nothing() -> None:
    async def run() -> None:
        process = Unheard()
        with pytest.raises(OSError, match="as planned"):
            await EngineLink.start(EngineConfig(model="kvern-1m"), process)
        assert await process.wait() == -signal.SIGKILL
        assert not Path(process._folder.name).exists()

    asyncio.run(run())


def test_who_cannot_be_sent_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with EngineClient(EngineConfig(model="kvern-1m", threads=1, dtype="float32")) as client:
            expected, message = await tokens_of(client, PROMPTS[0]), Generation.message

            def broken(generation: Generation) -> Any:
                if generation.output.prompt == "I cannot be sent":
                    raise RecursionError("as planned")
                return message(generation)

            monkeypatch.setattr(Generation, "message", broken)
            with pytest.raises(RequestFailed, match="cannot be sent to the engine: RecursionError: as planned"):
                await tokens_of(client, "I cannot be sent")
            assert await tokens_of(client, PROMPTS[0]) == expected

    asyncio.run(run())


def test_an_engine_ends_with_a_server_that_is_killed_while_it_loads() -> None:
    process = subprocess.Popen([sys.executable, "-m", "kvern", "serve", "--port", "0", *SMALL], stderr=subprocess.PIPE)
    with process:
        while (engine := engine_pid(process.pid)) is None:
            assert process.poll() is None
            time.sleep(0.01)
        [folder] = {Path(part).parent for part in command_of(engine).split("\0") if "/running" in part}
        process.kill()
    eventually(lambda: not Path(f"/proc/{engine}").exists() or "Z" in Path(f"/proc/{engine}/stat").read_text())
    assert not folder.exists()


def engine_pid(served: Served | int) -> int | None:
    """None between two engines."""
    with contextlib.suppress(ValueError, OSError):
        return child_of(served if isinstance(served, int) else served.process.pid, ENGINE)
    return None


def kill(served: Served, how: signal.Signals) -> int:
    pid = served.engine_pid()
    os.kill(pid, how)
    return pid
