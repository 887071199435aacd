"""A store on a disk, disk:/path:500GB: a file for each page, in a folder that several processes may share.

Files appear under their names when they are whole, so a writer that is killed leaves nothing that is ever read. They
are not synced: after a loss of power some may be empty or wrong, which the shelf's check of each page finds.
"""

import contextlib
import errno
import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from kvern.io.files import as_size
from kvern.tiers.page_folder import Listing, PageFile, PageFolder, on_disk, page_path, temporary_path
from kvern.tiers.rare_warnings import RareWarnings
from kvern.tiers.store import Identity, read_bytes

THREADS = 4
"""Threads that read and write the pages of one batch."""
RESCAN_SECONDS = 60.0
RESCAN_SHARE = 0.1
"""The most of the time that reading the folder again may take."""
PAUSE_SECONDS = 0.0005
"""A scan often pauses for so long, so that the engine's thread need not wait for it."""
CANDIDATES = 8192
"""Pages that a scan notes at least as those to evict next."""
SLACK = 0.02
"""The share of the limit that an eviction frees, so that not every put evicts."""
TOUCH_SECONDS = 60.0
"""A page's time of last use is written at most so often."""
WRITING_BACK = 64
"""Files whose pages the kernel is still writing to the disk."""
BROKEN = frozenset({errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO})
"""Errors of a whole disk: they are raised, so that it is not asked for a while."""
RETRY_PAGES = 8
"""So many pages are left free at least on a disk that has been full."""

logger = logging.getLogger("kvern")


def disk(rest: str, identity: Identity) -> "DiskStore":
    """Makes the store of an option disk:/path:500GB. Raises ValueError."""
    path, colon, size = rest.rpartition(":")
    if not colon or "/" in size:
        path, size = rest, ""
    if not (folder := Path(path).expanduser()).is_absolute():
        raise ValueError(f"the folder {path!r} must be an absolute path, as in disk:/path:500GB")
    try:
        return DiskStore(folder, read_bytes(size) if size else None, identity)
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be used: {error.strerror}") from error


class DiskStore:
    """Pages in a folder, at most `limit` bytes of all identities; the least recently used are evicted.

    None as limit: half of what is free at the start and what the folder has already, so that a cache which nobody
    bounded leaves the other half of the disk to others. The index takes about 250 bytes of memory for each page.
    """

    is_local = True

    def __init__(self, path: Path, limit: int | None, identity: Identity) -> None:
        self._folder = PageFolder.made(path)
        self._folder.pause = PAUSE_SECONDS
        self._warnings = RareWarnings(str(path))
        self._identity = identity.digest.hex()
        self._description = identity.description
        self._max_age = identity.max_age
        self._make_folder()
        self._most = limit or (self._folder.free() + self._folder.bytes.add()) // 2
        self._limit = self._most
        """The bytes that pages may take now: less than `_most` where others need the disk."""
        self._spare = 0
        """The bytes that are left free to others on a disk that has been full; 0 if it has not."""
        self._is_full = False
        self._index: list[dict[bytes, float]] = [{} for _ in range(256)]
        """When each page was written, by the first byte of its name."""
        self._touched: dict[bytes, float] = {}
        self._candidates: deque[PageFile] = deque()
        self._pages = 0
        self.evicted = 0
        """Pages that this process has removed to make space."""
        self._writing_back: deque[int] = deque()
        self._new_hits = 0
        self._evicting = threading.Lock()
        self._scanning = threading.Lock()
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS, "kvern-disk")
        self._keeper = threading.Thread(target=self._keep_index, name="kvern-disk-index", daemon=True)
        self._keeper.start()
        logger.info("%s keeps up to %s of KV pages", path, as_size(self._limit))

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Returns which pages the index knows."""
        oldest = self._oldest()
        return [self._index[name[0]].get(name, -1.0) >= oldest for name in names]

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Reads pages. Returns which were filled."""
        filled = self._all(self._read, names, places)
        with self._counting:
            self._new_hits += sum(filled)
        return filled

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Writes the pages that the folder does not have. Returns which it has now."""
        return self._all(self._keep, names, places)

    def drop(self, names: Sequence[bytes]) -> None:
        """Removes pages that are not what they should be."""
        for name in names:
            path = page_path(self._identity, name)
            with contextlib.suppress(OSError):
                status = os.stat(path, dir_fd=self._folder.root, follow_symlinks=False)
                self._discard(name, status.st_size)

    def close(self) -> None:
        """Ends the threads and closes the folder."""
        self._closed.set()
        self._keeper.join()
        self._pool.shutdown()
        self._save_hits()
        self._forget_written(keep=0)
        self._folder.close()

    def scan(self) -> None:
        """Reads the folder: what others wrote and removed, how much it has, and what was not used for the longest."""
        with self._scanning:
            _, changes = self._folder.bytes.read()
            counted = _Counted()
            listed = counted.pages(self._listings())
            self._candidates = deque(heapq.nsmallest(max(CANDIDATES, self._pages // 16), listed))
            self._folder.bytes.correct(counted.size, changes)
            self._pages = counted.count
            self._forget_written(keep=0)
            self._save_hits()
            self._adapt_limit()
            recently = time.monotonic() - TOUCH_SECONDS
            self._touched = {name: when for name, when in self._touched.copy().items() if when > recently}

    def _all(
        self, work: Callable[[bytes, memoryview], bool], names: Sequence[bytes], places: Sequence[memoryview]
    ) -> list[bool]:
        """Returns what `work` says of each page, when no thread uses its place. Raises OSError for a broken disk."""
        if len(names) == 1:
            return [work(names[0], places[0])]
        began = [self._pool.submit(work, *each) for each in zip(names, places, strict=True)]
        wait(began)
        return [each.result() for each in began]

    def _oldest(self) -> float:
        """The time before which pages are too old."""
        return 0.0 if self._max_age is None else time.time() - self._max_age

    def _read(self, name: bytes, place: memoryview) -> bool:
        path = page_path(self._identity, name)
        try:
            file = self._folder.open(path)
        except FileNotFoundError:
            self._index[name[0]].pop(name, None)
            return False
        except OSError as error:
            return self._failed("read", error)
        try:
            status = os.fstat(file)
            if status.st_mtime < self._oldest():
                return False
            if status.st_size != len(place) or os.preadv(file, [place], 0) != len(place):
                self._discard(name, status.st_size)
                return False
            self._touch(name, file, status)
        except OSError as error:
            return self._failed("read", error)
        finally:
            os.close(file)
        return True

    def _touch(self, name: bytes, file: int | str, status: os.stat_result) -> None:
        """Notes that a page was used, for those that evict."""
        now = time.monotonic()
        if now - self._touched.get(name, -TOUCH_SECONDS) < TOUCH_SECONDS:
            return
        self._touched[name] = now
        times = (time.time_ns(), status.st_mtime_ns)
        if isinstance(file, int):
            os.utime(file, ns=times)
        else:
            os.utime(file, ns=times, dir_fd=self._folder.root, follow_symlinks=False)

    def _discard(self, name: bytes, size: int) -> None:
        """Removes a page that is damaged or too old. All pages of one name have the same size."""
        self._index[name[0]].pop(name, None)
        self._folder.remove(page_path(self._identity, name), on_disk(size))

    def _keep(self, name: bytes, place: memoryview) -> bool:
        path = page_path(self._identity, name)
        try:
            if self._is_kept(name, path, len(place)):
                return True
            if self._is_full and self._folder.free() < self._spare // 2:
                return False
            if self._is_full:
                self._adapt_limit()
                self._is_full = False
            return self._write(name, path, place)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return self._filled_up(error, on_disk(len(place)))
            return self._failed("write", error)

    def _is_kept(self, name: bytes, path: str, size: int) -> bool:
        """Returns whether a page is there already, which is a use of it."""
        try:
            status = os.stat(path, dir_fd=self._folder.root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if status.st_size != size or status.st_mtime < self._oldest():
            self._discard(name, status.st_size)
            return False
        self._touch(name, path, status)
        self._index[name[0]][name] = status.st_mtime
        return True

    def _write(self, name: bytes, path: str, place: memoryview) -> bool:
        """Writes a page. Returns False if there is no space for it.

        The unfinished file has its size before it is counted, so that who scans meanwhile counts it, too.
        """
        temporary = temporary_path(path)
        file = self._create(temporary, path, len(place))
        size = on_disk(len(place))
        has_space = False
        is_written = False
        try:
            has_space = self._make_space(size)
            if has_space:
                done = 0
                while done < len(place):
                    done += os.pwritev(file, [place[done:]], done)
                self._folder.rename(temporary, path)
                is_written = True
        finally:
            if not is_written:
                os.close(file)
                self._folder.unlink(temporary)
                self._folder.bytes.add(-size if has_space else 0)
        if is_written:
            self._index[name[0]][name] = time.time()
            self._end_writing(file)
        return is_written

    def _create(self, temporary: str, path: str, size: int) -> int:
        try:
            return self._folder.create(temporary, size)
        except FileNotFoundError:
            self._make_folder()
            self._folder.make_prefix(self._identity, path.split("/")[1])
            return self._folder.create(temporary, size)

    def _end_writing(self, file: int) -> None:
        # Written pages would fill the page cache, and push out what others need of it. This begins to write them to the
        # disk, and a second call drops them when that has ended. 1 GiB in pages of 1 MiB (ext4 on a virtual disk, 2
        # cores) went to the disk at 0.20-0.24 GB/s so, with O_DIRECT at 0.15-0.19, with fdatasync at 0.11, and plain
        # at 0.15; in the page cache stayed 67-84 MiB, 0, 0, and all of it.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        self._writing_back.append(file)
        self._forget_written(keep=WRITING_BACK)

    def _forget_written(self, keep: int) -> None:
        """Drops written files from the page cache, but for the last ones, and closes them."""
        while len(self._writing_back) > keep:
            with contextlib.suppress(IndexError):  # another thread was faster
                file = self._writing_back.popleft()
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)

    def _make_folder(self) -> None:
        self._folder.make(self._identity, self._description)

    def _make_space(self, size: int) -> bool:
        """Reserves bytes, and evicts pages for them. Returns False if that is not possible now."""
        if size > self._limit:
            return False
        total = self._folder.bytes.add(size)
        if total <= self._limit:
            return True
        with self._evicting:
            if self._evict(int(self._limit * (1 - SLACK))) <= self._limit:
                return True
        self._folder.bytes.add(-size)
        return False

    def _evict(self, target: int) -> int:
        """Removes pages until the folder has `target` bytes, and returns how many it has. Several processes may."""
        total = self._folder.bytes.add()
        for scanned in (False, True):
            if scanned and total > self._limit:
                self.scan()
                total = self._folder.bytes.add()
            while total > target and self._candidates:
                page = self._candidates.popleft()
                if self._folder.is_unused(page):
                    total -= self._folder.remove(page.path, page.size)
                    self.evicted += 1
                    if page.path.startswith(self._identity):
                        self._index[int(page.name[:2], 16)].pop(bytes.fromhex(page.name), None)
        return total

    def _listings(self) -> Iterator[Listing]:
        """Yields what the folder has; afterwards the index follows, and pages that are too old are removed."""
        for identity in self._folder.identities():
            for listing in self._folder.listings(identity, clean=True):
                yield listing
                if identity == self._identity:
                    self._update_index(listing)
                if self._closed.is_set():
                    return

    def _update_index(self, listing: Listing) -> None:
        oldest = self._oldest()
        found = {}
        for page in listing.pages:
            if page.written >= oldest:
                found[bytes.fromhex(page.name)] = page.written
            else:
                self._folder.remove(page.path, page.size)
        known = self._index[int(listing.prefix, 16)].copy()
        recent = {name: written for name, written in known.items() if written >= listing.begun}
        self._index[int(listing.prefix, 16)] = found | recent

    def _save_hits(self) -> None:
        with self._counting:
            hits = self._new_hits
            self._new_hits = 0
        if hits:
            with contextlib.suppress(OSError):
                self._folder.add_hits(self._identity, hits)

    def _keep_index(self) -> None:
        """Scans now and then until the store is closed."""
        wait = 0.0
        while not self._closed.wait(wait):
            begun = time.monotonic()
            try:
                self.scan()
            except (OSError, ValueError) as error:
                self._warnings.warn("scan", f"its files cannot be listed: {error}")
            wait = max(RESCAN_SECONDS, (time.monotonic() - begun) / RESCAN_SHARE)

    def _filled_up(self, error: OSError, size: int) -> bool:
        """Gives up a share of the pages on a full disk, so that others can write, and takes no page until some fit."""
        self._is_full = True
        with contextlib.suppress(OSError), self._evicting:
            self._forget_written(keep=0)  # what is open takes space though it is evicted
            self._spare = max(int(self._folder.bytes.add() * SLACK), RETRY_PAGES * size)
            self._adapt_limit()
            self._evict(self._limit)
        self._warnings.warn("full", f"{error.strerror}: it keeps fewer pages, so that {as_size(self._spare)} stay free")
        return False

    def _adapt_limit(self) -> None:
        """Follows what others leave of a disk that has been full."""
        if self._spare:
            self._limit = max(0, min(self._most, self._folder.bytes.add() + self._folder.free() - self._spare))

    def _failed(self, what: str, error: OSError) -> bool:
        if error.errno in BROKEN:
            raise error
        self._warnings.warn(what, f"a page cannot be {'read' if what == 'read' else 'written'}: {error.strerror}")
        return False


class _Counted:
    """Counts pages and their bytes in passing."""

    def __init__(self) -> None:
        self.count = 0
        self.size = 0

    def pages(self, listings: Iterator[Listing]) -> Iterator[PageFile]:
        """Yields the pages of listings."""
        for listing in listings:
            self.count += len(listing.pages)
            self.size += listing.unfinished + sum(page.size for page in listing.pages)
            yield from listing.pages
