"""``kvern top``: what it shows of a server, and that it outlives one."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvern.cli.main import main
from kvern.cli.output import print_lines, print_tables
from kvern.cli.remote import RemoteServer
from kvern.cli.top import EngineName, Top, read_figures, read_states, row_of
from kvern.engine.step_ring import read_steps
from kvern.errors import ConfigError
from tests.support.sampling import examples
from tests.support.served import Served, serving

METRICS = """
kvern:engine_ready{engine="0",model_name="big"} 1.0
kvern:engine_ready{engine="1",model_name="big"} 0.0
kvern:num_requests_running{engine="0",model_name="big"} 3.0
kvern:num_requests_waiting{engine="0",model_name="big"} 2.0
kvern:generation_tokens_total{engine="0",model_name="big"} TOKENS
kvern:prefix_cache_queries_total{engine="0",model_name="big"} TOKENS
kvern:prefix_cache_hits_total{engine="0",model_name="big"} 5.0
kvern:gpu_memory_used_bytes{engine="0",model_name="big"} 7e10
kvern:gpu_memory_total_bytes{engine="0",model_name="big"} 15e10
kvern:gpu_utilization{engine="0",model_name="big"} 0.98
kvern:kv_cache_usage_perc{engine="0",model_name="big"} 0.5
kvern:model_state{model_name="asleep one"} 1.0
kvern:http_requests_total{key="me",model_name="other",status="200"} 1.0
"""
SERVERS = [
    {"model": "big", "prefill_server": "a:1", "ready": True, "computed_prompts": 12, "computed_tokens": 98304},
    {"model": "big", "prefill_server": "b:1", "ready": False, "reason": "it does not answer", "failed_prompts": 3},
]
VERDICT = {"cause": "rows", "share": 0.7, "evidence": "2 requests wait", "action": "more rows"}


class Canned(RemoteServer):
    """A server that answers what it was given; None: it is away."""

    def __init__(self, *tokens: float | None) -> None:
        super().__init__("http://there")
        object.__setattr__(self, "tokens", list(tokens))

    tokens: list[float | None]

    def read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        if self.tokens[0] is None:
            self.tokens.pop(0)
            raise ConfigError("http://there does not answer")
        if path == "/v1/engines":
            requests = [{"id": "r1", "seconds": 12.34, "tokens": 1500}]
            told = [{"model": "big", "engine": "0", "ready": True, "verdict": VERDICT, "oldest_requests": requests}]
            told.append({**told[0], "engine": "1", "verdict": None, "oldest_requests": []})
            self.tokens.pop(0)
            return json.dumps({"data": told, "prefill_servers": SERVERS}).encode()
        return METRICS.replace("TOKENS", str(self.tokens[0])).encode()


def cells(top: Top) -> list[list[str]]:
    """The rows of the first table."""
    table = next(top.tables())
    return [list(row) for row in zip(*(map(str, column.cells) for column in table.columns), strict=True)]


def test_engines_and_models_are_rows() -> None:
    top = Top(Canned(10.0))
    top.look()
    assert [row[:4] for row in cells(top)] == [
        ["big 0", "ready", "3", "2"],
        ["big 1", "not ready", "0", "0"],
        ["asleep one", "asleep", "0", "0"],
    ]
    assert cells(top)[0][6:] == ["50%", "", "70 / 150", "98%"]
    servers = [*top.tables()][1]
    rows = zip(*(map(str, column.cells) for column in servers.columns), strict=True)
    assert [*rows] == [("a:1", "ready", "0", "12", "98,304", "0"), ("b:1", "not ready: it does not answer", *"0003")]
    assert list(top.lines()) == ["big 0: 2 requests wait (70% of the time): more rows"]


def test_rates_are_between_two_looks() -> None:
    name = EngineName("big", "0")
    before, now = (read_figures(METRICS.replace("TOKENS", tokens))[name] for tokens in ("10", "60"))
    assert row_of(name, now, before, 2.0)[5] == "25"
    assert row_of(name, before, now, 2.0)[5] == "0", "its engine has started anew"
    assert row_of(name, now, {}, 2.0)[5] == "0", "it was not there before"
    with pytest.raises(ConfigError, match="Prometheus"):
        read_figures("<html>")


def test_what_was_seen_stays_while_the_server_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    top = Top(Canned(10.0, None, None, 20.0))
    assert not list(top.tables()) and not list(top.lines())
    for failure in (None, "http://there does not answer", "http://there does not answer", None):
        top.look()
        assert top.failure == failure
        assert len(cells(top)) == 3
    print_tables(*top.tables())
    assert "r1" in (told := capsys.readouterr().out) and "12.3" in told and "1,500" in told


def figures(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    names = st.sampled_from(["engine_ready", "model_state", "gpu_utilization", "generation_tokens_total", "x"])
    labels = st.sampled_from(["", '{model_name="a"}', '{model_name="a",engine="1"}', '{model_name="\x1b[2J"', "{le=}"])
    return st.lists(st.builds("kvern:{}{} {}".format, names, labels, values), max_size=5).map("\n".join)


VALUES = figures(st.sampled_from(["1", "0", "NaN", "+Inf", "-Inf", "1e308", "-7", "2.5", "9e99999", "word", ""]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def told_as(fields: dict[str, Any], required: st.SearchStrategy[Any] = JSON) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, of the right form or of any."""
    return st.fixed_dictionaries({}, optional={name: right | required for name, right in fields.items()})


TEXT = st.text(st.characters(), max_size=5)
OLDEST = told_as({"id": TEXT, "seconds": st.floats(0), "tokens": st.integers()})
SAID = told_as({"evidence": TEXT, "action": TEXT, "share": st.floats(0, 1)})
PART = told_as({"part": TEXT, "seconds": st.floats(), "share": st.floats(), "bound_seconds": st.none() | st.floats()})
STEP = told_as({"step": TEXT, "seconds": st.floats(), "tokens": st.floats(), "parts": st.lists(PART, max_size=2)})
STATES = {"model": TEXT, "engine": TEXT, "verdict": SAID, "oldest_requests": st.lists(OLDEST), "steps_file": TEXT}
STATES |= {"step_parts": st.lists(STEP, max_size=2)}
ENGINES = JSON | st.fixed_dictionaries({"data": st.lists(told_as(STATES), max_size=3) | JSON})
ANSWERS = st.tuples(VALUES.map(str.encode) | st.binary(), ENGINES.map(json.dumps).map(str.encode) | st.binary())


class Garbled(RemoteServer):
    """A server that answers anything."""

    def __init__(self, answers: list[tuple[bytes, bytes]]) -> None:
        super().__init__("http://there")
        object.__setattr__(self, "answers", answers)

    answers: list[tuple[bytes, bytes]]

    def read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        return self.answers[0][0] if path == "/metrics" else self.answers.pop(0)[1]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(ANSWERS, min_size=1, max_size=3))
@example([(METRICS.replace("TOKENS", "1").encode(), b'{"data": [{"engine": "0"}]}')])
@example([(b"", b"[" * 100_000)])
@example([(b"", json.dumps({"data": [{"model": "a", "steps_file": "/\0\ud800"}]}).encode())])
def test_whatever_is_answered_is_shown_or_one_line(answers: list[tuple[bytes, bytes]]) -> None:
    answers = list(answers)
    top = Top(Garbled(answers))
    while answers:
        before = len(answers)
        top.look()
        if len(answers) == before:
            answers.pop(0)  # its figures were wrong already
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print_tables(*top.tables())
            print_lines(*top.lines())
        said = out.getvalue().replace("\n", "") + (top.failure or "")
        assert said.isprintable()


def test_the_line_says_what_is_wrong() -> None:
    for content, wrong in (b'{"data": [{}]}', "`model`"), (b"{}", "`data`"), (b"<html>", "malformed"):
        with pytest.raises(ConfigError, match=wrong):
            read_states(content)
    assert read_states(b'{"data": [{"model": "a", "new": 1}]}').data[0].engine == ""


def canned(answer: bytes) -> Iterator[str]:
    """The URL of a server that answers these bytes and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answers() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rb") as asked:
                        while asked.readline().strip():
                            pass
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                        asked.read()

        thread = threading.Thread(target=answers)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


REFUSED = b"HTTP/1.1 503 no\r\nconnection: close\r\n\r\n"
WRONG = {
    "cut off": (b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\nshort", "IncompleteRead"),
    "refusal cut off": (b"HTTP/1.1 503 no\r\ncontent-length: 90\r\n\r\n{}", "IncompleteRead"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", "does not answer as kvern serve does: BadStatusLine"),
    "error in words": (REFUSED + b'{"error": "out of order"}', "refuses: out of order"),
    "error as list": (REFUSED + b'{"error": {"message": null}}', "refuses: status 503"),
    "too deep": (REFUSED + b"[" * 100_000, "refuses: status 503"),
    "colours": (REFUSED + b'{"error": "a\\u001b[31m\\nb"}', "refuses: a [31m b"),
    "no error": (REFUSED + b"[]", "refuses: status 503"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_is_none_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, reason = WRONG[case]
    with contextlib.contextmanager(canned)(answer) as url:
        top = Top(RemoteServer(url))
        for _ in range(2):  # it is asked again
            top.look()
            assert reason in str(top.failure)
        assert main(["top", "--once", "--url", url]) == 1
        assert main(["profile", "--base-url", url, "--output", str(tmp_path / "trace.json")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all(reason in line for line in told)


def test_a_url_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://one two:8000"]) == 1
    assert "http://one two:8000 does not answer" in capsys.readouterr().err


def test_one_look_at_a_real_server(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    url = server.url.removesuffix("/v1")
    server.client().completions.create(model="kvern-1m", prompt="Once", max_tokens=20)
    assert main(["top", "--once", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "kvern-1m  ready" in shown
    assert re.search(r"steps .*p50 ms.*\n.*\n kvern-1m +\d+\.\d +\d+ +\d+\.\d\d .*[▁-█]{20} *\n", shown)
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr()
    assert not told.out and "does not answer" in told.err and "Traceback" not in told.err


def test_the_file_of_steps_ends_with_its_engine(tmp_path: Path) -> None:
    with serving("--model", "kvern-1m", "--threads", "1") as served:
        told = served.raw("GET", "/v1/engines")[2]["data"][0]
        file = Path(told["steps_file"])
        assert file.stat().st_mode & 0o777 == 0o600
        served.client().completions.create(model="kvern-1m", prompt="Once", max_tokens=5)
        assert len(read_steps(file)) >= 5
    assert not file.exists()


def test_a_terminal_shows_it_until_it_is_interrupted(server: Served) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "kvern", "top", "--url", server.url.removesuffix("/v1")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown, until = b"", time.monotonic() + 60
    try:
        while b"kvern-1m" not in shown and time.monotonic() < until:
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(ours)
    assert b"kvern-1m" in shown and b"Traceback" not in shown
