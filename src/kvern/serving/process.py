"""The engine as a process of its own: `python -m kvern.serving.process ADDRESS FILE PARENT`.

It serves the process PARENT, which started it, and ends when that has; in FILE it notes what it computes.
"""

import contextlib
import gc
import importlib
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from kvern.config import EngineConfig
from kvern.engine.loop import EngineLoop, refused
from kvern.engine.step_ring import make_ring, ring_path
from kvern.engine.step_watch import SHORTEST_SILENCE, RunningFile, StepWatch
from kvern.errors import KvernError, in_a_line
from kvern.io.interpreter import settle
from kvern.io.sockets import connect
from kvern.models.folder import folder_here
from kvern.request.events import TokenEvent
from kvern.runner import ahead
from kvern.runner.startup import Startup
from kvern.serving import wire
from kvern.serving.engine_cache import CacheTeller
from kvern.serving.engine_traces import StepTraces
from kvern.serving.engine_weights import WeightChanges
from kvern.tiers.arena import ARENA, ARENAS

if TYPE_CHECKING:
    from kvern.adapters.peft import Adapter
    from kvern.runner.plan import Layout
    from kvern.spec.facts import ModelFacts

logger = logging.getLogger("kvern")

HEARTBEAT_SECONDS = 0.5
"""The interval of signs of life of an idle engine, and of checks that its parent lives."""
READING_SECONDS = 0.01
"""The interval while it reads an adapter."""
COUNT_SECONDS = 1.0
"""The interval of reading the experts' counts while steps run, if they are wanted."""
MOST_MESSAGES = 256
"""The most messages that are taken between two steps or signs of life."""
LINGER_MILLISECONDS = 2000
"""The time for the last messages to reach the server; if it has died they never do."""


def main(address: str, running: str, parent: int) -> int:
    """Load the model that the first message names, then run what is asked until Shutdown or the parent's end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the server decides
        signal.signal(number, signal.SIG_IGN)
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)  # a server that is busy must not stop the engine
    socket.set(zmq.LINGER, LINGER_MILLISECONDS)
    connect(socket, address)
    gc.disable()  # nothing that a start makes is garbage
    ahead.identify_triton()
    importing = threading.Thread(target=import_engine, name="import", daemon=True)
    importing.start()
    while not socket.poll(int(1000 * HEARTBEAT_SECONDS)):
        if os.getppid() != parent:
            forget(running)
            os._exit(1)  # in the middle of imports
    start = wire.decode_for_engine(socket.recv())
    assert isinstance(start, wire.Start)
    try:
        config = EngineConfig(**start.config)
        if start.arena is not None:
            os.environ[ARENA], os.environ[ARENAS] = start.arena  # for ranks, too
        if config.device != "cpu":
            ahead.make_context()
        with signs_of_life(socket, running, parent):
            importing.join()
            from kvern.engine.factory import build_core, facts_of

            startup = Startup()
            watch = StepWatch(
                RunningFile(Path(running)),
                lambda seconds: socket.send(wire.encode(wire.Busy(seconds))),
                config.longest_silence,
                config.engine_timeout or SHORTEST_SILENCE,
                ring=make_ring(Path(running).parent),
            )
            folder = folder_here(config, config.model or "")
            core, spec, layout = build_core(
                config, folder, startup, prepares=True, watch=watch, streams=True, lost=end_like
            )
    except KvernError as error:
        socket.send(wire.encode(wire.Failed(str(error))))
        return 2
    settle()
    facts = facts_of(config, spec, layout, folder)
    ready = ready_with(config, layout, core, str(startup), facts)
    ready.steps_file = "" if watch.ring is None else str(watch.ring.path)
    socket.send(wire.encode(ready))
    try:
        serve(socket, core, parent, watch, config.expert_counts, running)
    except Exception as error:
        logger.exception("the engine failed")
        socket.send(wire.encode(wire.Failed(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        ring_path(Path(running).parent).unlink(missing_ok=True)
    if os.getppid() != parent:
        forget(running)
    return 0


def ready_with(
    config: EngineConfig, layout: "Layout", core: EngineLoop, report: str, facts: "ModelFacts"
) -> wire.Ready:
    """Returns the message about an engine that is loaded."""
    gpu = next(iter(layout.gpus), None)
    cached = config.dp_attention_size * layout.cached_tokens if config.prefix_cache else 0
    sizes = config.dp_attention_size, layout.blocks * layout.block_size * layout.token_bytes
    chunks = (0, 0, 0)
    if layout.chunk:
        chunks = (layout.chunk_bytes, layout.least_chunks, layout.most_chunks)
    sleeps = core.sleeps and (layout.device == "cpu" or config.enable_sleep)
    tensor = "by heads" if config.kv_tier_heads and not layout.states else f"-tp {config.tensor_parallel_size}"
    ranks = f"{tensor} -pp {config.pipeline_parallel_size}"
    ready = wire.Ready(
        layout.max_model_len, layout.max_batch_requests, report, gpu, facts, cached, *sizes, *chunks, sleeps
    )
    ready.gpu_bytes, ready.own_chunks = layout.certain_bytes, layout.own_chunks
    ready.pages = f"{core.pages.hex()} ({ranks})" if core.pages else ""
    return ready


def forget(running: str) -> None:
    """Remove the folder that the parent made, which has ended and cannot, and the steps."""
    shutil.rmtree(Path(running).parent, ignore_errors=True)
    ring_path(Path(running).parent).unlink(missing_ok=True)


def end_like(code: int) -> None:
    """End at once as a process did that ended with this exit code, negative: by which signal."""
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code or 1)


def import_engine() -> None:
    """Imports what takes longest: PyTorch takes seconds, from a cold disk many."""
    importlib.import_module("kvern.engine.factory")


@contextlib.contextmanager
def signs_of_life(socket: "zmq.Socket[bytes]", running: str, parent: int) -> Iterator[None]:
    """Say that this process lives, and end with its parent, while the block works, which must not use the socket."""
    ended = threading.Event()

    def speak() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            socket.send(wire.encode(wire.Busy()))
            if os.getppid() != parent:
                forget(running)
                os._exit(1)

    speaker = threading.Thread(target=speak, name="signs-of-life")
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()


def sleep(socket: "zmq.Socket[bytes]", core: EngineLoop, running: str, parent: int) -> bool:
    """Give the memory back, and take it again when the server says so; False: the engine is to end."""
    error, gpu_bytes = None, 0
    with signs_of_life(socket, running, parent):
        try:
            gpu_bytes = core.sleep()
        except OSError as failed:
            error = f"there is no place for its memory: {failed}"
    socket.send(wire.encode(wire.Slept(error, gpu_bytes)))
    while error is None:
        if not socket.poll(int(1000 * HEARTBEAT_SECONDS)):
            if os.getppid() != parent:
                return False
            continue
        match wire.decode_for_engine(socket.recv()):
            case wire.Wake():
                with signs_of_life(socket, running, parent):
                    core.wake()
                socket.send(wire.encode(wire.Woken()))
                break
            case wire.Shutdown():
                return False
    return True


def serve(
    socket: "zmq.Socket[bytes]", core: EngineLoop, parent: int, watch: StepWatch | None, counts: bool, running: str
) -> None:
    """Carry out messages and steps, in turns. `counts`: say now and then how many tokens experts have had.

    `watch` knows how long the core's steps may take. `running` as in `forget`.
    """
    spoke, again = time.monotonic(), False
    experts = ExpertCounts(core) if counts else None
    cache = CacheTeller(core, lambda changes: socket.send(wire.encode(changes)))
    adapters, weights = AdapterReader(core), WeightChanges(core)
    traces = StepTraces(core, lambda: socket.send(wire.encode(wire.Busy())), Path(running).parent)
    early: list[TokenEvent] = []
    prepares, sleeps = True, False
    while os.getppid() == parent:
        reads = adapters.busy or weights.busy or traces.busy
        idle = READING_SECONDS if reads else HEARTBEAT_SECONDS
        for _ in range(MOST_MESSAGES):
            if core.has_work or early or prepares or (sleeps and not reads):
                idle = 0.0 if early or not core.has_work else core.spare_seconds()
            if not socket.poll(int(1000 * idle)):
                prepares |= again and idle == HEARTBEAT_SECONDS  # sooner the next request might come, and wait
                break
            match wire.decode_for_engine(socket.recv()):
                case wire.AddRequest() | wire.BringPages() as message:
                    early += add(core, message)
                case wire.FinishRequests(request_ids, reason, stop_reason):
                    early += core.finish(request_ids, reason, stop_reason)
                case wire.LoadAdapter(key, path):
                    adapters.read(key, path)
                case wire.UnloadAdapter(key):
                    adapters.unload(key)
                case wire.EngineChange() as message:
                    socket.send(wire.encode(wire.Busy()))  # to copy weights may take longer than steps
                    early, spoke = early + weights.hear(message), -math.inf  # who asked waits for an answer
                case wire.WatchCache(wanted):
                    cache.watch(wanted)
                case wire.TakeTrace() as message:
                    traces.begin(message)
                case wire.Sleep():
                    sleeps = True
                    traces.cease()
                case wire.Shutdown():
                    return
        for answer in (*adapters.answers(), *weights.answers(), *traces.answers()):
            socket.send(wire.encode(answer))
        if sleeps and not (core.has_work or early or adapters.busy or weights.busy or traces.busy):
            sleeps = False
            if not sleep(socket, core, running, parent):
                return
        if prepares and not core.has_work:
            prepares, again = prepare(socket, core), False
        worked, started = core.has_work, time.monotonic()
        events, early = early + (traces.step() if worked else []), []
        cache.tell()
        now, rests = time.monotonic(), worked and not core.has_work
        if events or rests or now - spoke >= HEARTBEAT_SECONDS:
            more = traces.silence(watch), core.layer_times(), [] if experts is None else experts.due(rests, now)
            socket.send(wire.encode(wire.Events(events, core.statistics(), now - started, *more)))
            spoke, again = now, again or (rests and core.prepares_again)


def prepare(socket: "zmq.Socket[bytes]", core: EngineLoop) -> bool:
    """Make one thing that steps run faster with, after a sign of life; returns whether there are more."""
    socket.send(wire.encode(wire.Busy()))
    return core.idle()


def add(core: EngineLoop, message: wire.AddRequest | wire.BringPages) -> list[TokenEvent]:
    """Queue a request, or load pages of one that will come; the events that say why it cannot be."""
    if isinstance(message, wire.BringPages):
        core.bring(message.spec)
        return []
    try:
        core.add(message.spec, message.progress)
    except Exception as error:
        return refused(message.spec, error)
    return []


class ExpertCounts:
    """Reads now and then how many tokens each expert has had, without waiting for a step."""

    def __init__(self, core: EngineLoop) -> None:
        self._core = core
        self._reading = core.count_experts()
        self._counted = time.monotonic()

    def due(self, rests: bool, now: float) -> list[list[int]]:
        """Returns the counts of each layer if they are due; `rests`: no step runs."""
        if not rests and now - self._counted < COUNT_SECONDS:
            return []
        self._counted = now
        if rests:
            self._reading = self._core.count_experts()
        tokens = self._reading()
        self._reading = self._core.count_experts()
        return tokens


class AdapterReader:
    """Reads adapters in a thread, so that steps go on meanwhile."""

    def __init__(self, core: EngineLoop) -> None:
        self._core = core
        self._pool = ThreadPoolExecutor(1, "kvern-adapters")
        self._reading: dict[int, Future[Adapter]] = {}

    @property
    def busy(self) -> bool:
        """Something is being read."""
        return bool(self._reading)

    def read(self, key: int, path: str) -> None:
        """Begin to read."""
        self._reading[key] = self._pool.submit(self._core.read_adapter, path)

    def unload(self, key: int) -> None:
        """Forget an adapter, also one that is being read."""
        reading = self._reading.pop(key, None)
        if reading is None:
            self._core.unload_adapter(key)
        else:
            reading.cancel()

    def answers(self) -> list[wire.AdapterRead]:
        """About what was read since the last call; it can be used now."""
        answers = []
        for key in [key for key, reading in self._reading.items() if reading.done()]:
            try:
                adapter = self._reading.pop(key).result()
                self._core.add_adapter(key, adapter)
                answers.append(wire.AdapterRead(key, digest=adapter.digest))
            except KvernError as error:
                answers.append(wire.AdapterRead(key, str(error)))
            except Exception as error:  # the fault of that adapter alone
                logger.exception("an adapter cannot be read")
                answers.append(wire.AdapterRead(key, f"it cannot be read: {in_a_line(error)}"))
        return answers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
