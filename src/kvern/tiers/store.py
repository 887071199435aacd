"""Stores: they keep pages by name, outside the device. `make_store` makes one from an option such as disk:/path:500GB.

A page is the bytes of one kind for 64 tokens, such as keys and values of one KV head in all layers of a stage; where no
other rank reads it, those of all heads of a rank. All pages of a kind have the same size. A name is a digest of 32
bytes: of the page's content key, its kind, and the identity, which stands for the model, its number formats and the
format of pages.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from kvern.errors import ConfigError, did_you_mean, without_passwords
from kvern.plugins import Plugins

NAME_BYTES = 32


@dataclass(frozen=True)
class Identity:
    """The identity that all pages of an engine have, which every store of the engine is told.

    digest: 16 bytes; pages of different digests are never exchanged
    description: what the digest stands for, such as model, dtype and layers; for people, who read it beside the pages
    max_age: seconds after which a page that was written is a miss; None: never
    """

    digest: bytes
    description: Mapping[str, str] = field(default_factory=dict)
    max_age: float | None = None


class Store(Protocol):
    """Keeps pages by name: immutable bytes.

    It may lie, fail and be late; nobody trusts it: the shelf checks the header and the sum of each page. All methods
    block, and are called from several threads of the shelf at once, and `has` of a local store from the engine's, too.
    A call of `get` or `put` has up to 32 MiB of pages, or one page. `has`, of up to 1,024 names, has one and a half
    times what it took of late, and at most 0.5 s; `get` has a deadline by its price; after these the shelf continues
    without the answer. A store that needs a request for each page keeps an index. A call that misses its deadline may
    go on writing to its places, and the shelf uses that memory again only after it has returned. `put` has none: while
    it hangs, further pages are skipped. A method that raises counts as a failure for all names, and a store that fails
    three times in 10 s is off for a while.

    A store may also have `evicted`, the pages that made room for others, `is_read_only`: others put pages into it, and
    `has_whole_pages`: these have all heads of a rank.
    """

    @property
    def is_local(self) -> bool:
        """True if `has` answers from memory, in microseconds a name: the engine's thread may call it."""

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Returns which pages the store probably has."""

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Copies pages into `places`, writable bytes of the pages' sizes. Returns which were filled, whole."""

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Keeps copies of pages. Returns which are kept now; a page that was kept before counts."""

    def drop(self, names: Sequence[bytes]) -> None:
        """Removes pages that were not what they should be, so that they can be put again."""

    def close(self) -> None:
        """Ends the store's threads and connections; other methods are not called again."""


class Place(Protocol):
    """The memory that a store has for one page: `parts`, in order, of which the first has the header."""

    @property
    def parts(self) -> Sequence[memoryview]: ...


@runtime_checkable
class DirectStore(Store, Protocol):
    """A store in this process's memory: pages are copied from and to it without a copy in between.

    It is this process's alone, so its pages have all heads of a rank.

    These methods take microseconds, and do not raise.
    """

    def lend(self, names: Sequence[bytes], lengths: Sequence[int]) -> list[Any | None]:
        """Returns the places of pages, which are not changed until `give_back`; None: there is none of this length."""

    def give_back(self, places: Sequence[Any]) -> None:
        """Ends what `lend` began."""

    def reserve(self, name: bytes, length: int) -> Any | None:
        """Returns a place for a new page, which nobody finds before `publish`; None: it is kept, or has no room."""

    def publish(self, place: Any) -> None:
        """The page in a reserved place is whole."""

    def withdraw(self, place: Any) -> None:
        """Ends what `reserve` began, without a page."""


STORES: Plugins[Callable[[str, Identity], Store]] = Plugins(
    "kind of store of the KV cache",
    "kvern.kv_tiers",
    own={
        "host": "kvern.tiers.host:make_host",
        "disk": "kvern.tiers.disk:disk",
        "valkey": "kvern.tiers.valkey:valkey",
        "valkeys": "kvern.tiers.valkey:valkeys",
        "mooncake": "kvern.tiers.mooncake:mooncake",
        "nixl": "kvern.tiers.nixl:nixl",
    },
)
"""Makers of stores by the KIND of an option KIND:REST, which take (REST, identity).

They raise ValueError for a wrong REST and for a `max_age` that the store cannot obey; their module raises ImportError,
with the command that installs what is missing. Secrets come from environment variables. A server that does not answer
is no error: it may come back.
"""


def make_store(option: str, identity: Identity) -> Store:
    """Makes the store that an option KIND:REST names, such as disk:/path:500GB. Raises ConfigError."""
    kind, colon, rest = option.partition(":")
    if not colon or kind not in STORES.names:
        raise ConfigError(
            f"kv_tier is {without_passwords(option)!r}: it must be KIND:REST, where KIND is one of "
            f"{', '.join(STORES.names) or 'none'}{did_you_mean(kind, STORES.names)}"
        )
    try:
        return STORES.find(kind)(rest, identity)
    except ValueError as error:
        raise ConfigError(f"kv_tier is {without_passwords(option)!r}: {error}") from error


SIZES = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def read_bytes(text: str) -> int:
    """Returns a number of bytes such as 500GB, 1.5TB or 64GiB. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?) *([A-Za-z]*)", text.strip())
    count = float(found[1]) * SIZES.get(found[2].upper(), 0) if found else 0
    if not 1 <= count < 1 << 63:
        raise ValueError(f"the size {text!r:.60} must be a number of bytes above 0, such as 500GB, 1.5TB or 64GiB")
    return int(count)


def read_age(text: str) -> float:
    """Returns the seconds of an age such as 3600, 90m, 12h or 7d. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?) *([a-z]?)", text.strip())
    seconds = float(found[1]) * TIMES.get(found[2], 0) if found else 0
    if not 0 < seconds < math.inf:
        raise ValueError(f"the age {text!r} must be a time above 0 in seconds, or such as 90m, 12h or 7d")
    return seconds
