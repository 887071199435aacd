"""The server's side of `kvern.structured.worker`: grammars compiled where they do no harm, by turns between owners."""

import asyncio
import contextlib
import socket
import sys
import time
from collections import deque

import msgspec

from kvern.errors import InvalidParameter, ServerBusy
from kvern.io.children import LENGTH, READY
from kvern.structured.grammar import (
    MOST_MEMORY,
    MOST_SECONDS,
    Grammars,
    GrammarSetup,
    GrammarVerdict,
)

CHILDREN = 2
"""The number of child processes that compile at the same time, each for one owner."""
LONGEST_WAIT = 10.0
"""The most seconds that a form waits for its turn."""
LONGEST_SECONDS = 10 * MOST_SECONDS
"""The most seconds for one form, even on a busy machine."""
LONGEST_START = 60.0
"""Seconds until a child must be ready, of which the first waits for the worker's tokenizer."""
Worker = asyncio.Task[tuple[asyncio.subprocess.Process, socket.socket]]
"""Its start, with its process and the socket that takes the children's."""


class Child:
    """The socket of one process that compiles."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def compile(self, form: bytes) -> GrammarVerdict:
        """Raises IncompleteReadError or OSError if the process dies."""
        self._writer.write(len(form).to_bytes(LENGTH) + form)
        length = int.from_bytes(await self._reader.readexactly(LENGTH))
        return msgspec.msgpack.decode(await self._reader.readexactly(length), type=GrammarVerdict)

    def close(self) -> None:
        """Ends the process, at once or when the time of its form is over."""
        self._writer.close()


class GrammarProcesses:
    """Compiles for `grammars`, which then know the outcome. Belongs to one event loop; `close` it."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._idle: list[Child] = []
        self._worker: Worker | None = None
        self._busy: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._running: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Some form is being compiled, or waits for its turn."""
        return bool(self._busy)

    def start(self) -> None:
        """Begin to load the tokenizer, so that the first form does not wait for it."""
        if self._worker is None:
            self._worker = asyncio.create_task(self._start())
            self._worker.add_done_callback(_look_at)

    async def close(self) -> None:
        """Ends all processes."""
        for task in self._running:
            task.cancel()
        for child in self._idle:
            child.close()
        if self._worker is not None:
            await _end(self._worker)

    async def compile(self, form: bytes, owner: str) -> None:
        """Compiles a form, which `grammars` knows then; forms of one `owner` are compiled one by one.

        Raises ServerBusy if the turn of this one does not come.
        """
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await self._enter(owner)
        except TimeoutError as error:
            raise ServerBusy(
                f"structured: other forms are compiled, and the turn of this one did not come in {LONGEST_WAIT:g} s: "
                "try again later"
            ) from error
        task = asyncio.create_task(self._compile_now(form, owner))  # which goes on if its client leaves
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def _compile_now(self, form: bytes, owner: str) -> None:
        try:
            if self._grammars.knows(form):
                return
            verdict = await self._verdict(form)
            self._grammars.remember(form, verdict.grammar or InvalidParameter(verdict.error))
        finally:
            self._leave(owner)

    async def _verdict(self, form: bytes) -> GrammarVerdict:
        while True:
            fresh = not self._idle
            child = await self._fork() if fresh else self._idle.pop()
            start = time.monotonic()
            try:
                async with asyncio.timeout(LONGEST_SECONDS):
                    verdict = await child.compile(form)
            except (asyncio.IncompleteReadError, OSError):  # TimeoutError is one
                child.close()
                seconds = time.monotonic() - start
                if fresh or seconds >= MOST_SECONDS:  # else it may have ended before
                    return GrammarVerdict(error=_reason(seconds))
                continue
            if verdict.grammar is None:
                child.close()  # with whatever memory it took
            else:
                self._idle.append(child)
            return verdict

    async def _enter(self, owner: str) -> None:
        if owner not in self._busy and len(self._busy) < CHILDREN:
            self._busy.add(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave(owner)
            raise

    def _leave(self, owner: str) -> None:
        """Passes the turn to the owner who has waited longest."""
        self._busy.discard(owner)
        for other in [name for name in self._waiting if name not in self._busy]:
            turns = self._waiting.pop(other)
            while turns and turns[0].done():  # they left
                turns.popleft()
            if turns:
                self._busy.add(other)
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[other] = turns
                return

    async def _fork(self) -> Child:
        for _ in range(2):  # a worker that died or did not start is replaced
            self.start()
            worker = self._worker
            assert worker is not None
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # TimeoutError is one
                _, control = await asyncio.shield(worker)
                return await _child(control)
            if self._worker is worker:
                self._worker = None
            await _end(worker)
        raise ServerBusy("structured: the process that compiles forms does not start: try again later")

    async def _start(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", "kvern.structured.worker", str(theirs.fileno())]
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            setup = msgspec.msgpack.encode(GrammarSetup(str(self._grammars.folder), self._grammars.vocab_size))
            ours.sendall(len(setup).to_bytes(LENGTH) + setup)
        except BaseException:
            ours.close()  # which ends a process that did start
            raise
        return process, ours


async def _child(control: socket.socket) -> Child:
    """Starts a child of the worker with this socket. Raises IncompleteReadError or OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        raise
    child = Child(reader, writer)
    try:
        async with asyncio.timeout(LONGEST_START):
            await reader.readexactly(len(READY))
    except BaseException:
        child.close()
        raise
    return child


def _look_at(worker: Worker) -> None:
    """Marks a start failure as seen: users of the worker get it, and without users it is ignored."""
    if not worker.cancelled():
        worker.exception()


async def _end(worker: Worker) -> None:
    with contextlib.suppress(OSError):  # it did not start, or has ended
        process, control = await worker
        control.close()
        process.kill()
        await process.wait()


def _reason(seconds: float) -> str:
    if seconds >= MOST_SECONDS:
        what = f"to compile the form takes more than {MOST_SECONDS:g} s"
    else:
        what = f"to compile the form takes more than {MOST_MEMORY >> 20} MiB of memory, or breaks the compiler"
    return f"structured: {what}: use fewer properties, patterns, alternatives or repetitions, or less nesting"
