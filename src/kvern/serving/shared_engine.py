"""An engine that several threads of a program use at the same time.

    thread A   generate ----- add -- wait_until ................... answers
    thread B        generate ---- add -- wait_until ............... answers
                                         |
                                     the leader makes the steps, for all that wait

Callers join one batch. A thread that waits for answers makes steps if no other thread does; it is the leader then.
Between two steps the leader lets other threads enter, which add requests and end them.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from kvern.errors import EngineClosed, EngineDied


def check_process(made_in: int) -> None:
    """Raises EngineDied in another process than the one in which an engine was made."""
    if os.getpid() != made_in:
        raise EngineDied(
            f"an engine was made in process {made_in}, and this is process {os.getpid()}, which was forked from it: "
            "threads, locks and devices do not go along, neither to that engine nor to a new one. Start the process "
            "with multiprocessing's method 'spawn', or fork before the first LLM is made"
        )


class SteppedEngine(Protocol):
    """An engine that does its work in steps that the caller makes."""

    def step(self) -> Sequence[object]:
        """Make a step."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their outputs keep what they have."""

    def close(self) -> None:
        """Abort what runs, and free what the engine holds."""


class _Follower:
    """A thread that waits while another one makes the steps."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.woken = threading.Event()


class SharedEngine:
    """Gives an engine to one thread at a time.

    Everything but `abort` raises EngineDied in a process that was forked from the one in which the engine was made.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._steps = 0
        self._process = os.getpid()
        self._closed = False
        self._free = threading.Condition()
        self._entering = 0
        self._holder: int | None = None
        """The thread that uses the engine now."""
        self._has_leader = False
        self._followers: list[_Follower] = []
        self._aborted: deque[Sequence[str]] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the engine for oneself, between two steps. Not reentrant."""
        check_process(self._process)
        with self._free:
            self._entering += 1
            try:
                self._free.wait_for(lambda: self._holder is None)
            finally:
                self._entering -= 1
            self._holder = threading.get_ident()
        try:
            self._check_open()
            yield
        finally:
            self._leave()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their outputs keep what they have.

        It may be called while this thread has the engine: Python closes a generator wherever it finds it unused.
        """
        self._aborted.append(request_ids)
        if self._holder != threading.get_ident():
            with suppress(EngineDied), self.held():
                pass

    def close(self) -> None:
        """End the engine, once: everything but `abort` raises EngineClosed then."""
        if self._closed:
            return
        with self.held():
            self._closed = True
            self._engine.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed: make another one")

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Waits until `done` returns True, which is called between steps, by any of the threads that wait."""
        follower = _Follower(done)
        check_process(self._process)
        try:
            while not done():
                with self._free:
                    leads = not self._has_leader
                    if leads:
                        self._has_leader = True
                    else:
                        follower.woken.clear()
                        self._followers.append(follower)
                if leads:
                    self._lead(done)
                else:
                    follower.woken.wait()
        finally:
            with self._free:
                if follower in self._followers:
                    self._followers.remove(follower)
                if self._followers and not self._has_leader:
                    self._followers.pop(0).woken.set()

    def wait_for_step(self) -> None:
        """Return when a step was made."""
        before = self._steps
        self.wait_until(lambda: self._steps != before)

    def _lead(self, done: Callable[[], bool]) -> None:
        try:
            while not done():
                self._step()
                with self._free:
                    waiting = []
                    for follower in self._followers:
                        if follower.done():
                            follower.woken.set()
                        else:
                            waiting.append(follower)
                    self._followers = waiting
        finally:
            with self._free:
                self._has_leader = False

    def _step(self) -> None:
        with self._free:
            self._free.wait_for(lambda: self._holder is None and not self._entering)
            self._holder = threading.get_ident()
        try:
            self._check_open()
            self._engine.step()
            self._steps += 1
        finally:
            self._leave()

    def _leave(self) -> None:
        try:
            while self._aborted and not self._closed:
                request_ids = self._aborted.popleft()
                try:
                    self._engine.abort(request_ids)
                except KeyboardInterrupt:  # who leaves next ends them
                    self._aborted.appendleft(request_ids)
                    raise
        finally:
            with self._free:
                self._holder = None
                self._free.notify_all()
