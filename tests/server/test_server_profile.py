"""Traces of a running server's steps: it goes on serving, one is taken at a time, and refusals say why."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvern.cli.main import main
from tests.support.served import KEY, SMALL, Served, eventually, serving

ADMIN = "admin-key"
TAKEN = "is being taken already"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"user:{KEY}\nadmin:{ADMIN} admin=1\n")
    with serving(*SMALL, "--api-key-file", str(keys), "--trace-layers", "2") as served:
        yield served


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def taken(server: Served, key: str = ADMIN, **body: object) -> tuple[int, Any]:
    status, _, answer = server.raw("POST", "/v1/profile", json.dumps(body).encode(), key)
    return status, answer


def refusal(server: Served, key: str = ADMIN, **body: object) -> tuple[int, str]:
    status, answer = taken(server, key, **body)
    return status, str(answer["error"]["message"]) if status >= 400 else ""


def until_first(server: Served, **body: object) -> tuple[int, Any]:
    """Asks until no other trace is being taken: another may have been asked for first."""
    while True:
        status, answer = taken(server, **body)
        if status != 409 or TAKEN not in answer["error"]["message"]:
            return status, answer


def waiting(server: Served, pool: ThreadPoolExecutor) -> "Future[tuple[int, Any]]":
    """A trace that waits for steps, of which there are none."""
    asked = pool.submit(until_first, server, steps=12, seconds=100)
    eventually(lambda: TAKEN in refusal(server, steps=1, seconds=0.01)[1])
    return asked


def answer_of(server: Served) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 7, "temperature": 0.9, "ignore_eos": True}
    status, _, answer = server.raw("POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def steps_of(trace: dict[str, Any]) -> list[str]:
    names = [str(event.get("name")) for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [name for name in names if name.startswith("step ")]


def test_a_trace_has_the_next_steps_and_answers_stay_the_same(server: Served, pool: ThreadPoolExecutor) -> None:
    expected = answer_of(server)
    asked = waiting(server, pool)
    status, reason = refusal(server)
    assert status == 409 and TAKEN in reason
    assert answer_of(server) == expected
    status, trace = asked.result()
    assert status == 200 and steps_of(trace) == [f"step {number}" for number in range(1, 13)]
    inside = {str(event["name"]) for event in trace["traceEvents"] if event.get("cat") in ("cpu_op", "user_annotation")}
    assert any(name.startswith(("kvern_", "aten::")) for name in inside), "what steps compute"
    assert answer_of(server) == expected


@pytest.mark.nightly
def test_steps_that_did_not_run_are_missing(server: Served, pool: ThreadPoolExecutor) -> None:
    status, reason = refusal(server, steps=3, seconds=0.05)
    assert status == 409 and "no step ran within 0.05 s: send requests" in reason
    asked = pool.submit(until_first, server, steps=100, seconds=5)
    eventually(lambda: TAKEN in refusal(server, steps=1, seconds=0.01)[1])
    answer_of(server)
    status, trace = asked.result()
    assert status == 200 and 30 < len(steps_of(trace)) < 100


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"steps": 0}, 400, "steps is 0"),
        ({"steps": 101}, 400, "1 to 100"),
        ({"steps": 1.5}, 400, "steps"),
        ({"seconds": 0}, 400, "seconds is 0"),
        ({"seconds": 1e9}, 400, "120 at most"),
        ({"engine": "7"}, 400, "this model's are 0"),
        ({"model": "other"}, 404, "there is no model"),
        ({"step": 1}, 400, "step is unknown here"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_is_refused(body: dict[str, object], status: int, reason: str, server: Served) -> None:
    found, said = refusal(server, **body)
    assert found == status and reason in said


def test_others_than_administrators_are_refused(server: Served) -> None:
    status, reason = refusal(server, KEY)
    assert status == 403 and "admin=1" in reason


@pytest.mark.nightly
def test_the_engine_may_die_meanwhile(server: Served, pool: ThreadPoolExecutor) -> None:
    asked = waiting(server, pool)
    server.kill_engine()
    status, answer = asked.result()
    assert status >= 500 and "engine" in answer["error"]["message"]
    answer_of(server)
    again = waiting(server, pool)
    answer_of(server)
    assert again.result()[0] == 200


def test_the_command_writes_the_trace(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ("--base-url", f"http://{server.host}:{server.port}", "--api-key", ADMIN)
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            answer_of(server)

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        assert main(["profile", *at, "--steps", "5", "--output", str(tmp_path / "trace.json")]) == 0
    finally:
        stop.set()
        talking.join()
    assert len(steps_of(json.loads((tmp_path / "trace.json").read_text()))) == 5
    refused: list[tuple[list[str], str]] = [
        ([*at], "give output"),
        ([*at, "--output", str(tmp_path / "no" / "trace.json")], "there is no folder"),
        ([*at, "--output", str(tmp_path / "t.json"), "--steps", "500"], "1 to 100"),
        (["--base-url", "http://127.0.0.1:9", "--output", str(tmp_path / "t.json")], "does not answer"),
    ]
    for arguments, reason in refused:
        assert main(["profile", *arguments]) == 2
        assert reason in capsys.readouterr().err


def test_parts_and_layers_are_events_of_the_trace(server: Served, pool: ThreadPoolExecutor) -> None:
    asked = waiting(server, pool)
    answer_of(server)
    status, trace = asked.result()
    assert status == 200
    names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    for part in ("embedding", "layer 0 mixer", "layer 1 mlp", "head", "sampling"):
        assert names.count(part) >= 12, part


def test_engines_tell_where_the_time_of_a_step_goes(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    answer_of(server)
    [engine] = server.raw("GET", "/v1/engines", key=ADMIN)[2]["data"]
    decode = next(kind for kind in engine["step_parts"] if kind["step"] == "decode")
    assert decode["measured"] > 0 and decode["seconds"] > 0 and decode["tokens"] >= 1
    parts = {part["part"]: part for part in decode["parts"]}
    assert {"embedding", "attention", "mlp", "head", "sampling"} <= parts.keys()
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0, abs=0.01)
    assert parts["mlp"]["bound_seconds"] > 0 and all(seconds > 0 for seconds in decode["layers"])
    assert server.figure("layer_steps_total", ADMIN, step="decode") >= decode["measured"]
    assert server.figure("layer_seconds_total", ADMIN, part="mlp") > 0
    url = server.url.removesuffix("/v1")
    assert main(["top", "--url", url, "--api-key", ADMIN, "--once", "--interval", "1"]) == 0
    shown = capsys.readouterr().out
    assert "decode steps of" in shown and "attention" in shown
