"""Folders of pages, which several servers, ranks and the command line use at the same time.

    PATH/kvern-pages                 marks the folder, so that nothing else is ever taken for one
    PATH/bytes                       the bytes of all pages, a number that all processes keep together
    PATH/IDENTITY/description.json   what the identity (32 hex digits) stands for
    PATH/IDENTITY/hits               how often its pages were read
    PATH/IDENTITY/XX/NAME            a page; XX are the first two of the 64 hex digits of its name
    PATH/IDENTITY/XX/.MACHINE-PID-N  a page that is being written; renamed when it is whole

A file's mtime is when its page was written, its atime when it was last used: kvern sets both, whatever the file system
does by itself. Paths are relative to the opened folder, so that nothing is written elsewhere when PATH is unmounted.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

MARK = "kvern-pages"
MARK_TEXT = b"kvern pages, format 1\n"
LEFT_OVER_SECONDS = 3600.0
"""The age at which an unfinished page of another machine, or of a process unknown here, is removed."""
PAGE_NAME = re.compile("[0-9a-f]{64}")
DISK_BLOCK = 4096
PAUSE_FILES = 64
LOCK_TRIES = 40
LOCK_WAIT = 0.0005

_numbers = count()


@dataclass(frozen=True, slots=True, order=True)
class PageFile:
    """A page in a folder: when it was last used and written (seconds since 1970), its bytes on disk, and its path."""

    used: float
    written: float
    size: int
    path: str

    @property
    def name(self) -> str:
        """The page's name, 64 hex digits."""
        return self.path[-64:]


@dataclass(frozen=True, slots=True)
class Listing:
    """The pages of a folder PATH/IDENTITY/XX, when reading it began, and the bytes of pages that are being written."""

    identity: str
    prefix: str
    begun: float
    pages: list[PageFile]
    unfinished: int


class SharedCount:
    """A number in a text file that several processes change. Raises OSError."""

    def __init__(self, path: str, folder: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        self._lock = threading.Lock()

    def add(self, change: int = 0) -> int:
        """Adds to the number and returns it; it is never below 0."""
        return self._change(lambda value, changes: value + change)[0]

    def read(self) -> tuple[int, int]:
        """Returns the number, and how often it was changed."""
        return self._change(lambda value, changes: value)

    def correct(self, found: int, changes_before: int) -> None:
        """Sets the number to what was found, which may lack changes that were made meanwhile: then only upwards."""
        self._change(lambda value, changes: found if changes == changes_before else max(value, found))

    def _change(self, new: Callable[[int, int], int]) -> tuple[int, int]:
        with self._lock:
            self._take()
            try:
                known = [int(text) for text in os.pread(self._file, 41, 0).split() if text.isdigit()]
                value, changes = known if len(known) == 2 else (0, 0)
                changed = max(0, new(value, changes))
                if changed != value:
                    changes += 1
                    os.pwrite(self._file, b"%020d %020d\n" % (changed, changes), 0)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return changed, changes

    def _take(self) -> None:
        """Takes the lock, or goes on without it if a process that was stopped has it: a wrong count is mended later."""
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_WAIT)
            else:
                return

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


class PageFolder:
    """An opened folder of pages. Methods raise OSError.

    `pause`: seconds to wait after each few files of a listing, so that other threads of the process can run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pause = 0.0
        self.root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.bytes = SharedCount("bytes", self.root)

    @classmethod
    def made(cls, path: Path) -> "PageFolder":
        """Opens a folder of pages, or makes one where nothing or an empty folder is. Raises ValueError if it has other
        files, or OSError."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (path / MARK).exists():
            _check_empty(path)
            temporary = path / (MARK + _temporary_name())
            temporary.write_bytes(MARK_TEXT)
            temporary.rename(path / MARK)
        return cls.existing(path)

    @classmethod
    def existing(cls, path: Path) -> "PageFolder":
        """Opens a folder that has pages. Raises ValueError if it has not, or OSError."""
        if not (path / MARK).is_file():
            raise ValueError(f"{path} is no folder of kvern's pages: it has no file {MARK}")
        if (text := (path / MARK).read_bytes()) != MARK_TEXT:
            raise ValueError(f"{path} has pages of another version of kvern: {MARK} says {text[:60]!r}")
        return cls(path)

    def make(self, identity: str, description: Mapping[str, str]) -> None:
        """Makes the folder of an identity. Raises ValueError if it belongs to another user."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(identity, 0o700, dir_fd=self.root)
        owner = os.stat(identity, dir_fd=self.root, follow_symlinks=False).st_uid
        if owner != os.geteuid():
            raise ValueError(f"{self.path / identity} belongs to user {owner}: give each user a folder of its own")
        text = json.dumps(dict(description), indent=2, ensure_ascii=False).encode()
        path = f"{identity}/description.json"
        temporary = temporary_path(path)
        file = self.create(temporary, len(text))
        try:
            os.pwrite(file, text, 0)
        finally:
            os.close(file)
        self.rename(temporary, path)

    def description(self, identity: str) -> dict[str, str]:
        """Returns what an identity stands for; empty if that is not known."""
        try:
            with open(self.path / identity / "description.json", "rb") as file:
                found = json.loads(file.read(1 << 20))
        except (OSError, ValueError, RecursionError):
            return {}
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def add_hits(self, identity: str, hits: int = 0) -> int:
        """Adds to the number of pages of an identity that were read, and returns it."""
        counted = SharedCount(f"{identity}/hits", self.root)
        try:
            return counted.add(hits)
        finally:
            counted.close()

    def identities(self) -> list[str]:
        """Returns the identities that have folders, sorted."""
        return sorted(name for name in os.listdir(self.root) if re.fullmatch("[0-9a-f]{32}", name))

    def listings(self, identity: str, clean: bool = False) -> Iterator[Listing]:
        """Yields the pages of an identity, folder by folder; with `clean` removes what dead writers left."""
        try:
            prefixes = [name for name in self._names(identity) if re.fullmatch("[0-9a-f]{2}", name)]
        except FileNotFoundError:
            return
        for prefix in sorted(prefixes):
            with contextlib.suppress(FileNotFoundError):  # cleared meanwhile
                yield self._listing(identity, prefix, clean)

    def _listing(self, identity: str, prefix: str, clean: bool) -> Listing:
        begun = time.time()
        pages = []
        unfinished = 0
        folder = self._open_folder(f"{identity}/{prefix}")
        try:
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries, 1):
                    if self.pause and not number % PAUSE_FILES:
                        time.sleep(self.pause)
                    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        path = f"{identity}/{prefix}/{entry.name}"
                        size = on_disk(status.st_size)
                        if PAGE_NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                            pages.append(PageFile(status.st_atime, status.st_mtime, size, path))
                        elif clean and _is_left_over(entry.name, status.st_mtime):
                            os.unlink(path, dir_fd=self.root)
                        else:
                            unfinished += size
        finally:
            os.close(folder)
        return Listing(identity, prefix, begun, pages, unfinished)

    def _open_folder(self, path: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, dir_fd=self.root)

    def _names(self, path: str) -> list[str]:
        folder = self._open_folder(path)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def open(self, path: str) -> int:
        """Opens a page for reading and returns the descriptor."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.root)

    def create(self, path: str, size: int) -> int:
        """Makes a new file of so many zeros, which take no space yet, and returns its descriptor."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.root)
        try:
            os.ftruncate(file, size)
        except BaseException:
            os.close(file)
            self.unlink(path)
            raise
        return file

    def rename(self, old: str, new: str) -> None:
        """Renames a file over another."""
        os.rename(old, new, src_dir_fd=self.root, dst_dir_fd=self.root)

    def make_prefix(self, identity: str, prefix: str) -> None:
        """Makes the folder PATH/IDENTITY/XX."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{identity}/{prefix}", 0o700, dir_fd=self.root)

    def unlink(self, path: str) -> bool:
        """Removes a file. Returns False if it is not there."""
        try:
            os.unlink(path, dir_fd=self.root)
        except FileNotFoundError:
            return False
        return True

    def is_unused(self, page: PageFile) -> bool:
        """Returns whether a page is still there, and was neither used nor written after it was listed."""
        try:
            status = os.stat(page.path, dir_fd=self.root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return max(status.st_atime, status.st_mtime) <= max(page.used, page.written)

    def remove(self, path: str, size: int) -> int:
        """Removes a page of so many bytes. Returns the bytes that are free again; 0 if another process was faster."""
        self.bytes.add(-size)  # first, or a scan that no longer sees the page would have it subtracted twice
        if self.unlink(path):
            return size
        self.bytes.add(size)
        return 0

    def remove_empty(self, identity: str) -> None:
        """Removes the folder of an identity, if no page is left in it and none is being written."""
        with contextlib.suppress(OSError):
            for prefix in self._names(identity):
                if len(prefix) == 2:
                    os.rmdir(f"{identity}/{prefix}", dir_fd=self.root)
            for name in self._names(identity):
                self.unlink(f"{identity}/{name}")
            os.rmdir(identity, dir_fd=self.root)

    def free(self) -> int:
        """Returns the bytes that this user may still write to the file system."""
        status = os.fstatvfs(self.root)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Closes the folder."""
        self.bytes.close()
        os.close(self.root)


def on_disk(size: int) -> int:
    """Returns the bytes that a file of this size takes."""
    return -(-size // DISK_BLOCK) * DISK_BLOCK


def page_path(identity: str, name: bytes) -> str:
    """Returns where a page is, relative to PATH."""
    text = name.hex()
    return f"{identity}/{text[:2]}/{text}"


def temporary_path(path: str) -> str:
    """Returns where a page is written before it is renamed to `path`."""
    return f"{path.rpartition('/')[0]}/{_temporary_name()}"


def _temporary_name() -> str:
    return f".{_machine()}-{os.getpid()}-{next(_numbers)}"


def _machine() -> str:
    """Returns what tells apart the process ids of different machines, starts of a machine, and containers."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        told = file.read() + os.readlink("/proc/self/ns/pid").encode()
    return hashlib.blake2b(told, digest_size=6).hexdigest()


def _is_left_over(name: str, written: float) -> bool:
    """Returns whether the writer of a file is dead, as far as that can be known here."""
    found = re.fullmatch(r"\.([0-9a-f]{12})-(\d+)-\d+", name)
    if found and found[1] == _machine() and not os.path.exists(f"/proc/{found[2]}"):
        return True
    return bool(found) and written < time.time() - LEFT_OVER_SECONDS


def _check_empty(path: Path) -> None:
    """Raises ValueError if a folder has files of others, and is not being made one of pages by another process."""
    names = os.listdir(path)
    others = sorted(name for name in names if name != "lost+found" and not name.startswith(MARK))
    if others and MARK not in names:
        raise ValueError(
            f"the folder {path} has other files, such as {others[0]!r}: name a folder that is new, empty, or has "
            "kvern's pages"
        )
