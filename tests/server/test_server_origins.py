"""Who may talk to a server without keys: pages of a browser, names, sockets; and how it begins and ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern.cli.main import main
from tests.support.raw_requests import TEXT, connect, form, received
from tests.support.served import ENGINE, SMALL, Served, children_of, command_of, eventually, serving


def ask(server: Served, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
    """Status and head of an answer to a request with these headers."""
    head = "".join(
        f"{name}: {value}\r\n" for name, value in ({"Host": f"{server.host}:{server.port}"} | headers).items()
    )
    with connect(server) as connection:
        head = f"{method} {path} HTTP/1.1\r\n{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        said = received(connection).decode()
    return int(said.split()[1]), said.lower()


SMALL_BODY = b'{"prompt": "Once", "max_tokens": 1}'
EVIL, SITE = {"Origin": "http://evil.example"}, "Sec-Fetch-Site"


def test_pages_of_other_origins(server: Served) -> None:
    own = f"http://{server.host}:{server.port}"
    for headers, status in (
        ({}, 200),
        ({"Origin": own}, 200),
        ({"Origin": own, SITE: "same-origin"}, 200),
        ({"Origin": "https://proxy.example", SITE: "same-origin"}, 200),
        (EVIL, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"http://{server.host}:1"}, 403),
        (EVIL | {SITE: "cross-site"}, 403),
        ({SITE: "cross-site"}, 403),
        ({SITE: "same-site"}, 403),
    ):
        for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}):
            assert ask(server, "POST", TEXT, headers | kind, SMALL_BODY)[0] == status, headers
    kind, body = form()
    assert ask(server, "POST", "/v1/files", EVIL | {"Content-Type": kind.decode()}, body)[0] == 403
    preflight = EVIL | {"Access-Control-Request-Method": "POST"}
    assert ask(server, "OPTIONS", TEXT, preflight)[0] == 403
    assert ask(server, "GET", "/v1/files", EVIL)[0] == 403
    assert ask(server, "GET", "/health", EVIL)[0] == ask(server, "GET", "/", {SITE: "cross-site"})[0] == 200
    assert "access-control" not in ask(server, "GET", "/", EVIL)[1]


def test_names_that_point_at_this_machine(server: Served) -> None:
    for host, status in (
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7:8000", 200),
    ):
        found, said = ask(server, "GET", "/v1/files", {"Host": host})
        assert found == status, host
        assert (status == 200) != ("allowed_hosts" in said)


def test_origins_and_hosts_that_are_allowed_and_a_path_with_a_newline_in_the_log(tmp_path: Path) -> None:
    options = ("--allowed-origins", "http://evil.example", "--allowed-hosts", "evil.example")
    log = tmp_path / "log"
    with serving(
        *SMALL, *options, "--data-dir", str(tmp_path / "data"), "--log-requests", "summary", log=log
    ) as server:
        assert ask(server, "GET", "/v1/models", {"Host": "evil.example:80"})[0] == 200
        status, said = ask(server, "POST", TEXT, EVIL | {SITE: "cross-site"}, SMALL_BODY)
        assert status == 200 and "access-control-allow-origin: http://evil.example\r\n" in said
        wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        status, said = ask(server, "OPTIONS", TEXT, EVIL | wanted)
        assert status == 204 and "access-control-allow-headers: authorization\r\n" in said
        assert ask(server, "POST", TEXT, {"Origin": "http://other.example"}, SMALL_BODY)[0] == 403
        assert server.raw("GET", "/a%0Akvern:%20forged%1b[2J")[0] == 404
    assert "GET /a%0Akvern:%20forged%1b[2J 404" in log.read_text()
    assert not [line for line in log.read_text().splitlines() if line.startswith("kvern: forged")]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that a server says which does not start."""

    def said(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["serve", *arguments]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    return said


def test_a_socket_that_a_killed_server_left(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = tmp_path / "socket"
    arguments = (*SMALL, "--uds", str(path))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with serving(*arguments) as served:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert "cannot listen on" in refused(*arguments), "one that is in use stays"
        assert path.is_socket()
    assert served.process.returncode == 0 and not path.exists()
    path.write_text("mine")
    assert "cannot listen on" in refused(*arguments)
    assert path.read_text() == "mine"


def test_a_start_that_fails_leaves_no_process_and_no_handlers(refused: Callable[..., str]) -> None:
    def engines() -> set[int]:
        return {child for child in children_of(os.getpid()) if ENGINE in command_of(child)}

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, had = engines(), handlers()
    assert "api_key_file /nothing cannot be read" in refused(*SMALL, "--api-key-file", "/nothing")
    eventually(lambda: engines() <= before)
    assert handlers() == had


@pytest.mark.parametrize("option", ["--grace-seconds", "--request-timeout", "--engine-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300"])
def test_times_that_are_none(option: str, value: str, refused: Callable[..., str]) -> None:
    assert f"{option[2:].replace('-', '_')} is " in refused(*SMALL, option, value)


SIGNAL_IN_AN_IMPORT = """
import os, signal, sys, weakref
from kvern.cli.entry import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "kvern.server.run":
            nobody = weakref.ref(set(), lambda _: os.kill(os.getpid(), signal.SIGTERM))

sys.meta_path.insert(0, Finder())
sys.exit(main())
"""
"""What a callback raises is lost."""


def test_a_signal_in_a_callback_of_an_import() -> None:
    command = [sys.executable, "-c", SIGNAL_IN_AN_IMPORT, "serve", "--port", "0", *SMALL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_signal_while_the_model_loads() -> None:
    command = [sys.executable, "-m", "kvern", "serve", "--port", "0", *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: bool(children.read_text()))
        engine = int(children.read_text().split()[0])
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "")
    eventually(lambda: not Path(f"/proc/{engine}").exists())


@pytest.mark.nightly
def test_a_server_for_everybody_says_so() -> None:
    command = [sys.executable, "-m", "kvern", "serve", "--port", "0", "--host", "0.0.0.0", *SMALL]
    for key, warned in ((), True), (("--api-key", "secret"), False):
        with subprocess.Popen([*command, *key], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = []
            while not lines or " on http" not in lines[-1]:
                lines.append(process.stderr.readline())
            process.send_signal(signal.SIGTERM)
        assert any("warning: whoever reaches 0.0.0.0 may use this server" in line for line in lines) == warned
