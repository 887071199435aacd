"""Writers of pages that are killed at a line: `python -m tests.support.killed_writers KIND FOLDER SEED COUNT`.

A forked process puts and drops pages, and kills itself before the line of the store's code whose number, among all
lines that it would execute, is drawn. Another then opens what is left, checks it, and writes a line for each such
point: the number of the newest page that it found.
"""

import mmap
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from kvern.tiers.disk import DiskStore, disk
from kvern.tiers.host import HostStore
from tests.support.page_stores import IDENTITY, get, has, put

SIZE = 120_000
PAGE = 5000
KEPT = range(8)
"""Pages that are written before."""
NEW = range(100, 130)
FILES = ("tiers/host.py", "tiers/disk.py", "tiers/page_folder.py")


def stores(kind: str, folder: Path) -> Callable[[], HostStore | DiskStore]:
    """Opens the store again and again over the same pages."""
    if kind == "host":
        memory = mmap.mmap(-1, SIZE)
        return lambda: HostStore(SIZE, memory)

    def opened() -> DiskStore:
        store = disk(f"{folder}:{SIZE}", IDENTITY)
        store.scan()
        return store

    return opened


def work(store: HostStore | DiskStore) -> None:
    """Writes more than fits, so that pages make room for others."""
    for number in NEW:
        put(store, [number], PAGE)
        store.drop([])
    get(store, NEW[-3:-2], PAGE)


def lines(last: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace that kills this process before line number `last`; the number of lines is in its attribute `count`."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return trace if frame.f_code.co_filename.endswith(FILES) else None
        if event == "line":
            trace.count += 1  # type: ignore[attr-defined]
            if trace.count == last:  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    trace.count = 0  # type: ignore[attr-defined]
    return trace


def forked(run: Callable[[], None]) -> int:
    """Runs a function in a process of its own; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        run()
        os._exit(0)
    except BaseException:  # nothing of the parent's may run in the child
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def checked(opened: Callable[[], HostStore | DiskStore]) -> int:
    """The newest page that the next process has; all are right, and it can write."""
    store = opened()
    known = [number for number in (*KEPT, *NEW) if has(store, [number])[0]]
    assert all(get(store, known, PAGE)), "a page that is known is not there"
    assert put(store, [7777], PAGE) == [True]
    assert get(store, [7777], PAGE) == [True]
    store.close()
    return max(known)


def points(kind: str, folder: Path, seed: int, count: int) -> Iterator[int]:
    """The newest pages that were found after each kill."""
    dice = random.Random(seed)
    total = 0
    for number in range(count + 1):
        opened = stores(kind, folder / str(number))
        before = opened()
        put(before, KEPT, PAGE)
        before.close()
        last = dice.randrange(1, total + 1) if number else 0

        def until_killed(opened: Callable[[], HostStore | DiskStore] = opened, last: int = last) -> None:
            store = opened()
            trace = lines(last)
            sys.settrace(trace)
            work(store)
            sys.settrace(None)
            (folder / "lines").write_text(str(trace.count))  # type: ignore[attr-defined]
            store.close()

        status = forked(until_killed)
        if number:
            assert os.WIFSIGNALED(status), status
            yield checked(opened)
        else:
            assert status == 0
            total = int((folder / "lines").read_text())


if __name__ == "__main__":
    place = Path(sys.argv[2])
    for found in points(sys.argv[1], place, int(sys.argv[3]), int(sys.argv[4])):
        print(found, flush=True)
