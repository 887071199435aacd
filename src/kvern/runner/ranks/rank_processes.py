"""The processes of all ranks behind the first, from the first one's."""

import contextlib
import dataclasses
import logging
import os
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import zmq

from kvern.config import EngineConfig
from kvern.errors import ConfigError, EngineDied
from kvern.io.bytecode import bytecode_environment
from kvern.ranks.lost_ranks import Release
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.runner.ranks.rank_wire import Failed, RankMessage, StartRank, TurnTaken, decode_for_first, encode

logger = logging.getLogger("kvern")

SHARED = "/dev/shm"  # noqa: S108 (a folder of our own in it)
"""The folder of memory that processes share on Linux; elsewhere files are mapped, and may reach a disk."""
PATIENCE = 300.0
"""Seconds that a rank may take longer than the first to import its modules, or to read what that has in memory."""
TIMES = 3
"""And so many times the first one's seconds."""
LOOK_MILLISECONDS = 200
"""The interval at which a rank that is waited for is looked after."""

ENDING_SECONDS = 2.0
"""So long after a failed step the end of a rank, which may be its cause, may take to be noticed."""
FAILED = "a step failed, and the engine cannot go on: "
RANKS_DISAGREE = f"{FAILED}its ranks do not agree any more"

MODULE = "kvern.runner.ranks.rank_process"
MODULE_OF_DP_ATTENTION = "kvern.serving.dp_attention_rank"
"""The module of ranks in DP attention."""


class Process(Protocol):
    """On this machine or another."""

    def wait(self) -> int:
        """Its exit code, once there is one, negative: by which signal."""

    def kill(self) -> None:
        """End it at once."""


Answer = TypeVar("Answer", bound=RankMessage)


class RankProcesses:
    """All ranks but this process's own, which end when one of them does, or this object or process does.

    `layers`: those of each stage.

    `lost` is called, in a thread, with the exit code of the first that ended by itself, negative: by which signal.
    None: nobody looks after this process, so that a call `watched` which a GPU keeps waiting for longer than the
    engine's timeout ends them, too. `release` lets this process's GPU wait no longer for others that have ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Path,
        layers: Sequence[range],
        draft: Path | None = None,
        lost: Callable[[int], None] | None = None,
        release: Release | None = None,
    ) -> None:
        self.listener: sockets.socket | None = None
        """The address where the ranks meet by TCP, of this process."""
        context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        processes: list[Process] = []
        group = folder = None
        if config.executor == "ray":
            from kvern.io.ray_nodes import join_cluster, own_group

            group = own_group()
            self.listener = sockets.create_server((join_cluster(), 0))
            self.meeting = "tcp://{}:{}".format(*self.listener.getsockname())
        else:
            memory = SHARED if os.access(SHARED, os.W_OK) else None
            folder = tempfile.TemporaryDirectory(prefix="kvern-", dir=memory, ignore_cleanup_errors=True)
            self.meeting = str(Path(folder.name, "meeting"))
        module = MODULE_OF_DP_ATTENTION if config.enable_dp_attention else MODULE
        self._ranks = [rank for rank in range(config.ranks) if rank != config.first_rank]
        places = [(stage.start, stage.stop) for stage in layers]
        for rank in self._ranks:
            socket = context.socket(zmq.PAIR)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, 0)  # as many as are in flight
            guesses = None if draft is None else str(draft)
            start = encode(StartRank(dataclasses.asdict(config), str(model), guesses, rank, places))
            if folder is not None:
                processes.append(_child(socket, Path(folder.name, f"rank-{rank}"), module, start))
            else:
                from kvern.io.ray_nodes import NodeProcess

                bundle = (rank - config.first_rank) % config.ranks  # 0 is this process's
                process = NodeProcess(config.threads or 1, int(config.device == "cuda"), group=group, bundle=bundle)
                process.start(socket, module, start)
                processes.append(process)
            self._sockets.append(socket)
        self._release = release
        # CPUs wait for each other no longer than their own limit.
        patience = config.longest_silence if lost is None and release is not None else None
        self._end = _End(dict(zip(self._ranks, processes, strict=True)), folder, lost, release, patience)
        weakref.finalize(self, _leave, self._end, self._sockets, context, self.listener, os.getpid())

    def send(self, message: RankMessage) -> None:
        """Send a message to all ranks without waiting; the step will tell of a rank that has ended."""
        content = encode(message)
        for socket in self._sockets:
            with contextlib.suppress(zmq.Again):
                socket.send(content, zmq.NOBLOCK)

    def send_each(self, messages: Sequence[RankMessage]) -> None:
        """Send each rank its own message, without waiting."""
        for socket, message in zip(self._sockets, messages, strict=True):
            with contextlib.suppress(zmq.Again):
                socket.send(encode(message), zmq.NOBLOCK)

    def come(self) -> list[RankMessage]:
        """The messages of ranks since the last call, without waiting. Raises EngineDied if one has failed."""
        found = []
        for socket in self._sockets:
            while socket.poll(0):
                found.append(decode_for_first(socket.recv()))
        if (failed := next((said for said in found if isinstance(said, Failed)), None)) is not None:
            self.end()
            raise EngineDied(f"{FAILED}a rank: {failed.reason}")
        return found

    def turns(self, seconds: float) -> list[TurnTaken]:
        """The answers of all ranks to a turn, in their order, each within so many seconds. Raises EngineDied."""
        return [self._turn(rank, socket, seconds) for rank, socket in zip(self._ranks, self._sockets, strict=True)]

    def _turn(self, rank: int, socket: "zmq.Socket[bytes]", seconds: float) -> TurnTaken:
        until = time.monotonic() + seconds
        while not socket.poll(LOOK_MILLISECONDS):
            if self._end.reason is not None:
                raise self.give_up()
            if time.monotonic() > until:
                self.end()
                raise EngineDied(f"{FAILED}rank {rank} has not answered for {seconds:g} seconds")
        taken = decode_for_first(socket.recv())
        if isinstance(taken, Failed):
            self.end()
            raise EngineDied(f"{FAILED}rank {rank}: {taken.reason}")
        assert isinstance(taken, TurnTaken), "nothing else follows a turn"
        return taken

    def answers(self, kind: type[Answer], awaited: str, took: float) -> list[Answer]:
        """One of each, in their order. Raises ConfigError with the reason of one that cannot start.

        `awaited`: what each is to have done, which `took` the first one so many seconds. They do it at the same time,
        so that one which takes several times as long, and PATIENCE, hangs.
        """
        until = time.monotonic() + PATIENCE + TIMES * took
        ranks = zip(self._ranks, self._sockets, strict=True)
        return [self._answer(rank, socket, kind, awaited, until) for rank, socket in ranks]

    def _answer(self, rank: int, socket: "zmq.Socket[bytes]", kind: type[Answer], awaited: str, until: float) -> Answer:
        while not socket.poll(LOOK_MILLISECONDS):
            if self._end.reason is not None:
                raise ConfigError(f"the model cannot be loaded by {self._end.reason}; the log may say more")
            if time.monotonic() > until:
                raise ConfigError(
                    f"the model cannot be loaded: rank {rank} has not {awaited}, long after the first one was ready "
                    "for it; it may hang at its files, its device, or the network between them"
                )
        answer = decode_for_first(socket.recv())
        if isinstance(answer, Failed):
            raise ConfigError(f"rank {rank}: {answer.reason}")
        assert isinstance(answer, kind), "ranks answer in turns"
        return answer

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A call within may wait for other ranks; if one of them ended by itself, EngineDied is raised."""
        self._check()
        around, self._end.call = self._end.call, object()
        try:
            yield
        finally:
            self._end.call = around
        self._check()

    def _check(self) -> None:
        if self._end.reason is not None:
            raise self.give_up()

    def give_up(self) -> EngineDied:
        """End them, as a step failed; the error that says so, and which one ended by itself, if one did."""
        self._end.noticed.wait(ENDING_SECONDS)
        self.end()
        return EngineDied(RANKS_DISAGREE if self._end.reason is None else f"{FAILED}it lost {self._end.reason}")

    def end(self) -> None:
        """End them, and wait until this process's GPU has nothing to do."""
        self._end.all()
        if self._release is not None:
            self._release.finish()


def watched_steps(execute: Callable[[SchedulerOutput], StepResult], others: RankProcesses) -> Callable[..., StepResult]:
    """`execute`, whose results count for nothing if one of the `others` has ended meanwhile."""

    def watched(output: SchedulerOutput) -> StepResult:
        step = execute(output)
        return _WatchedStep(others.watched()(step.result), step.done)

    return others.watched()(watched)


class _WatchedStep(NamedTuple):
    """A step of ranks, some of which may end."""

    result: Callable[[], ModelRunnerOutput]
    done: Callable[[], bool]


def _child(socket: "zmq.Socket[bytes]", path: Path, module: str, start: bytes) -> "subprocess.Popen[bytes]":
    """A rank as a process of this one, which is sent `start` and connects to this socket."""
    address = f"ipc://{path}"
    socket.bind(address)
    command = [sys.executable, "-m", module, address, str(os.getpid())]
    process = subprocess.Popen(  # noqa: S603 (no shell, our own words)
        command, stdin=subprocess.PIPE, env=os.environ | bytecode_environment()
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # if it has ended, `answers` will tell
        process.stdin.write(start)
    return process


def _leave(
    end: "_End",
    sockets: "Sequence[zmq.Socket[bytes]]",
    context: "zmq.Context[zmq.Socket[bytes]]",
    listener: sockets.socket | None,
    process: int,
) -> None:
    if os.getpid() != process:
        return  # at the end of a process that was forked from the one that has the ranks
    end.all()
    if listener is not None:
        listener.close()
    for socket in sockets:  # the context, which waits for them, does not know those that go with their owner
        socket.close(linger=0)
    context.term()


class _End:
    """The end of processes, which end together, and of the folder in which they meet."""

    def __init__(
        self,
        processes: Mapping[int, Process],
        folder: "tempfile.TemporaryDirectory[str] | None",
        lost: Callable[[int], None] | None,
        release: Release | None,
        patience: float | None,
    ) -> None:
        """`processes`: by their ranks. `patience`: seconds of a `call`; None: no limit."""
        self._processes, self._folder = list(processes.values()), folder
        self._lost, self._release = lost, release
        self._wanted = threading.Lock()
        self.noticed = threading.Event()
        self.reason: str | None = None
        self.call: object | None = None
        """The call that is waited for now."""
        for rank, process in processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        if patience is not None:
            threading.Thread(target=self._end_silent, args=(patience,), name="silent-ranks", daemon=True).start()

    def all(self) -> None:
        """End all that run, and wait for that."""
        if self._wanted.acquire(blocking=False):
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait()
            if self._folder is not None:
                self._folder.cleanup()
            if self._release is not None:  # NCCL's groups end with whoever owns them
                self._release.free()

    def _watch(self, rank: int, process: Process) -> None:
        code = process.wait()
        if not self._wanted.locked():
            how = f"a signal, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._lose(f"rank {rank}, which ended with {how}", code)

    def _end_silent(self, patience: float) -> None:
        call, looks = self.call, 0  # not clocks: a process can be stopped for a while
        while not self._wanted.locked():
            call, looks = self.call, looks + 1 if call is not None and call is self.call else 0
            if looks * LOOK_MILLISECONDS > 1000 * patience:
                self._lose(f"its other ranks, for which a step has waited {patience:g} seconds", -signal.SIGKILL)
            time.sleep(LOOK_MILLISECONDS / 1000)

    def _lose(self, reason: str, code: int) -> None:
        self.reason = reason
        self.all()
        self.noticed.set()
        if self._lost is not None:
            logger.error("%s: its group ends with it", reason)
            self._lost(code)
        elif self._release is not None:
            self._release.begin()
