"""The host: how many threads a process computes with, and how much memory it may still use.

There is one thread per physical core of one NUMA node, at most as many as the process may use. Threads are not bound to
cores. The system could not move a bound thread away from a busy core: beside busy processes a second bound thread
gained nothing.
"""

import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_threads(root: Path = ROOT) -> int:
    """The number of threads by OMP_NUM_THREADS, as in other libraries; else by the rule above.

    `root`: the folder that contains /sys and /proc.
    """
    if asked := _asked_threads():
        return asked
    nodes = Counter(node for node, _ in {_place(root, processor) for processor in _usable()})
    return max(1, min(nodes.most_common(1)[0][1], int(_quota(root))))


def shares_of_cores(count: int, root: Path = ROOT) -> list[tuple[int | None, frozenset[int]]]:
    """Threads and processors for each of `count` processes that compute at the same time.

    There are fewer shares if there are fewer cores. NUMA nodes are assigned in turn, and a process is kept to its node,
    where its memory then is; on a machine with one node it is not bound at all. Threads are None where OMP_NUM_THREADS
    gives the number.
    """
    nodes: dict[str, dict[str, set[int]]] = {}
    for processor in sorted(_usable()):
        node, core = _place(root, processor)
        nodes.setdefault(node, {}).setdefault(core, set()).add(processor)
    count = min(count, sum(map(len, nodes.values())))
    dealt = [list(nodes)[number % len(nodes)] for number in range(count)]
    shares: list[tuple[int | None, frozenset[int]]] = []
    for node in dealt:
        threads = max(1, min(len(nodes[node]) // dealt.count(node), int(_quota(root) / count)))
        processors = frozenset[int]().union(*nodes[node].values()) if len(nodes) > 1 else frozenset[int]()
        shares.append((None if _asked_threads() else threads, processors))
    return shares


def limit_spinning() -> None:
    """Limits the busy-waiting of PyTorch's threads to about 50 us, like kvern's own, unless the user has set it.

    It must be called before PyTorch is imported. PyTorch's threads spin for milliseconds otherwise: beside busy
    processes a step of two threads took ten times the processor time, and alone it is not faster.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _asked_threads() -> int:
    """The number in OMP_NUM_THREADS; 0 if there is none."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() else 0


def _usable() -> set[int]:
    """The processors that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _place(root: Path, processor: int) -> tuple[str, str]:
    """The NUMA node and the core of a processor; hyper-threads of one core have the same result."""
    folder = root / f"sys/devices/system/cpu/cpu{processor}"
    node = next((found.name for found in folder.glob("node[0-9]*")), "")
    return node, _read(folder / "topology/thread_siblings_list") or str(processor)


def _quota(root: Path) -> float:
    """Processors' worth of time that the control groups of this process may use, as containers are given it."""
    limits = [float(os.cpu_count() or 1)]
    for folder in _groups(root, "cpu"):
        both = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        limit, _, period = (_read(folder / "cpu.max") or both).partition(" ")
        if limit.isdecimal() and period.isdecimal():
            limits.append(int(limit) / int(period))
    return min(limits)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of the control groups of this process, each of which may have a limit of the controller."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("" if number == "0" else controllers)
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mounted):
                break
            yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def total_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process may use in all: the host's, or those of a container."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([pages, *(limit for limit, _ in _memory_limits(root))])


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields limits of memory in bytes, and what is taken of each: of control groups, and of the address space."""
    for folder in _groups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        taken = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and taken.isdecimal():
            found = re.findall(r"^(?:total_)?((?:in)?active_file) (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(limit), int(taken) - sum(map(int, dict(found).values()))  # files are given up for others
    limit_of_process, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_of_process != resource.RLIM_INFINITY:
        mapped = _read(root / "proc/self/statm").partition(" ")[0] or "0"
        yield limit_of_process, int(mapped) * os.sysconf("SC_PAGE_SIZE")


def processes_here(count: int) -> int:
    """The largest number of `count` kvern processes that run on this machine: all, unless Ray uses other nodes."""
    from kvern.io.sockets import MOST_PROCESSES  # kernels are compiled where ZeroMQ may be missing

    return min(count, int(os.environ.get(MOST_PROCESSES, count)))


def available_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process may still take without swapping; half of all memory if unknown."""
    free = re.search(r"^MemAvailable: *(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    left = int(free[1]) * 1024 if free else total_memory(root) // 2
    return max(0, min([left, *(limit - taken for limit, taken in _memory_limits(root))]))
