"""A rank behind the first as a process of its own: `python -m kvern.runner.ranks.rank_process ADDRESS PARENT`.

It serves the process PARENT, that of the first rank, which started it, and ends when that has.
"""

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from kvern.cache.messages import TierMessage
from kvern.config import EngineConfig
from kvern.drafting.models.choice import draft_folder
from kvern.errors import KvernError
from kvern.io.interpreter import settle
from kvern.io.sockets import connect
from kvern.models.folder import folder_here
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.ranks.ranks import Ranks
from kvern.request.step import StepResult
from kvern.runner.device import resolve_device
from kvern.runner.executor import Executor, least_of, tiered
from kvern.runner.plan import Layout
from kvern.runner.ranks import rank_wire as wire
from kvern.runner.ranks.rank_limits import rank_of
from kvern.runner.startup import Startup
from kvern.runner.tier import Tier
from kvern.runner.worker import Worker
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

IPC = "ipc://"
MEETING = ("idle", "sleep", "wake")
"""Methods after which all ranks wait for each other."""
LOOK_SECONDS = 0.25
"""The interval at which a rank looks whether the first one lives."""
READING_MILLISECONDS = 10
"""The interval at which it is seen whether new weights were read."""
SAVING_MILLISECONDS = 1
"""The interval at which it is seen whether pages that are awaited were saved."""
LINGER_MILLISECONDS = 2000
"""So long the last words may take to reach the first rank."""


class Rank(NamedTuple):
    """The parts that a rank of an engine runs steps with."""

    config: EngineConfig
    folder: Path
    draft: Path | None
    spec: ModelSpec
    worker: Worker
    ranks: Ranks
    layout: Layout
    tier: Tier | None


def main(address: str, parent: int, run: "Callable[[zmq.Socket[bytes], Rank], None]") -> int:
    """Load this rank's share of the model, then `run` it, without end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the first rank decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent, address), name="parent", daemon=True).start()
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set(zmq.LINGER, LINGER_MILLISECONDS)
    connect(socket, address)
    try:
        rank = _make_rank(socket)
        settle()
        run(socket, rank)
    except KvernError as error:
        logger.error("a rank ends: %s", error)  # the first one may be busy, and end without having read it
        socket.send(wire.encode(wire.Failed(str(error))))
        return 2
    return 0


def _make_rank(socket: "zmq.Socket[bytes]") -> Rank:
    """Load this rank's share when the first one says so."""
    socket.send(wire.encode(wire.IsHere()))
    start = wire.decode_start(sys.stdin.buffer.read())
    config = EngineConfig(**start.config)
    folder = folder_here(config, start.folder)
    spec = describe_model(folder, read_config(folder), config.model_implementation)
    layers = [range(*places) for places in start.layers]
    device = resolve_device(config, start.rank)
    draft = None if start.draft is None else Path(start.draft)
    if draft is not None and config.executor == "ray":  # this machine has a folder of its own
        draft = draft_folder(config, folder, device.type)
    socket.send(wire.encode(wire.HasFiles()))
    ranks = rank_of(config, start.rank, layers, draft)
    worker = Worker(config, folder, spec, device, Startup(), draft, ranks)
    socket.send(wire.encode(wire.Found(worker.probe())))
    load = wire.decode_for_rank(socket.recv())
    assert isinstance(load, wire.LoadWeights)
    ranks.connect(load.meeting, device, config.rank_timeout, load.plan.kernels, ordered=config.deterministic)
    socket.send(wire.encode(wire.HasRoom(worker.load(load.plan))))
    take = wire.decode_for_rank(socket.recv())
    assert isinstance(take, wire.TakeMemory)
    worker.build(take.layout)
    rank = Rank(config, folder, draft, spec, worker, ranks, take.layout, worker.make_tier(take.layout))
    socket.send(wire.encode(wire.IsReady()))
    return rank


def run_steps(socket: "zmq.Socket[bytes]", rank: Rank) -> None:
    """Run steps without end. Raises what a step raises: then the ranks do not agree any more."""
    worker, runner = rank.worker, rank.worker.runner
    execute = tiered(runner.execute, rank.tier, runner, rank.ranks)
    in_flight: deque[StepResult] = deque()
    executor = Executor(worker, rank.tier)  # of all but steps
    weights = executor.weights
    tier = rank.tier
    while True:
        while weights.is_busy or (tier is not None and tier.is_awaited):
            if (found := weights.answer()) is not None:
                socket.send(wire.encode(wire.FoundWeights(weights.version, found)))
            elif tier is not None and (saved := tier.saved()) is not None:
                socket.send(wire.encode(wire.Saved(rank.ranks.number, saved)))
            elif socket.poll(READING_MILLISECONDS if weights.is_busy else SAVING_MILLISECONDS):
                break
        match wire.decode_for_rank(socket.recv()):
            case wire.RunStep(output):
                in_flight.append(execute(output))
                message = output.message(TierMessage)
                if tier is not None and message is not None and message.awaited:
                    tier.await_saves(output.step, [*message.saves, *message.written])
                if len(in_flight) >= rank.layout.depth:
                    in_flight.popleft().result()
                for step, seconds in measured(rank):
                    socket.send(wire.encode(wire.Measured(step, seconds)))
            case wire.Call(method, arguments):
                if method == "forget":
                    in_flight.clear()
                answer = getattr(executor, method)(*arguments)
                if method in MEETING:
                    rank.ranks.meet(worker.device)
                if method == "map_cache" and worker.memory.chunked is not None:
                    least_of(rank.ranks, runner, [answer])
            case wire.PlaceExperts(placements):
                worker.place_experts(placements)
            case wire.AddAdapter() as message:
                worker.adapters.add(message.key, message.adapter())
            case wire.ReadWeights(version, sources):
                weights.begin(version, sources)


def measured(rank: Rank) -> list[tuple[int, dict[int, float]]]:
    """The steps that were measured, of the first rank of a stage before the last."""
    times = rank.worker.times
    if times is None or rank.ranks.rank or rank.ranks.stage.is_last:
        return []
    return [(one.step, dict(one.seconds)) for one in times.take()]


def _end_with(parent: int, address: str) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    if address.startswith(IPC):  # its folder is the parent's, which may have been killed
        shutil.rmtree(Path(address.removeprefix(IPC)).parent, ignore_errors=True)
    os._exit(1)  # the main thread may wait for other ranks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), run_steps))
