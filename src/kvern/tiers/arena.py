"""Host memory for pages, owned by the process that supervises an engine: a killed engine comes back warm.

The engine and its ranks open the memory by its path in /proc, which an environment variable tells them.
"""

import json
import logging
import mmap
import os
from collections.abc import Sequence

import xxhash

from kvern.errors import ConfigError
from kvern.tiers.store import read_bytes

logger = logging.getLogger("kvern")

HOST = "host"
"""The kind of store that is kept there."""
MEMORY = "kvern-host-tier"
"""The name of the memory in /proc."""
ARENA = "_KVERN_HOST_ARENA"
"""The environment variable with the path of the memory that the engine's supervisor owns."""
ARENAS = "_KVERN_HOST_ARENAS"
"""The environment variable with the path of the list of such memory, of all engines of the model."""
SHARE = 0.25
"""The share of the free memory that an arena takes whose size nobody gave."""


def host_size(option: str) -> int:
    """The bytes of an arena from an option such as host:32GB. Raises ConfigError."""
    try:
        return read_bytes(option.partition(":")[2])
    except ValueError as error:
        raise ConfigError(f"kv_tier is {option!r}: {error}") from error


def sized(options: Sequence[str], available: int) -> tuple[str, ...]:
    """The options with a size for `host` alone: that of the memory that the supervisor owns, or a share of `available`
    bytes.

    Beside a size `host` alone says nothing.
    """
    has_size = any(option.startswith(f"{HOST}:") for option in options)
    found = []
    for option in options:
        if option == HOST and has_size:
            continue
        if option == HOST:
            path = os.environ.get(ARENA)
            known = 0 if path is None or not os.path.exists(path) else os.stat(path).st_size
            option = f"{HOST}:{known or int(available * SHARE)}"
        found.append(option)
    return tuple(found)


class _ArenaList:
    """The arenas of a model's engines, in a file in memory that engines read: a sum, and JSON of numbers and paths."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(f"{MEMORY}-list")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._arenas: dict[int, str] = {}
        self._size = 0

    def add(self, number: int, path: str) -> None:
        self._arenas[number] = path
        self._write()

    def remove(self, number: int) -> None:
        self._arenas.pop(number, None)
        self._write()

    def _write(self) -> None:
        """Nothing of an earlier, longer list stays behind this one."""
        content = json.dumps(sorted(self._arenas.items())).encode().ljust(self._size)
        self._size = len(content)
        os.pwrite(self._descriptor, xxhash.xxh3_64_digest(content) + content, 0)


_lists: dict[str, _ArenaList] = {}
"""The lists of this process's models."""


class OwnedArena:
    """Memory for arenas that lives as long as this object, for engines of the same user on this machine.

    Other engines of this process's `model` find it by the file `list_path`, and may read it.
    """

    def __init__(self, model: str = "") -> None:
        self._descriptor = os.memfd_create(MEMORY)
        self._number = os.fstat(self._descriptor).st_ino
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._list = _lists.get(model) or _lists.setdefault(model, _ArenaList())
        self._list.add(self._number, self.path)
        self.list_path = self._list.path

    def close(self) -> None:
        """Give the memory back, once the engine that uses it has ended."""
        if self._descriptor >= 0:
            self._list.remove(self._number)
            os.close(self._descriptor)
        self._descriptor = -1


def map_arena(size: int, part: int = 0, parts: int = 1) -> "mmap.mmap | None":
    """Maps part `part` of `parts`, of `size` bytes each, of the supervisor's memory; None: there is none."""
    path = os.environ.get(ARENA)
    if path is None:
        return None
    size = size // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size < size * parts:  # other ranks may do the same at this moment
                os.ftruncate(descriptor, size * parts)
            return mmap.mmap(descriptor, size, offset=part * size)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        logger.warning("the pages of kv_tier host will not outlive this process: %s: %s", path, error)
        return None


def siblings() -> dict[int, str] | None:
    """Reads which memory this process's supervisor owns for others of the same model: numbers, and paths.

    None: that cannot be read now.
    """
    own, path = os.environ.get(ARENA), os.environ.get(ARENAS)
    return {} if own is None or path is None else listed(path, own)


def list_path(model: str) -> str:
    """The path of the list of the memory of a model's engines, which this process owns."""
    return (_lists.get(model) or _lists.setdefault(model, _ArenaList())).path


def listed(path: str, own: str = "") -> dict[int, str] | None:
    """Reads a list of engines' memory, but for an engine's `own`: numbers, and paths. None: it cannot be read now."""
    try:
        with open(path, "rb") as file:
            content = file.read()
        if xxhash.xxh3_64_digest(content[8:]) != content[:8]:  # it is being written
            return None
        return {number: other for number, other in json.loads(content[8:]) if other != own}
    except OSError as error:  # the supervisor ends
        logger.debug("the memory of other engines is not found: %s", error)
        return None


def map_part(path: str, part: int, parts: int, *, writable: bool) -> "mmap.mmap | None":
    """Maps part `part` of `parts` of another engine's memory; None: it has none yet.

    `writable`, as what is pinned must be: nobody writes.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            each = os.fstat(descriptor).st_size // parts
            return mmap.mmap(descriptor, each, prot=protection, offset=part * each) if each else None
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # it has ended, or has another number of ranks
        return None
