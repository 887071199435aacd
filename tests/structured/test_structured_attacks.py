"""Forms that take too long or too much: refused soon or served, while others are answered and the engine lives."""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.errors import InvalidParameter
from kvern.io.children import READY, receive, send
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.server.app import Server
from kvern.server.config import ServerConfig
from kvern.server.keys import KeyRing
from kvern.serving.client import EngineClient
from kvern.structured import apart, masks, worker
from kvern.structured.apart import GrammarProcesses
from kvern.structured.grammar import Grammars
from kvern.structured.matchers import SPARE_BYTES, GrammarLibrary, Kept, Matchers, size
from tests.support.grammars_apart import compiled_apart
from tests.support.served import SMALL, Served, children_of, command_of, eventually, serving

SOON = 60.0
"""Seconds of processors in the server and its engine; each of these once took more, or its neighbours did."""


def patterns(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^p{number}_": {"type": "string"} for number in range(count)}}


def optional(count: int) -> dict[str, Any]:
    fields = {f"property_{number}": {"type": "string"} for number in range(count)}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def choices(count: int) -> dict[str, Any]:
    def variant(name: str) -> dict[str, Any]:
        only = {"properties": {name: {"type": "string"}}, "required": [name], "additionalProperties": False}
        return {"type": "object", **only}

    return {"anyOf": [variant(f"a{number}") for number in range(count)]}


RULES = "\n".join(f'r{number}: "a{number}" | r{number + 1} "b"' for number in range(1999))
ATTACKS: dict[str, dict[str, Any]] = {
    "patternProperties": {"guided_json": patterns(600)},
    "optional properties": {"guided_json": optional(10_000)},
    "anyOf": {"guided_json": choices(3000)},
    "rules": {"guided_grammar": f'start: r0\n{RULES}\nr1999: "z"'},
    "an optional letter many times": {"guided_regex": "a?" * 5000},
    "texts": {"guided_choice": [f"text number {number} is this" for number in range(2000)]},
    "many texts": {"guided_choice": [f"text number {number} is this" for number in range(10_000)]},
    "nested repetitions of rules": {"guided_grammar": 'start: a{0,1000}\na: b{0,1000}\nb: "x" | "xx"'},
    "a tool": {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": patterns(599)}}],
        "tool_choice": "required",
    },
}


LONG = tuple("2048" if option == "512" else option for option in SMALL)
"""So that a tool's schema fits into the prompt."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(*LONG) as served:
        yield served


def ask(server: Served, body: dict[str, Any]) -> tuple[int, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    prompt = {} if "messages" in body else {"prompt": "a"}
    status, _, answer = server.raw("POST", path, json.dumps({"max_tokens": 40, **prompt, **body}).encode())
    return status, answer


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ATTACKS)
def test_others_do_not_wait(server: Served, name: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        begun = server.worked()
        attack = threads.submit(ask, server, ATTACKS[name])
        plain = []
        while not attack.done() or len(plain) < 3:
            start = server.worked()
            assert ask(server, {"max_tokens": 1})[0] == 200
            plain.append(server.worked() - start)
        status, answer = attack.result()
        assert status == 200 or (status == 400 and "use fewer" in str(answer)), answer
        assert server.worked() - begun < SOON and max(plain) < SOON / 4
    assert server.figure("engine_restarts_total") == 0


def test_clients_that_leave(server: Served) -> None:
    """Many slow forms whose clients do not wait; a good form and the end of the server come soon after."""
    for number in range(6):
        body = json.dumps({"prompt": "a", "guided_json": patterns(700 + number)}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(head.encode() + body)
    start = server.worked()
    assert ask(server, {"guided_regex": "[ab]{3}"})[0] == 200
    assert server.worked() - start < SOON


def workers(server: Served) -> list[int]:
    return [pid for pid in children_of(server.process.pid) if "kvern.structured.worker" in command_of(pid)]


def test_who_compiles_gives_way_to_those_who_answer(server: Served) -> None:
    assert ask(server, {"guided_regex": "[ab]{3}"})[0] == 200
    compiling = server.child("kvern.structured.worker")
    expected = min(19, os.getpriority(os.PRIO_PROCESS, server.engine_pid()) + 10)  # 19: the tests may run at the lowest
    for pid in (compiling, *children_of(compiling)):
        assert os.getpriority(os.PRIO_PROCESS, pid) == expected


def test_a_refusal_is_remembered(server: Served) -> None:
    """Nobody who compiles is needed for the second."""

    def refused() -> None:
        status, answer = ask(server, {"guided_json": patterns(650)})
        assert status == 400 and "takes more than 2 s: use fewer properties" in answer["error"]["message"]

    refused()
    [compiling] = workers(server)
    for pid in (*children_of(compiling), compiling):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not workers(server))
    refused()
    assert not workers(server)


def test_a_worker_that_is_killed_is_replaced(server: Served) -> None:
    assert ask(server, {"guided_regex": "[ab]{4}"})[0] == 200
    first = server.child("kvern.structured.worker")
    for child in children_of(first):
        os.kill(child, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    assert ask(server, {"guided_regex": "[ab]{5}"})[0] == 200
    assert server.child("kvern.structured.worker") != first


@pytest.mark.nightly
def test_the_worker_ends_with_its_server() -> None:
    with serving(*SMALL) as served:
        assert ask(served, {"guided_regex": "[ab]{4}"})[0] == 200
        processes = [worker := served.child("kvern.structured.worker"), *children_of(worker)]
        os.kill(served.process.pid, signal.SIGKILL)
        eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in processes))


def greedy(structured: StructuredOutput, library: GrammarLibrary) -> str:
    """A compiler that does what a form says to its process."""
    match structured.regex:
        case "memory":
            return str(len(b"x" * (4 << 30)))
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
    return ""


@pytest.mark.parametrize("form", ["memory", "crash"])
def test_a_process_that_dies_costs_its_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "compile_grammar", greedy)
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        faulthandler.disable()
        try:
            worker.serve(theirs, GrammarLibrary(resolve_model("kvern-1m"), 4096))
        finally:
            os._exit(1)
    theirs.close()
    with ours:
        assert ours.recv(1) == READY
        text = json.dumps({"regex": form}).encode()
        send(ours, text)
        assert receive(ours) is None
    assert os.waitpid(child, 0)[1] != 0


@pytest.mark.nightly
def test_owners_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner's slow forms stand behind each other, and another's good one beside them."""
    monkeypatch.setattr(apart, "LONGEST_WAIT", 200.0)

    async def told() -> list[str]:
        with LLM("kvern-1m", threads=1) as llm:
            grammars = Grammars(resolve_model("kvern-1m"), llm.spec.vocab_size, True)
        processes, ended = GrammarProcesses(grammars), []

        async def compile_one(owner: str, form: StructuredOutput) -> None:
            with contextlib.suppress(InvalidParameter):
                await compiled_apart(processes, grammars, form, owner)
            ended.append(owner)

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(compile_one("greedy", StructuredOutput(json=patterns(500 + number))))
            await asyncio.sleep(0)
            group.create_task(compile_one("other", StructuredOutput(regex="[ab]+")))
        await processes.close()
        return ended

    assert asyncio.run(told()) == ["other", "greedy", "greedy", "greedy"]


def test_matchers_that_are_kept_are_bounded() -> None:
    grammars = Grammars(resolve_model("kvern-1m"), 4096)
    store = Matchers(grammars.library)
    grammar = grammars.compile(StructuredOutput(json=optional(400)))
    for matcher in store.take([grammar] * 100):
        store.give_back(grammar, matcher)
    kept = store._spare
    assert 1 < len(kept) <= SPARE_BYTES // size(grammar) < 100
    assert isinstance(kept, Kept) and kept.take("another") is None


def test_an_answer_that_takes_too_long_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is made small, so that an honest form exceeds it."""
    monkeypatch.setattr(masks, "FOLLOWING_SECONDS", 0.0)
    monkeypatch.setattr(masks, "STEADY_SECONDS", 0.0)
    with LLM("kvern-1m", threads=1, max_model_len=256) as llm:
        bound = SamplingParams(temperature=0, max_tokens=8, structured=StructuredOutput(regex="[a-z]{20}"))
        free = SamplingParams(temperature=0, max_tokens=8)
        slow, other = llm.generate(["a", "b"], [bound, free], on_error="return")
        assert "takes too long to follow" in str(slow.failure)
        assert len(other.outputs[0].token_ids) == 8 or other.outputs[0].finish_reason == "stop"


def test_whose_turn_does_not_come_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "LONGEST_WAIT", 0.2)

    async def ask_twice() -> list[httpx2.Response]:
        async with EngineClient(EngineConfig(model="kvern-1m", threads=1)) as client:
            app = Server([client], ServerConfig(), KeyRing(ServerConfig())).app()
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as http:
                bodies = [{"prompt": "a", "guided_json": patterns(500 + number)} for number in range(2)]
                return await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))

    refused, busy = asyncio.run(ask_twice())
    assert refused.status_code == 400 and "use fewer" in refused.json()["error"]["message"]
    assert busy.status_code == 429 and int(busy.headers["retry-after"]) > 0
    assert busy.json()["error"]["type"] == "rate_limit_error"
