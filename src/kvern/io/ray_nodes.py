"""Processes on the nodes of a Ray cluster. Each is held by an actor, which reserves processors and GPUs of its node.

  here: NodeProcess --Ray--> Keeper, an actor on some node --> python -m MODULE ADDRESS ..., which connects to here

If an actor ends or is lost with its node, its process ends as well. Ray transfers address and key to them: whoever may
use the cluster could run anything there anyway, and Ray's token authentication protects that.
"""

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq

from kvern.errors import ConfigError, in_a_line
from kvern.io.bytecode import bytecode_environment
from kvern.io.sockets import KEY, MOST_PROCESSES, listen

logger = logging.getLogger("kvern")

NAMESPACE = "kvern"
GROUP = "KVERN_RAY_GROUP"
"""The variable with the placement group of an engine and its ranks: namespace/name."""
KILLED = -signal.SIGKILL


def join_cluster(namespace: str = NAMESPACE) -> str:
    """Joins the cluster that RAY_ADDRESS names, or this machine's, and returns this node's address.

    Raises ConfigError if there is none, or Ray is not installed.
    """
    ray = ray_module()
    if not ray.is_initialized():
        try:
            with _own_signals():
                ray.init(os.environ.get("RAY_ADDRESS", "auto"), namespace=namespace, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"executor is ray, and the cluster cannot be joined ({' '.join(str(error).split())[:300]}): start a "
                "node of it on this machine with ray start, and name it by RAY_ADDRESS"
            ) from error
    return str(ray.util.get_node_ip_address())


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's signal handlers, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can change them
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ray_module() -> Any:
    """Returns the module of Ray, an optional package. Raises ConfigError."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("executor is ray, and Ray is not installed: pip install 'kvern[ray]'") from error


def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="kvern-", ignore_cleanup_errors=True)


class Keeper:
    """The actor that holds one process."""

    def run(
        self, module: str, address: str, environment: dict[str, str], given: bytes, notes: bool, each: dict[str, int]
    ) -> tuple[int, bytes]:
        """Runs a module until it ends. Returns its exit code and, with `notes`, the content of the file to which it
        wrote its notes.

        `given` is its standard input. The variable MOST_PROCESSES is the number of processes, each with the resources
        `each`, that this node can still start.
        """
        with contextlib.ExitStack() as kept:
            file = Path(kept.enter_context(_folder()), "notes") if notes else None
            arguments = [address, *([] if file is None else [str(file)]), str(os.getpid())]
            most = {MOST_PROCESSES: str(_room_here(each))}
            variables = {**os.environ, **bytecode_environment(), **environment, **most}
            command = [sys.executable, "-m", module, *arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables)  # noqa: S603 (our own words)
            process.communicate(given)
            return process.returncode, file.read_bytes() if file is not None and file.exists() else b""


class NodeProcess:
    """A process on some node, started once a node has room. With `ranks` above 1, room for its ranks is reserved as
    well.

    It ends with this process or by `kill`. Start it with `start`.
    """

    def __init__(self, cpus: int, gpus: int, ranks: int = 1, group: Any = None, bundle: int = 0) -> None:
        """`cpus` and `gpus` are reserved for this process and for each of its ranks. `group` and `bundle` are its place
        among the ranks of another process."""
        ray = ray_module()
        self._ray = ray
        self._own_group = None
        self._each = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        strategy: Any = "SPREAD"
        if ranks > 1:
            name = os.urandom(16).hex()
            self._own_group = group = ray.util.placement_group([self._each] * ranks, strategy="PACK", name=name)
            self._variables = {GROUP: f"{ray.get_runtime_context().namespace}/{name}"}
        else:
            self._variables = {}
        if group is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            strategy = strategies.PlacementGroupSchedulingStrategy(group, bundle)
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
        self._keeper = ray.remote(Keeper).options(**options).remote()
        self._result: Any = None
        self._killed = False
        self.notes = b""
        """The file that the process wrote, once it has ended."""

    def start(self, socket: "zmq.Socket[bytes]", module: str, given: bytes = b"", notes: bool = False) -> None:
        """Runs the module as `Keeper.run` does; it connects to this socket."""
        address, key = listen(socket, self._ray.util.get_node_ip_address())
        environment = {**self._variables, KEY: key}
        self._result = self._keeper.run.remote(module, address, environment, given, notes, self._each)

    def wait(self) -> int:
        """Waits for the exit code, negative for a signal. A process that was lost with its node counts as killed."""
        try:
            code, self.notes = self._ray.get(self._result)
        except self._ray.exceptions.RayError as error:
            if not self._killed:
                logger.warning("a process on a node of the Ray cluster is lost: %s", in_a_line(error))
            return KILLED
        return int(code)

    def kill(self) -> None:
        """Ends the process at once."""
        self._killed = True
        if self._ray.is_initialized():  # otherwise this process is ending, and they end with it
            self._ray.kill(self._keeper)
            if self._own_group is not None:
                self._ray.util.remove_placement_group(self._own_group)


def _room_here(each: Mapping[str, int]) -> int:
    """Returns how many processes of size `each` the actor's node has room for if it runs nothing else."""
    ray = ray_module()
    name = ray.get_runtime_context().get_node_id()
    there = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == name)
    return max(1, min(int(there.get(kind, 0) // count) for kind, count in each.items()))


def own_group() -> Any:
    """Joins the cluster and returns the placement group of this process's engine."""
    namespace, _, name = os.environ[GROUP].partition("/")
    join_cluster(namespace)
    return ray_module().util.get_placement_group(name)


def check_room(cpus: int, gpus: int) -> None:
    """Raises ConfigError if the whole cluster has too few processors or GPUs, so that the request could never start."""
    there = ray_module().cluster_resources()
    for name, wanted in (("CPU", cpus), ("GPU", gpus)):
        if there.get(name, 0) < wanted:
            raise ConfigError(
                f"the engines need {wanted} {name}s, and the Ray cluster has {there.get(name, 0):g}: add nodes, "
                "or lower the number of engines, tensor_parallel_size, pipeline_parallel_size or threads"
            )
