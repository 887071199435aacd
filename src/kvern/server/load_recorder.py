"""Records a server's load as a file of `kvern.loads`: times, lengths, and hashes of prompts' blocks; never text.

    event loop: arrived --> its number ... ended --> queue --> thread: hashes, waits for earlier arrivals, writes

Hashes are made with a key that nobody keeps: two are equal if the prompts are, up to there, and say nothing else.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from kvern.cache.keys import block_key, contents_of, root_key
from kvern.errors import ConfigError, in_a_line
from kvern.io.files import as_size, reason
from kvern.loads.file import as_line
from kvern.loads.request import BLOCK_TOKENS, LoadRequest
from kvern.request.request import PromptInput
from kvern.serving.workload import Generation
from kvern.tiers.store import read_bytes

logger = logging.getLogger("kvern")
USUAL_BYTES = 10**9
MOST_QUEUED = 1 << 24
"""Tokens of prompts that wait for the thread."""
MOST_HELD = 64 << 20
"""Bytes of requests that have ended and wait for one that arrived before them."""
HELD_BYTES = 100
"""The bytes of one of them beside its line, about."""
FLUSHED = 1000
"""Lines that are written at once, at most."""
MOST_TENANTS = 100_000
ENDING_SECONDS = 3.0
"""The server waits so long at its end for what is queued."""
HASH_BITS = 53
"""The size of integers that every reader of JSON keeps exactly."""


class _Prompt(msgspec.Struct, frozen=True, gc=False):
    root: bytes
    """The names of model, adapter and namespace, in which prompts share blocks."""
    prompt: PromptInput
    answers: tuple[int, ...]
    """The tokens of each answer."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    number: int
    """Its place in the order of arrival."""
    arrival: float
    tenant: int
    prompts: Sequence[_Prompt]


Ended = Callable[[Sequence[Generation]], None]


def read_target(text: str) -> tuple[Path, int]:
    """Reads FILE or FILE:SIZE as a path that may be written, and its most bytes. Raises ConfigError."""
    name, colon, size = text.rpartition(":")
    most = USUAL_BYTES
    if colon:
        try:
            most = read_bytes(size)
        except ValueError as error:
            raise ConfigError(f"record is {text!r}: it must be FILE or FILE:SIZE, and {error}") from None
        if not name:
            raise ConfigError(f"record is {text!r}: it must be FILE or FILE:SIZE, and has no FILE")
    path = Path(name or text)
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(f"record is {path}: it is no regular file; name another")
        path.parent.stat()
    except OSError as error:
        raise _unwritable(path, reason(error)) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unwritable(path, f"{path.parent} is no folder in which this user may make files")
    return path, most


def start(text: str, say: Callable[[str], None]) -> "LoadRecorder":
    """Starts to record into FILE or FILE:SIZE. A file with a load becomes FILE.1. Raises ConfigError."""
    path, most = read_target(text)
    try:
        if path.exists():
            if path.stat().st_size:
                path.replace(f"{path}.1")
            else:
                path.unlink()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, reason(error)) from None
    say(f"the load is recorded in {path}, {as_size(most)} at most: times, lengths and hashes, no texts")
    return LoadRecorder(path, descriptor, most)


def _unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"record {path} cannot be written: {why}")


class LoadRecorder:
    """Is told of requests as they arrive and end. Nothing here waits for the disk, nor raises."""

    def __init__(self, path: Path, descriptor: int, most_bytes: int) -> None:
        self._file = _File(path, descriptor, most_bytes)
        self._began: float | None = None
        self._count = 0
        self._tenants: dict[str, int] = {}
        self._given = self._taken = 0
        """Tokens that were queued, counted by the event loop, and that were hashed, counted by the thread."""
        self._queue: SimpleQueue[_Ended | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="kvern-record", daemon=True)
        self._thread.start()

    def arrived(self, model: str, owner: str) -> Ended:
        """Notes that a request has arrived, and returns what is called with its prompts when they have ended."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        number = self._count
        self._count += 1

        def ended(generations: Sequence[Generation]) -> None:
            if not self._file.takes:
                return
            prompts = [_prompt(model, one) for one in generations]
            self._given += _size(prompts)
            if self._given - self._taken > MOST_QUEUED:
                self._file.end("the disk is too slow for it")
            else:
                self._queue.put(_Ended(number, now - (self._began or now), self._tenant(owner), prompts))

        return ended

    def close(self) -> None:
        """Writes what is queued, within ENDING_SECONDS."""
        self._queue.put(None)
        self._thread.join(ENDING_SECONDS)

    def _tenant(self, owner: str) -> int:
        """Returns the number of a tenant, 0 of those that come when there are too many."""
        if len(self._tenants) < MOST_TENANTS:
            self._tenants.setdefault(owner, len(self._tenants) + 1)
        return self._tenants.get(owner, 0)

    def _write(self) -> None:
        try:
            self._record()
        except Exception as error:
            logger.exception("a request cannot be recorded")
            self._file.end(in_a_line(error))

    def _record(self) -> None:
        key = secrets.token_bytes(16)
        ready: dict[int, bytes] = {}
        """The lines of requests that wait for an earlier one, by their numbers."""
        held = following = 0
        found: _Ended | None
        while (found := self._next()) is not None:
            self._taken += _size(found.prompts)
            if found.number < following:
                continue  # it was left out
            ready[found.number] = _lines(found, key)
            held += HELD_BYTES + len(ready[found.number])
            if held > MOST_HELD:
                following = min(ready)
                self._file.lack()
            while (line := ready.pop(following, None)) is not None:
                held -= HELD_BYTES + len(line)
                following += 1
                self._file.add(line)
        for number in sorted(ready):
            self._file.add(ready[number])
        self._file.close()

    def _next(self) -> _Ended | None:
        try:
            return self._queue.get_nowait()
        except Empty:
            self._file.flush()
            return self._queue.get()


class _File:
    """The file, until it is full or cannot be written: then there is one warning, and no more is taken."""

    def __init__(self, path: Path, descriptor: int, most_bytes: int) -> None:
        self.takes = True
        self._path = path
        self._descriptor = descriptor
        self._left = most_bytes
        self._written = 0
        """Bytes up to the end of a whole line."""
        self._lines: list[bytes] = []
        self._is_whole = True

    def add(self, line: bytes) -> None:
        """Adds a request, which is written by `flush`."""
        if self.takes and len(line) > self._left:
            self.end(f"{self._path} is full: give a larger SIZE, as FILE:SIZE")
        elif self.takes:
            self._left -= len(line)
            self._lines.append(line)
            if len(self._lines) == FLUSHED:
                self.flush()

    def flush(self) -> None:
        """Writes what was added; a line that cannot be written whole is taken back."""
        data = memoryview(b"".join(self._lines))
        done = 0
        self._lines.clear()
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self.end(f"{self._path} cannot be written: {reason(error)}")
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._written + bytes(data[:done]).rfind(b"\n") + 1)
        else:
            self._written += done

    def lack(self) -> None:
        """Warns, once, that requests are left out."""
        if self._is_whole:
            self._is_whole = False
            logger.warning("the recorded load lacks requests that take so long that those behind them fill the memory")

    def close(self) -> None:
        """Writes all that was added."""
        self.flush()
        os.close(self._descriptor)

    def end(self, why: str) -> None:
        """Takes no more."""
        if self.takes:
            self.takes = False
            logger.warning("the load is not recorded any more: %s", why)


def _prompt(model: str, generation: Generation) -> _Prompt:
    spec = generation.spec
    root = f"{model}\0{spec.adapter}\0".encode() + spec.namespace
    return _Prompt(root, spec.prompt, tuple(len(answer.token_ids) for answer in generation.output.outputs))


def _size(prompts: Sequence[_Prompt]) -> int:
    return sum(len(one.prompt) for one in prompts)


def _lines(ended: _Ended, key: bytes) -> bytes:
    """Returns a line for each answer that has a token."""
    lines = []
    for one in ended.prompts:
        if any(one.answers):
            blocks = _hashes(one, key)
            lengths = ((len(one.prompt), count, blocks, str(ended.tenant or "")) for count in one.answers if count)
            lines += [as_line(LoadRequest(ended.arrival, *rest)) for rest in lengths]
    return b"".join(lines)


def _hashes(one: _Prompt, key: bytes) -> tuple[int, ...]:
    contents = contents_of(one.prompt.token_ids, dict(one.prompt.block_keys))
    parent = root_key(key, one.root)
    found = []
    for start in range(0, len(contents), BLOCK_TOKENS):
        parent = block_key(parent, contents[start : start + BLOCK_TOKENS])
        found.append(int.from_bytes(parent) >> (8 * len(parent) - HASH_BITS))
    return tuple(found)
