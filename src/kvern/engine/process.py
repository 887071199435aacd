"""The engine as a process of its own: `python -m kvern.engine.process ADDRESS` serves the process that started it."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import zmq

from kvern.config import EngineConfig
from kvern.engine.core import EngineCore
from kvern.engine.device import resolve_device
from kvern.engine.factory import build_core
from kvern.engine.startup import Startup
from kvern.engine.wire import (
    AddRequests,
    Events,
    Failed,
    FinishRequests,
    Ready,
    Shutdown,
    Start,
    decode_for_engine,
    encode,
)
from kvern.errors import KvernError
from kvern.request import Request

logger = logging.getLogger("kvern")

HEARTBEAT_SECONDS = 0.5
"""How often an engine with nothing to say gives a sign of life, and looks whether its parent lives."""
LINGER_MILLISECONDS = 2000
"""So long the last words may take to reach the server; if it has died they never do."""


def main(address: str) -> int:
    """Load the model that the first message names, then run what is asked until Shutdown or the parent's end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the server decides
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)  # a server that is busy must not stop the engine
    socket.set(zmq.LINGER, LINGER_MILLISECONDS)
    socket.connect(address)
    start = decode_for_engine(socket.recv())
    assert isinstance(start, Start)
    config = EngineConfig(**start.config)
    startup = Startup()
    try:
        core, _, plan = build_core(config, Path(config.model or ""), startup)
    except KvernError as error:
        socket.send(encode(Failed(str(error))))
        return 2
    socket.send(
        encode(Ready(plan.max_model_len, core.scheduler.limits.max_batch_requests, str(startup), gpu_uuid(config)))
    )
    try:
        serve(socket, core, parent)
    except Exception as error:
        logger.exception("a step failed")
        socket.send(encode(Failed(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def serve(socket: "zmq.Socket[bytes]", core: EngineCore, parent: int) -> None:
    """Carry out messages and steps, in turns."""
    spoke = time.monotonic()
    while os.getppid() == parent:
        while socket.poll(0 if core.has_work else int(1000 * HEARTBEAT_SECONDS)):
            match decode_for_engine(socket.recv()):
                case AddRequests(requests):
                    leader: Request | None = None
                    for message in requests:
                        request = message.request(leader)
                        leader = leader or request
                        core.add(request)
                case FinishRequests(request_ids, reason, stop_reason):
                    core.finish(request_ids, reason, stop_reason)
                case Shutdown():
                    return
        started = time.monotonic()
        events = core.step() if core.has_work else []
        now = time.monotonic()
        if events or now - spoke >= HEARTBEAT_SECONDS:
            socket.send(encode(Events(events, core.statistics(), now - started)))
            spoke = now


def gpu_uuid(config: EngineConfig) -> str | None:
    """The GPU's name in the driver's own tools; None on a CPU."""
    if resolve_device(config).type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
