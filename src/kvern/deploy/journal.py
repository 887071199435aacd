"""The record of what a deployment has done so far, in its folder.

::

    OUT/UNFINISHED       a line that says so, until all is done
    .OUT.next/           the same in place of it while OUT is a whole bundle, with hard links to its files
    OUT/journal/         asked.json, and NAME.json for each stage: the key of its inputs, its result, its seconds
    OUT/journal/lock     held while a process works on it

Files are replaced atomically, so that a process may be killed at any time. A result counts for the same key alone.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvern.errors import ConfigError, shown
from kvern.io.files import reason

UNFINISHED = "UNFINISHED"
OLD = ".old"
"""A file in a bundle that is replaced; or the bundle itself, in the folder of the one that takes its place, where a
file system does not exchange folders."""
FOLDER = "journal"
ASKED = "asked.json"
AT_FDCWD = -100
RENAME_EXCHANGE = 2
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
Kind = TypeVar("Kind", bound=msgspec.Struct)


class Entry(msgspec.Struct):
    """A stage's entry: the key of its inputs, its result as JSON, and its seconds."""

    key: str
    result: msgspec.Raw
    seconds: float


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file, which has either the old content or all of the new one whenever the process may end.

    Raises ConfigError, for example if the disk is full.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {reason(error)}") from None


def place_of(out: Path) -> tuple[Path, Path]:
    """Returns the folder of a bundle, without symbolic links, and the one beside it in which the next is made.

    Raises ConfigError where there can be none.
    """
    try:
        real = out.resolve()
        if not real.name:
            raise ValueError("nothing can be beside it")
        beside = real.with_name(f".{real.name}.next")
        with contextlib.suppress(FileNotFoundError):
            beside.lstat()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise ConfigError(f"out {out!s:.80} cannot be a bundle: {reason(error)}; give another folder") from None
    return real, beside


def exchange(one: Path, other: Path) -> None:
    """Exchanges two folders at once. Raises OSError, with an error of `NO_EXCHANGE` where this cannot be done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))


class Journal:
    """The journal in the folder of a bundle."""

    def __init__(self, out: Path) -> None:
        self.out = self._named = out
        self._real, self._next = place_of(out)
        self._identity: Mapping[str, Any] = {}
        self._before: Mapping[str, Any] | None = None
        self._was_finished = False
        self.is_copy = False
        """True once this process has begun a bundle in place of one that is whole."""

    @property
    def _folder(self) -> Path:
        return self.out / FOLDER

    def recover(self) -> bool:
        """Ends a replacement during which a process was killed, or is; returns True if a folder is there."""
        if not self._real.exists() and (self._next / OLD).exists():
            with contextlib.suppress(FileNotFoundError):  # that process has ended it
                os.rename(self._next, self._real)
        return self._real.exists()

    @contextlib.contextmanager
    def held(self, identity: Mapping[str, Any], overwrite: bool) -> Iterator[None]:
        """Takes the folder for this process, made if it is not there.

        Raises ConfigError if another process has it, if it holds something else, or a bundle of other options.
        """
        is_there = self.recover()
        self._check(identity, overwrite)
        busy = ConfigError(f"out {self.out} is being made by another process: wait for its end")
        try:
            self._folder.mkdir(parents=not is_there, exist_ok=True)
            lock = (self._folder / "lock").open("w")
        except OSError as error:
            if is_there and isinstance(error, FileNotFoundError):  # it is replaced at this moment
                raise busy from None
            raise ConfigError(f"out {self.out} cannot be written: {reason(error)}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(lock.fileno()), (self._folder / "lock").stat()):
                    raise busy  # it was replaced meanwhile
            except (BlockingIOError, FileNotFoundError):
                raise busy from None
            self._identity = identity
            self._before = _asked_in(self.out)
            self._was_finished = self._before is not None and not (self.out / UNFINISHED).exists()
            if (self._next / OLD).exists():  # a bundle that was replaced
                shutil.rmtree(self._next, ignore_errors=True)
            if self._was_finished and (self._goes_on or _apart(self._before, identity)):
                self._step_aside()
            self._remove_pieces()
            yield

    def _begun(self) -> Mapping[str, Any] | None:
        """Returns what was asked of the bundle that is made beside a whole one; None: there is none."""
        return None if (self._next / OLD).exists() else _asked_in(self._next)

    @property
    def _goes_on(self) -> bool:
        """True if an earlier process began a bundle beside a whole one: the same, or one in place of other options."""
        begun = self._begun()
        return begun is not None and bool(_apart(self._before, self._identity) or not _apart(begun, self._identity))

    def _check(self, identity: Mapping[str, Any], overwrite: bool) -> None:
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise ConfigError(f"out {self.out} is a file: give a folder")
        try:
            before = _asked_in(self.out)
            begun = self._begun()
        except (OSError, ValueError) as error:
            raise ConfigError(f"out {self.out} cannot be read: {reason(error)}; give another folder") from None
        if before is None:
            if any(path.name != FOLDER for path in self.out.iterdir()):
                raise ConfigError(f"out {self.out} holds other files, and no bundle: give a new folder")
            return
        apart = _apart(before, identity)
        if apart and not overwrite and (begun is None or _apart(begun, identity)):
            name = apart[0]
            raise ConfigError(
                f"out {self.out} has a bundle with {name} {shown(before.get(name))}, and {name} is now "
                f"{shown(identity[name])}: give another folder, or --overwrite, which keeps what stands"
            )

    def _step_aside(self) -> None:
        """Goes on in the folder beside a whole bundle: what an earlier process began there, or all that stands now."""
        if not self._goes_on:
            self.is_copy = True
            shutil.rmtree(self._next, ignore_errors=True)
            try:
                if self.out.stat().st_dev != self._next.parent.stat().st_dev:
                    raise OSError(errno.EXDEV, "it is a file system of its own")
                shutil.copytree(self.out, self._next, copy_function=_linked, ignore=lambda *_: (UNFINISHED, OLD, ASKED))
            except OSError as error:
                told = f"out {self.out} has a bundle, beside which {self._next} cannot be made to take its place"
                raise ConfigError(f"{told}: {reason(error)}; give another folder") from None
        self.out = self._next

    def _remove_pieces(self) -> None:
        """Removes what a killed process left: folders of weights, and files, that were not whole."""
        pieces = (*self.out.glob(".*weights.*"), *self.out.glob(".*.new"), *self._folder.glob(".*.new"), self.out / OLD)
        for path in pieces:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def begin(self, stage: str) -> None:
        """Notes what was asked for, that the bundle is unfinished, and at which stage; beside one that is whole."""
        if self._was_finished and not self.is_beside:
            self._step_aside()
        write_whole(self.beside(ASKED), msgspec.json.encode(self._identity))
        told = f"This bundle is unfinished: its stage is {stage}. The same kvern deploy command goes on with it.\n"
        write_whole(self.out / UNFINISHED, told.encode())

    @property
    def is_new(self) -> bool:
        """True if nothing was asked for in this folder before this process."""
        return self._before is None

    @property
    def is_beside(self) -> bool:
        """True while a whole bundle is in the folder that was named, and another one is made."""
        return self.out == self._next

    def finish(self) -> None:
        """Notes that the bundle is whole, and puts it in the place of the one that was. Raises ConfigError."""
        try:
            (self.out / UNFINISHED).unlink(missing_ok=True)
            if self.is_beside:
                self._replace()
        except OSError as error:
            raise ConfigError(
                f"{self.out} is whole, and cannot be put in its place, {self._real}: {reason(error)}; mend that, and "
                "start the same command again"
            ) from None

    def _replace(self) -> None:
        (self._real / OLD).touch()
        try:
            exchange(self._next, self._real)
        except OSError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            os.rename(self._real, self._next / OLD)
            with contextlib.suppress(FileNotFoundError):  # another process has done it, in `recover`
                os.rename(self._next, self._real)
        self.out = self._named
        for old in (self._next, self._real / OLD):
            shutil.rmtree(old, ignore_errors=True)

    def read(self, name: str, key: str, kind: type[Kind]) -> tuple[Kind, float] | None:
        """Returns the result of a stage with these inputs and its seconds; None if it has not ended."""
        try:
            entry = msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=Entry)
            return (msgspec.json.decode(entry.result, type=kind), entry.seconds) if entry.key == key else None
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, name: str, key: str, result: msgspec.Struct, seconds: float) -> None:
        """Keeps a result."""
        entry = Entry(key, msgspec.Raw(msgspec.json.encode(result)), seconds)
        write_whole(self._folder / f"{name}.json", msgspec.json.format(msgspec.json.encode(entry), indent=1) + b"\n")

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.out, ignore_errors=True)

    def beside(self, name: str) -> Path:
        """Returns the path of a file in the journal that a stage keeps for itself."""
        return self._folder / name


def _asked_in(folder: Path) -> Mapping[str, Any] | None:
    """Returns what was asked of the bundle in a folder; None: there is none. Raises OSError or ValueError."""
    try:
        found: Mapping[str, Any] = msgspec.json.decode((folder / FOLDER / ASKED).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found


def _apart(before: Mapping[str, Any] | None, identity: Mapping[str, Any]) -> list[str]:
    return [name for name, value in identity.items() if (before or {}).get(name) != value]


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def key_of(*parts: Any) -> str:
    """Returns a key for inputs, as JSON."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]
