"""Files at addresses of the network, from the hosts that an operator allows.

    https and an allowed host --> resolved once --> all addresses public --> that one dialled, TLS for the host's name
            ^------------------------- each redirect ----------------------------'

All of it within `SECONDS`, without proxies, cookies or compression.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from kvern.errors import InvalidRequest
from kvern.images.limits import LARGEST_FILE

SECONDS = 5.0
MOST_REDIRECTS = 3
PART_BYTES = 1 << 16
HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "kvern"}
GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")
TUNNELS = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("2001::/32"))
"""Networks whose addresses hold IPv4 addresses of any kind."""
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host's name and a port to addresses; raises OSError."""
LOOKING_UP = ThreadPoolExecutor(4, thread_name_prefix="image-host")


def is_public(address: str) -> bool:
    """Returns True for an address of the public network."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and (
        found not in GLOBAL_IPV6 or any(found in network for network in TUNNELS)
    ):
        return False
    return found.is_global and not found.is_multicast


async def look_up(host: str, port: int) -> list[str]:
    """Returns the addresses of a host, as the system orders them. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(LOOKING_UP, socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Resolver(AbstractResolver):
    """One address of an allowed host. Raises InvalidRequest if any of its addresses is not public."""

    def __init__(self, look_up: Lookup) -> None:
        self._look_up = look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Returns the address to dial. What is refused is not shown: it may be of a network that clients cannot see."""
        found = await self._look_up(host, port)
        if not found or not all(map(is_public, found)):
            raise InvalidRequest(f"{host} has an address that is not of the public network: images there are not read")
        kind = socket.AF_INET6 if ":" in found[0] else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [ResolveResult(hostname=host, host=found[0], port=port, family=kind, proto=0, flags=flags)]

    async def close(self) -> None:
        """Nothing is held."""


class Fetcher:
    """Reads files from `hosts`: names, or `*.` and a domain for all names below it.

    `look_up` and `context` are the system's resolver and certificates by default.
    """

    def __init__(self, hosts: Sequence[str], look_up: Lookup = look_up, context: ssl.SSLContext | None = None) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._look_up = look_up
        self._context = ssl.create_default_context() if context is None else context

    async def fetch(self, address: str, take: Callable[[int], None] = lambda size: None) -> bytes:
        """Returns the file at an address. `take` is told of bytes as they come, and may raise.

        Raises InvalidRequest.
        """
        url = self._checked(address)
        try:
            async with asyncio.timeout(SECONDS), self._session() as session:
                for _ in range(MOST_REDIRECTS + 1):
                    found = await _answer(session, url, take)
                    if isinstance(found, bytes):
                        return found
                    url = self._checked(found)
        except InvalidRequest:  # a ValueError
            raise
        except TimeoutError:
            raise InvalidRequest(f"{url.host} did not send the image within {SECONDS:g} s") from None
        except aiohttp.ClientConnectorCertificateError:
            raise InvalidRequest(f"{url.host} has no certificate for this name that is trusted here") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # their texts tell addresses and ports
            raise InvalidRequest(f"{url.host} cannot be read: {type(error).__name__}") from None
        raise InvalidRequest(f"{URL(address).host} leads to more than {MOST_REDIRECTS} other addresses")

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=Resolver(self._look_up), ssl=self._context, use_dns_cache=False, force_close=True
        )
        return aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, headers=HEADERS
        )

    def _checked(self, address: str) -> URL:
        """The address, as it is dialled. Raises InvalidRequest."""
        try:
            url = URL(address)
            host = url.host or ""
        except ValueError:
            raise InvalidRequest(f"{address:.60} is no address: send https://HOST/PATH") from None
        if url.scheme != "https" or url.user is not None or url.password is not None:
            raise InvalidRequest(
                f"{address:.60} is refused: an address is https://HOST/PATH, without a name or password"
            )
        if not self._allows(host):
            raise InvalidRequest(f"{host or address:.60} is not among the hosts that this server reads images from")
        return url

    def _allows(self, host: str) -> bool:
        above = host.split(".")
        domains = {"*." + ".".join(above[number:]) for number in range(1, len(above))}
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return host in self._hosts or not self._hosts.isdisjoint(domains)
        return False  # it would be dialled without being resolved


async def _answer(session: aiohttp.ClientSession, url: URL, take: Callable[[int], None]) -> bytes | str:
    """The answer of an address: a file, or another address. Raises InvalidRequest."""
    async with session.get(url, allow_redirects=False) as answer:
        target = answer.headers.get("location")
        if answer.status in (301, 302, 303, 307, 308) and target is not None:
            return str(url.join(URL(target)))
        if answer.status != 200:
            raise InvalidRequest(f"{url.host} answers with status {answer.status}")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest(f"{url.host} sends the image compressed, though that was not wanted")
        data = bytearray()
        if (answer.content_length or 0) <= LARGEST_FILE:
            async for part in answer.content.iter_chunked(PART_BYTES):
                take(len(part))
                data += part
                if len(data) > LARGEST_FILE:
                    break
            else:
                return bytes(data)
    raise InvalidRequest(f"{url.host} sends more than {LARGEST_FILE} bytes: make the image smaller")
