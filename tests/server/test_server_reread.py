"""Keys and certificates that change while a server runs, and what a server says and does at its end."""

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern.errors import ConfigError
from kvern.server.config import ServerConfig
from kvern.server.handlers.batches import Batches
from kvern.server.key_limits import KeyLimits
from kvern.server.keys import ApiKey, KeyRing
from kvern.server.rereading import Reread, states
from kvern.server.stores.database import DataFolder
from kvern.server.stores.files import Store
from tests.support.certificates import certificate
from tests.support.served import KEY, SMALL, STORY, Served, eventually, serving

LONG: dict[str, Any] = STORY | {"max_tokens": 450}
CHAT = "/v1/chat/completions"


def status(served: Served, secret: str) -> int:
    return served.raw("GET", "/v1/files", key=secret)[0]


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server with a key file, which tests change; its log lies beside the file."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice:{KEY}-a\nbob:{KEY}-b\n")
    options = ("--api-key-file", str(file), "--data-dir", str(file.parent / "data"))
    with serving(*SMALL, *options, log=file.parent / "log") as served:
        yield served, file


def test_a_changed_file_is_read_and_files_stay_with_a_name(changing: tuple[Served, Path]) -> None:
    served, file = changing
    alice = served.client(f"{KEY}-a")
    kept = alice.files.create(file=("a.jsonl", b"{}\n"), purpose="batch").id
    stream = served.client(f"{KEY}-b").completions.create(prompt="Once", stream=True, **LONG)
    next(iter(stream))
    new = file.with_name("new")
    new.write_text(f"alice:{KEY}-a2\ncarol:{KEY}-c per_minute=1\n")
    new.rename(file)
    eventually(lambda: status(served, f"{KEY}-c") == 200)
    assert [status(served, f"{KEY}-{key}") for key in ("a", "a2", "b")] == [401, 200, 401]
    assert [found.id for found in served.client(f"{KEY}-a2").files.list()] == [kept]
    assert list(stream)[-1].choices[0].finish_reason == "length", "what runs goes on"
    said = (file.parent / "log").read_text()
    assert "2 API keys are read again; new: carol; changed: alice; gone: bob" in said
    assert KEY not in said


@pytest.mark.nightly
def test_a_file_with_a_mistake_changes_nothing(changing: tuple[Served, Path]) -> None:
    served, file = changing
    file.write_text(f"erin:{KEY}-e\n")
    eventually(lambda: status(served, f"{KEY}-e") == 200)
    file.write_text(f"erin:{KEY}-e2\n\n# none\ncarol:{KEY}-c per_hour=3\n")
    log = file.parent / "log"
    eventually(lambda: "line 4: per_hour is no limit of a key" in log.read_text())
    assert [status(served, f"{KEY}-{key}") for key in ("e", "e2")] == [200, 401]
    file.unlink()
    eventually(lambda: "cannot be read: No such file" in log.read_text())
    assert status(served, f"{KEY}-e") == 200


def test_a_signal_reads_the_file_at_once(changing: tuple[Served, Path]) -> None:
    served, file = changing
    file.write_text(f"dave:{KEY}-d\nfrank:{KEY}-f admin=1\n")
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: status(served, f"{KEY}-d") == 200)
    shown = urllib.request.Request(f"{served.url[:-3]}/metrics", headers={"x-api-key": f"{KEY}-f"})
    with urllib.request.urlopen(shown) as answer:
        assert 'kvern:key_prompt_tokens_total{key="dave",model_name="kvern-1m"} 0.0' in answer.read().decode()
    assert served.process.poll() is None


@pytest.mark.nightly
def test_a_new_key_finds_nothing_that_the_only_one_before_it_asked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}-a\n")
    prompt = "A long prompt that is shared by all who ask. " * 8
    with serving(*SMALL, "--api-key-file", str(file)) as served:

        def cached(who: str) -> int:
            usage = (
                served.client(f"{KEY}-{who}").completions.create(model="kvern-1m", prompt=prompt, max_tokens=1).usage
            )
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            return usage.prompt_tokens_details.cached_tokens or 0

        assert cached("a") == 0 < cached("a")
        file.write_text(f"bob:{KEY}-b\n")
        served.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(served, f"{KEY}-b") == 200)
        assert cached("b") == 0


def begin_of_answer(served: Served, trusted: Path, request: str, body: bytes = b"") -> bytes:
    """What a server with this certificate answers first."""
    context = ssl.create_default_context(cafile=str(trusted))
    with (
        socket.create_connection((served.host, served.port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        head = f"{request}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection.recv(4096)


def test_a_certificate_and_a_renewed_one_are_served_below_a_prefix(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "first")
    old = ssl.PEM_cert_to_DER_cert(cert.read_text())
    files = ("--tls-cert", str(cert), "--tls-key", str(key))
    with serving(*SMALL, *files, "--root-path", "/llm", "--api-key", KEY, log=tmp_path / "log") as served:
        for path, status in (("/health", 200), ("/v1/models", 401)):
            assert begin_of_answer(served, cert, f"GET {path} HTTP/1.1").startswith(f"HTTP/1.1 {status}".encode())
        asked = json.dumps({"model": "kvern-1m", "prompt": "Once", "max_tokens": 1}).encode()
        answer = begin_of_answer(served, cert, f"POST /v1/completions HTTP/1.1\r\nx-api-key: {KEY}", asked)
        assert answer.startswith(b"HTTP/1.1 200")

        def now() -> bytes:
            pem = ssl.get_server_certificate((served.host, served.port))
            return ssl.PEM_cert_to_DER_cert(pem)

        assert now() == old
        key.write_text("nonsense")
        eventually(lambda: "what was read before holds" in (tmp_path / "log").read_text())
        assert now() == old
        certificate(tmp_path, "second")
        eventually(lambda: now() == ssl.PEM_cert_to_DER_cert(cert.read_text()))
        assert now() != old


def test_files_are_read_once_they_have_settled(tmp_path: Path) -> None:
    said: list[str] = []
    read: list[str] = []
    file = tmp_path / "file"
    file.write_text("1")

    def look(content: str, is_asked: bool = False) -> int:
        file.write_text(content)
        os.utime(file, ns=(0, int(content) * 1000))
        watch.look(states([file]), is_asked)
        return len(read)

    def reading() -> str:
        read.append(file.read_text())
        if read[-1] == "3":
            raise ConfigError("3 is wrong")
        return ""

    os.utime(file, ns=(0, 1000))
    watch = Reread([file], reading, said.append, asyncio.Event())
    assert look("1") == 0
    assert (look("2"), look("22"), look("22"), look("22")) == (0, 0, 1, 1)
    assert (look("3"), look("3"), look("3")) == (1, 2, 2)
    assert said == ["warning: 3 is wrong; what was read before holds"]
    assert look("3", is_asked=True) == 3


def test_a_limit_that_changes_counts_what_was_before() -> None:
    limits = KeyLimits()
    many, few = ApiKey("alice", b"", per_minute=5), ApiKey("alice", b"", per_minute=2)
    for _ in range(3):
        limits.begin(many)
    assert limits.excess(many) is None
    excess = limits.excess(few)
    assert excess is not None and "has made 2 requests" in excess[1]
    limits.begin(ApiKey("alice", b"", per_minute=4))
    assert limits.excess(ApiKey("alice", b"", per_minute=4)) is not None
    assert limits.excess(many) is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("a:1\n\n  # a comment\na:2", r"keys, line 1 and \S+keys, line 4 both name a key a"),
        ("a:1\nb:1", r"keys, line 1 and \S+keys, line 2 are the same key"),
        ("a:1 concurent=3", r"keys, line 1: concurent is no limit of a key: there are concurrent, per_minute, admin"),
        ("\na:1 concurrent=3 5", r"keys, line 2 is not of the form"),
    ],
)
def test_mistakes_are_found_by_their_line(tmp_path: Path, lines: str, reason: str) -> None:
    (tmp_path / "keys").write_text(lines)
    with pytest.raises(ConfigError, match=reason):
        KeyRing(ServerConfig(api_key_file=tmp_path / "keys"))


def test_a_batch_rests_while_its_key_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[ApiKey] = []
    row = b'{"custom_id": "%d", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'

    async def work() -> None:
        waiting = asyncio.Event()

        async def answer(body: dict[str, Any], key: ApiKey) -> dict[str, Any]:
            asked.append(key)
            if len(asked) == 1:
                waiting.set()
                await asyncio.sleep(1000)
            return {}

        async def rows() -> Any:
            for number in range(3):
                yield row % number

        store = Store(DataFolder(tmp_path, 0), 1 << 20)
        file_id, _ = await store.write("alice", rows())
        body = {"id": "batch_1", "status": "validating", "endpoint": CHAT, "input_file_id": file_id, "errors": None}
        await store.save("batch", "alice", {**body, "expires_at": 1 << 40})
        batches = Batches(store, [ApiKey("alice", b"", per_minute=7), ApiKey("bob", b"")], {CHAT: answer}, 1)
        await batches.resume()
        await waiting.wait()
        await batches.change_keys([ApiKey("bob", b"")])
        assert not batches._work
        await batches.change_keys([ApiKey("bob", b""), ApiKey("alice", b"", per_minute=9)])
        stands = batches._work["batch_1"]
        await stands.task
        assert (stands.body["status"], stands.body["request_counts"]["completed"]) == ("completed", 3)
        await batches.stop()

    asyncio.run(work())
    assert [key.per_minute for key in asked] == [7, 9, 9, 9]
    assert "batch_1 waits for a server that has its API key, alice" in caplog.text


@pytest.mark.nightly
def test_requests_that_outlast_the_grace_period_are_told(tmp_path: Path) -> None:
    """Streams end with an error event, whole answers with 503, and the log has two lines of it and no traceback."""
    log = tmp_path / "log"
    with serving(*SMALL, "--grace-seconds", "1", "--log-requests", "summary", log=log) as served:
        client = served.client()
        with served.held():
            stream = client.completions.create(prompt="Once", stream=True, **LONG)
            served.process.send_signal(signal.SIGTERM)
            eventually(lambda: "ending: 1 request may run for 1 s" in log.read_text())
            with pytest.raises(openai.APIError, match="the server ended before the answer was complete: ask again"):
                list(stream)
    said = log.read_text()
    assert "1 request did not end in 1 s: cut off" in said
    assert re.search(
        r"/v1/completions 200 key=anyone from=127.0.0.1 prompt=\d+ cached=0 answer=\d+ finish=error ", said
    )
    assert not re.search("Traceback|Exception", said)
    assert served.process.returncode == 0
