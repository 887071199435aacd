"""What hostile clients send to a server: each is refused or closed, and a small request beside it is answered soon."""

import asyncio
import functools
import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvern.server.run import Connection
from kvern.server.startup import OpenFiles
from tests.support.raw_requests import (
    MEGABYTE,
    POST,
    TEXT,
    connect,
    drip,
    form,
    received,
    resident,
    send_until_closed,
    small_requests_are_answered,
    upload,
)
from tests.support.served import PATIENCE, SMALL, Served, eventually, serving


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Served]:
    with serving(*SMALL, "--request-timeout", "2", "--data-dir", str(data)) as served:
        yield served


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("head", "part"),
    [
        (POST + b"X-A: ", b"a" * 65536),
        (b"GET /", b"a" * 65536),
        (POST, b"a: b\r\n" * 64),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-A: ", b"a" * 65536),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 64),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 65536),
    ],
    ids=["header", "url", "headers", "trailer", "trailers", "extension"],
)
def test_what_has_no_end(server: Served, head: bytes, part: bytes) -> None:
    with small_requests_are_answered(server), connect(server) as connection:
        connection.sendall(head)
        assert send_until_closed(connection, part, 64 * MEGABYTE) < 32 * MEGABYTE


def test_many_requests_whose_answers_nobody_reads(server: Served) -> None:
    before = resident(server)
    with connect(server) as connection:
        requests = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
        assert send_until_closed(connection, requests, 512 * MEGABYTE) < 32 * MEGABYTE
    assert resident(server) < before + 60


def test_pipelined_requests_are_answered_in_order(server: Served) -> None:
    paths = ("/health", "/ready", "/version", "/health")
    with connect(server) as connection:
        for number, path in enumerate(paths, 1):
            last = b"Connection: close\r\n" if number == len(paths) else b""
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + last + b"\r\n")
        said = received(connection)
    places = [said.index(text) for text in (b'"status"', b'"ready"', b'"version"')]
    assert places == sorted(places) and said.count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_offers_of_other_protocols_are_not_taken(server: Served, chunked: bool, protocol: bytes) -> None:
    """As Java's clients offer HTTP/2: what they ask is answered, bodies and following requests with it."""
    body = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABkAAQ\r\n" % protocol
    length = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if chunked:
        length = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    said = POST + offer + length + health + offer + b"\r\n" + health + b"Connection: close\r\n\r\n"
    for cut in (len(said), len(POST) + 20, said.index(body) + 3):
        with connect(server) as connection:
            connection.sendall(said[:cut])
            connection.sendall(said[cut:])
            answers = received(connection)
        assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1") == 3
        assert answers.count(b'"text_completion"') == 1


def test_compressed_bodies_are_refused_by_name(server: Served) -> None:
    body = gzip.compress(b'{"prompt": "Once"}')
    with connect(server) as connection:
        head = b"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(POST + head + body)
        said = received(connection)
    assert said.startswith(b"HTTP/1.1 415") and b"content-encoding is 'gzip'" in said


def test_blank_lines_do_not_keep_a_connection() -> None:
    """Nor do they end one: it has the time that idle connections have."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("said")(scope, receive, send)

    async def talk() -> None:
        http = functools.partial(Connection, 30.0, OpenFiles(print))
        config = uvicorn.Config(answer, http=http, timeout_keep_alive=1, lifespan="off", log_config=None)  # type: ignore[arg-type]
        server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
        serving_it = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"said")).startswith(b"HTTP/1.1 200")
        ended, blanks = asyncio.create_task(reader.read()), 0
        while not ended.done() and blanks < 100:
            writer.write(b"\r\n")
            blanks += 1
            await asyncio.wait([ended], timeout=0.2)
        assert ended.done() and blanks > 2
        writer.close()
        server.should_exit = True
        await serving_it

    asyncio.run(talk())


def test_too_many_headers_begin_no_request() -> None:
    """Nor when they come at once with their end and the body."""
    begun: list[str] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        await Response("said")(scope, receive, send)

    async def talk() -> None:
        http = functools.partial(Connection, 30.0, OpenFiles(print))
        config = uvicorn.Config(answer, http=http, lifespan="off", log_config=None)  # type: ignore[arg-type]
        server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
        serving_it = asyncio.create_task(server.serve([listener]))
        for count in (1, 300):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            request = f"POST /{count} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n" + "a: b\r\n" * count
            writer.write(f"{request}Connection: close\r\n\r\na".encode() + b"GET /more HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(reader.read(), PATIENCE)
            writer.close()
        server.should_exit = True
        await serving_it

    asyncio.run(talk())
    assert begun == ["/1"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("route", ["GET /v1/models", "POST /nothing", "DELETE /v1/models"])
def test_bodies_that_nobody_wants_and_that_do_not_end(server: Served, route: str) -> None:
    with connect(server) as connection:
        connection.sendall(f"{route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n".encode())
        assert drip(connection, b"a")


def test_a_client_that_reads_nothing(server: Served) -> None:
    """Its answer waits in memory, until it has had its time."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.host, server.port))
        body = json.dumps({"prompt": [[7] * 500] * 24, "max_tokens": 1, "echo": True, "logprobs": 20}).encode()
        connection.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: connections(server) > 0)
        eventually(lambda: connections(server) == 0)


def connections(server: Served) -> int:
    """Sockets that the server has with clients."""
    lines = Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()[1:]
    local, established = f"0100007F:{server.port:04X}", "01"
    return sum(line.split()[1] == local and line.split()[3] == established for line in lines)


def test_an_upload_that_drips(server: Served) -> None:
    kind, body = form()
    with connect(server) as connection:
        head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: " + kind
        connection.sendall(head + b"\r\nContent-Length: 1000000\r\n\r\n" + body[:-10])
        assert drip(connection, b"a")


@pytest.mark.parametrize("charset", ["punycode", "unicode_escape", "utf-7", "idna"])
def test_forms_in_other_encodings(server: Served, data: Path, charset: str) -> None:
    before = len(list(data.glob("files/*")))
    with small_requests_are_answered(server):
        kind, body = form(b"\\ud800" + b"a" * 900_000, f"; charset={charset}")
        assert b"charset is" in upload(server, kind, body)
    kind, body = form(b"\\ud800.jsonl", f"; charset={charset}")
    assert upload(server, kind, body).startswith(b"HTTP/1.1 400")
    assert len(list(data.glob("files/*"))) == before


@pytest.mark.parametrize("kind", [b"application/x-www-form-urlencoded", b"text/plain", b"nothing", b";;;"])
def test_uploads_that_are_no_forms(server: Served, kind: bytes) -> None:
    assert b"send a multipart form" in upload(server, kind, b"a" * (4 * MEGABYTE))


def test_a_file_whose_name_is_kept(server: Served, data: Path) -> None:
    kind, body = form("fuchs \u00e4\u4e2d.jsonl".encode())
    assert "fuchs \u00e4\u4e2d.jsonl".encode() in upload(server, kind, body)
    [path] = data.glob("files/file-*")
    private = (path, path.parent, data / "kvern.db")
    assert [oct(path.stat().st_mode & 0o077) for path in private] == ["0o0"] * 3


@pytest.mark.parametrize("stream", [True, False])
def test_http_of_1996(server: Served, stream: bool) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 4, "stream": stream}).encode()
    with connect(server) as connection:
        head = f"POST {TEXT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        top, _, content = received(connection).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200") and b"chunked" not in top
    assert content.startswith(b"data: {") == stream
    assert content.endswith(b"data: [DONE]\n\n") if stream else json.loads(content)["choices"]


@pytest.mark.parametrize("limit", ["9" * 5000, "0", "-1", "\u0665", "1.0", "10001", ""])
def test_pages_of_impossible_lengths(server: Served, limit: str) -> None:
    for path in ("/v1/files", "/v1/batches"):
        status, _, content = server.raw("GET", f"{path}?limit={''.join(f'%{byte:02x}' for byte in limit.encode())}")
        assert status == 400 and "limit is" in content["error"]["message"]


def test_references_of_the_description_lead_somewhere(server: Served) -> None:
    document = server.raw("GET", "/openapi.json")[2]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (value["$ref"],) if isinstance(value.get("$ref"), str) else ()
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    found = set(references(document))
    assert found
    for reference in found:
        place = document
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]
