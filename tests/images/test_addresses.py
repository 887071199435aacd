"""Images at addresses: hosts that are allowed, what is dialled, redirects, and what hosts send."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvern.errors import ConfigError, InvalidRequest
from kvern.images import addresses
from kvern.images.addresses import Fetcher, is_public
from kvern.images.limits import LARGEST_FILE
from kvern.server.config import ServerConfig

PUBLIC, OTHER, INNER = "127.0.0.2", "127.0.0.3", "127.0.0.1"
"""Addresses of this machine; the first two pass for public ones in these tests."""
PICTURE = b"the bytes of a picture"
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of a.org and of the hosts below b.org, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=a.org", "-addext", "subjectAltName=DNS:a.org,DNS:*.b.org"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", files[1], "-out", files[0]], check=True, capture_output=True)
    return files


@pytest.fixture(autouse=True)
def passing_for_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "is_public", lambda address: address in (PUBLIC, OTHER) or is_public(address))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{INNER}:9")


class Network:
    """A host over TLS on all addresses of this machine, and the resolver. `answers` are by path."""

    def __init__(self, certificate: tuple[Path, Path], answers: dict[str, Answer]) -> None:
        self._certificate = certificate
        self._answers = answers
        self.names: dict[str, Sequence[Sequence[str]]] = {"a.org": [[PUBLIC]], "c.b.org": [[OTHER]]}
        """The addresses of each name, for each time that it is looked up."""
        self.looked_up: list[str] = []
        self.asked: list[tuple[str, str]] = []
        """The address that was dialled and the path, for each request."""
        self.hosts: list[str] = []
        self.port = 0

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        self.looked_up.append(host)
        found = self.names[host]
        return found[min(self.looked_up.count(host), len(found)) - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.asked.append((writer.get_extra_info("sockname")[0], path))
            self.hosts.append(next(line for line in head.splitlines() if line.lower().startswith("host:")))
            await self._answers[path](head, writer)
            await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self, *hosts: str) -> AsyncIterator[Fetcher]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._certificate)
        server = await asyncio.start_server(self._serve, "0.0.0.0", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        trusted = ssl.create_default_context(cafile=str(self._certificate[0]))
        try:
            yield Fetcher(hosts, self.look_up, trusted)
        finally:
            server.close()

    def url(self, path: str, host: str = "a.org") -> str:
        return f"https://{host}:{self.port}{path}"


def sends(data: bytes, head: str = "", status: str = "200 OK", length: int | None = None) -> Answer:
    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        size = len(data) if length is None else length
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {size}\r\n{head}\r\n".encode() + data)

    return answer


def leads_to(target: Callable[[], str]) -> Answer:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        await sends(b"", f"location: {target()}\r\n", "302 Found")(head, writer)

    return answer


async def endless(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    part = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    for _number in range(2 * LARGEST_FILE >> 16):
        writer.write(part)
        await writer.drain()


async def silent(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc")
    await writer.drain()
    await asyncio.sleep(3600)


def refused(network: Network, hosts: Sequence[str], urls: dict[str, str]) -> list[str]:
    """Each address is refused with its text. Returns all of it."""
    told: list[str] = []

    async def work() -> None:
        async with network.running(*hosts) as fetcher:
            for url, said in urls.items():
                with pytest.raises(InvalidRequest, match=said) as error:
                    await fetcher.fetch(url.replace("PORT", str(network.port)))
                told.append(str(error.value))

    asyncio.run(work())
    return told


def test_an_allowed_host_is_read(certificate: tuple[Path, Path]) -> None:
    network = Network(certificate, {"/a.png": sends(PICTURE)})

    async def work() -> None:
        async with network.running("A.org", "*.b.org") as fetcher:
            taken: list[int] = []
            assert await fetcher.fetch(network.url("/a.png"), taken.append) == PICTURE
            assert sum(taken) == len(PICTURE)
            assert await fetcher.fetch(network.url("/a.png", "c.b.org")) == PICTURE

    asyncio.run(work())
    assert network.asked == [(PUBLIC, "/a.png"), (OTHER, "/a.png")] and network.looked_up == ["a.org", "c.b.org"]
    assert network.hosts == [f"Host: a.org:{network.port}", f"Host: c.b.org:{network.port}"]


def test_other_hosts_and_schemes_are_refused(certificate: tuple[Path, Path]) -> None:
    network = Network(certificate, {})
    not_allowed = "is not among the hosts"
    urls = {
        "http://a.org/a.png": "is refused: an address is https",
        "file:///etc/passwd": "is refused: an address is https",
        "ftp://a.org/a.png": "is refused: an address is https",
        "https://user:word@a.org/a.png": "without a name or password",
        "https://a.org.evil.net/a.png": not_allowed,
        "https://evil.net/?a.org": not_allowed,
        "https://evil.net#@a.org/": not_allowed,
        "https://a.org@evil.net/": "without a name or password",
        "https://evil.net\\@a.org/": "is no address|is not among|without a name",
        "https://b.org/a.png": not_allowed,
        "https://xb.org/a.png": not_allowed,
        "https:///a.png": not_allowed,
        f"https://{PUBLIC}:PORT/a.png": not_allowed,
        "https://[::1]:PORT/a.png": not_allowed,
        "https://a.org:99999/": "is no address",
    }
    refused(network, ("a.org", "*.b.org", PUBLIC), urls)
    assert network.looked_up == [] and network.asked == []


def test_names_of_inner_addresses_are_not_dialled(certificate: tuple[Path, Path]) -> None:
    network = Network(certificate, {"/a.png": sends(PICTURE)})
    for inner in ([INNER], [PUBLIC, INNER], ["::1"], ["::ffff:127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], []):
        network.names["a.org"] = [inner]
        said = "a.org has an address that is not of the public"
        told = refused(network, ("a.org",), {"https://a.org:PORT/a.png": said})
        assert not any(address in told[0] for address in inner), "addresses of the inner network are told to nobody"
    assert network.asked == []


def test_a_name_that_changes_is_resolved_once(certificate: tuple[Path, Path]) -> None:
    network = Network(certificate, {"/a.png": sends(PICTURE)})
    network.names["a.org"] = [[PUBLIC], [INNER]]

    async def work() -> None:
        async with network.running("a.org") as fetcher:
            assert await fetcher.fetch(network.url("/a.png")) == PICTURE

    asyncio.run(work())
    assert network.looked_up == ["a.org"] and network.asked == [(PUBLIC, "/a.png")]
    refused(network, ("a.org",), {"https://a.org:PORT/a.png": "not of the public network"})


def test_redirects_are_checked_anew(certificate: tuple[Path, Path]) -> None:
    answers = {
        "/a.png": sends(PICTURE),
        "/near": leads_to(lambda: "/a.png"),
        "/far": leads_to(lambda: network.url("/near", "c.b.org")),
        "/inner": leads_to(lambda: network.url("/a.png", "inner.b.org")),
        "/itself": leads_to(lambda: "/itself"),
        "/loopback": leads_to(lambda: f"https://{INNER}:{network.port}/a.png"),
        "/plain": leads_to(lambda: "http://a.org/a.png"),
        "/file": leads_to(lambda: "file:///etc/passwd"),
        "/elsewhere": leads_to(lambda: "https://evil.net/a.png"),
        "/nowhere": sends(b"", status="302 Found"),
    }
    network = Network(certificate, answers)
    network.names["inner.b.org"] = [[INNER]]

    async def work() -> None:
        async with network.running("a.org", "*.b.org") as fetcher:
            assert await fetcher.fetch(network.url("/far")) == PICTURE

    asyncio.run(work())
    assert network.asked == [(PUBLIC, "/far"), (OTHER, "/near"), (OTHER, "/a.png")]
    said = {
        "/inner": "inner.b.org has an address that is not",
        "/itself": "a.org leads to more than 3 other addresses",
        "/loopback": "is not among the hosts",
        "/plain": "is refused: an address is https",
        "/file": "is refused: an address is https",
        "/elsewhere": "evil.net is not among the hosts",
        "/nowhere": "a.org answers with status 302",
    }
    network.asked.clear()
    refused(network, ("a.org", "*.b.org"), {f"https://a.org:PORT{path}": text for path, text in said.items()})
    assert {address for address, _ in network.asked} == {PUBLIC}


def test_what_hosts_send_is_bounded(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "/large": sends(b"", length=LARGEST_FILE + 1),
        "/endless": endless,
        "/missing": sends(b"secret", status="404 Not Found"),
        "/compressed": sends(PICTURE, "content-encoding: gzip\r\n"),
        "/short": sends(PICTURE, length=100),
        "/noise": sends(b"", head="x" * 100_000 + ": y\r\n"),
    }
    network = Network(certificate, answers)
    said = {
        "/large": f"a.org sends more than {LARGEST_FILE} bytes",
        "/endless": f"a.org sends more than {LARGEST_FILE} bytes",
        "/missing": "a.org answers with status 404$",
        "/compressed": "a.org sends the image compressed",
        "/short": "a.org cannot be read: ClientPayloadError",
        "/noise": "a.org cannot be read: ",
    }
    refused(network, ("a.org",), {f"https://a.org:PORT{path}": text for path, text in said.items()})
    slow = Network(certificate, {"/": silent})
    monkeypatch.setattr(addresses, "SECONDS", 0.2)
    refused(slow, ("a.org",), {"https://a.org:PORT/": "a.org did not send the image within 0.2 s"})


def test_certificates_are_for_the_name(certificate: tuple[Path, Path]) -> None:
    network = Network(certificate, {"/a.png": sends(PICTURE)})
    network.names["other.org"] = [[PUBLIC]]
    refused(network, ("other.org",), {"https://other.org:PORT/a.png": "other.org has no certificate for this name"})
    assert network.asked == []

    async def untrusted() -> None:
        async with network.running("a.org"):
            await Fetcher(["a.org"], network.look_up).fetch(network.url("/a.png"))

    with pytest.raises(InvalidRequest, match=r"a\.org has no certificate for this name that is trusted here"):
        asyncio.run(untrusted())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "::",
        "::1",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:8.8.8.8",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "2001:0:1::1",
        "2001:db8::1",
        "fec0::1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_addresses_that_are_public() -> None:
    assert all(map(is_public, ("8.8.8.8", "93.184.215.14", "2606:2800:220:1:248:1893:25c8:1946")))


def test_the_hosts_of_the_option() -> None:
    config = ServerConfig(allowed_media_domains=("a.org,*.b.org", "localhost"))
    assert config.allowed_media_domains == ("a.org", "*.b.org", "localhost")
    for wrong in ("*", "https://a.org", "a.org/x", "a b", "*.*.org", "10.0.0.1", "a.*"):
        with pytest.raises(ConfigError, match="allowed_media_domains has"):
            ServerConfig(allowed_media_domains=(wrong,))
