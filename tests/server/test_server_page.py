"""The files of the chat page as they are sent: compressed where the client accepts it, and once. Answers are neither
compressed nor held back."""

import gzip
import json
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support.raw_requests import connect
from tests.support.served import PATIENCE, Served

PAGE = Path(__file__).parents[2] / "src/kvern/server/page"
PATHS = {file.name: "/" if file.name == "index.html" else f"/{file.name}" for file in PAGE.iterdir()}


def get(server: Served, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and content of an answer to a browser."""
    connection = HTTPConnection(server.host, server.port, timeout=PATIENCE)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in {"accept": "text/html", **named}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


@pytest.mark.parametrize("name", PATHS)
def test_a_file_is_compressed_for_a_client_that_accepts_it(server: Served, name: str) -> None:
    plain = (PAGE / name).read_bytes()
    for accepted in ("gzip, deflate, br, zstd", "*", "br;q=1.0, GZIP ; q=0.5"):
        status, headers, content = get(server, PATHS[name], accept_encoding=accepted)
        assert (status, headers["content-encoding"], gzip.decompress(content)) == (200, "gzip", plain)
        assert len(content) == int(headers["content-length"]) < len(plain)
        assert "Accept-Encoding" in headers["vary"] and headers["cache-control"] == "no-cache"
    for refused in ({}, {"accept_encoding": "identity"}, {"accept_encoding": "gzip;q=0, *"}, {"accept_encoding": "br"}):
        status, other, content = get(server, PATHS[name], **refused)
        assert (status, content, "content-encoding" in other) == (200, plain, False)
        assert {key: other[key] for key in ("etag", "vary", "content-type")}.items() <= headers.items()
        assert int(other["content-length"]) == len(plain)


@pytest.mark.parametrize("name", PATHS)
def test_a_client_that_has_a_file_is_not_sent_it_again(server: Served, name: str) -> None:
    tag = get(server, PATHS[name])[1]["etag"]
    for held in (tag, tag.removeprefix("W/"), f'"another", {tag}', "*"):
        for accepted in ("gzip", "identity"):
            status, headers, content = get(server, PATHS[name], if_none_match=held, accept_encoding=accepted)
            assert (status, content, headers["etag"]) == (304, b"", tag)
            assert "default-src 'self'" in headers["content-security-policy"] and "content-encoding" not in headers
    assert get(server, PATHS[name], if_none_match='W/"another"')[0] == 200


def test_a_head_request_tells_the_compressed_size(server: Served) -> None:
    status, headers, content = get(server, "/page.js", "HEAD", accept_encoding="gzip")
    assert (status, headers["content-encoding"], content) == (200, "gzip", b"")
    assert headers["content-length"] == get(server, "/page.js", accept_encoding="gzip")[1]["content-length"]


COMPLETION = {"prompt": "Once", "max_tokens": 8, "stream": True}
GENERATION = {"model": "kvern-1m", "prompt": "Once", "options": {"num_predict": 8}}


@pytest.mark.parametrize(
    ("path", "body", "begin"),
    [("/v1/completions", COMPLETION, b"data: "), ("/api/generate", GENERATION, b'{"model"')],
)
def test_a_streamed_answer_is_neither_compressed_nor_joined(
    server: Served, path: str, body: dict[str, object], begin: bytes
) -> None:
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAccept-Encoding: gzip\r\n"
    with connect(server) as connection:
        connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        top, _, content = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200") and b"content-encoding" not in top.lower(), top
    events = []
    while size := int(content[: content.index(b"\r\n")], 16):
        start = content.index(b"\r\n") + 2
        events.append(content[start : start + size])
        content = content[start + size + 2 :]
    assert len(events) >= 8 and all(event.count(begin) == 1 and event.startswith(begin) for event in events if event)
