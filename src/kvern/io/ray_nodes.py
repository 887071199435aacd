"""Processes on the nodes of a Ray cluster, each kept by an actor, which has some of its node's processors and GPUs.

    here: NodeProcess --Ray--> Keeper, an actor on some node --> python -m MODULE ADDRESS ..., which connects to here

An actor that is lost with its node, or ended, takes its process with it. Ray hands them their address and key: whoever
may use the cluster could run anything there anyway, and its token authentication says who may.
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
from kvern.io.sockets import KEY, listen

logger = logging.getLogger("kvern")

NAMESPACE = "kvern"
GROUP = "KVERN_RAY_GROUP"
"""The variable with the placement group of an engine and its ranks: namespace/name."""
MOST_PROCESSES = "KVERN_RAY_PROCESSES"
"""The variable in which a process is told how many like it its node has room for."""
KILLED = -signal.SIGKILL


def join_cluster(namespace: str = NAMESPACE) -> str:
    """Join the cluster that RAY_ADDRESS names, or one of this machine's; the address of this node.

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
    """Keep what signals do here, which Ray would have end the process."""
    if threading.current_thread() is not threading.main_thread():  # where nobody can change it
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ray_module() -> Any:
    """Ray, which is an extra. Raises ConfigError."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("executor is ray, and Ray is not installed: pip install 'kvern[ray]'") from error


def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="kvern-", ignore_cleanup_errors=True)


class Keeper:
    """The actor: of one process."""

    def run(
        self, module: str, address: str, environment: dict[str, str], given: bytes, notes: bool, each: dict[str, int]
    ) -> tuple[int, bytes]:
        """Run a module until it ends; its exit code, and what it wrote into the file that is its argument with `notes`.

        It is given `given` on its standard input, and told for how many that take `each` this node has room.
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
    """A process on some node, once one has room for it; with `ranks` above 1, room for so many is set aside with it.

    Ends when this one does, and with `kill`. Begin it with `start`.
    """

    def __init__(self, cpus: int, gpus: int, ranks: int = 1, group: Any = None, bundle: int = 0) -> None:
        """`cpus` and `gpus`: of the node, for this process and each of its ranks. `group` and `bundle`: where it is
        among the ranks of another."""
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
        """What it left behind, once it has ended."""

    def start(self, socket: "zmq.Socket[bytes]", module: str, given: bytes = b"", notes: bool = False) -> None:
        """Run the module as `Keeper.run` does, for it to connect to this socket."""
        address, key = listen(socket, self._ray.util.get_node_ip_address())
        environment = {**self._variables, KEY: key}
        self._result = self._keeper.run.remote(module, address, environment, given, notes, self._each)

    def wait(self) -> int:
        """Its exit code, once there is one, negative: by which signal. One that was lost with its node was killed."""
        try:
            code, self.notes = self._ray.get(self._result)
        except self._ray.exceptions.RayError as error:
            if not self._killed:
                logger.warning("a process on a node of the Ray cluster is lost: %s", in_a_line(error))
            return KILLED
        return int(code)

    def kill(self) -> None:
        """End it at once, wherever it is."""
        self._killed = True
        if self._ray.is_initialized():  # else this process is at its end, and all of these are with it
            self._ray.kill(self._keeper)
            if self._own_group is not None:
                self._ray.util.remove_placement_group(self._own_group)


def _room_here(each: Mapping[str, int]) -> int:
    """How many processes that take `each` the node of this actor has room for when it has nothing else."""
    ray = ray_module()
    name = ray.get_runtime_context().get_node_id()
    there = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == name)
    return max(1, min(int(there.get(kind, 0) // count) for kind, count in each.items()))


def own_group() -> Any:
    """The placement group of the engine that this process is, which joins the cluster for that."""
    namespace, _, name = os.environ[GROUP].partition("/")
    join_cluster(namespace)
    return ray_module().util.get_placement_group(name)


def check_room(cpus: int, gpus: int) -> None:
    """Raise ConfigError if the cluster has less than that in all, so that what is asked for could never start."""
    there = ray_module().cluster_resources()
    for name, wanted in (("CPU", cpus), ("GPU", gpus)):
        if there.get(name, 0) < wanted:
            raise ConfigError(
                f"the engines need {wanted} {name}s, and the Ray cluster has {there.get(name, 0):g}: add nodes, "
                "or lower the number of engines, tensor_parallel_size, pipeline_parallel_size or threads"
            )
