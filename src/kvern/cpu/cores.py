"""How many threads compute: one a physical core of one memory node, no more than the process may use.

None is bound to a core, from which the system could not move it where another process is busy: beside busy processes a
second thread that was bound computed no faster.
"""

import os
from collections import Counter
from pathlib import Path

ROOT = Path("/")


def cpu_threads(root: Path = ROOT) -> int:
    """As many as OMP_NUM_THREADS says, as for any library that computes; else what stands above.

    `root`: the folder in which /sys and /proc lie.
    """
    if asked := _asked_threads():
        return asked
    nodes = Counter(node for node, _ in {_place(root, processor) for processor in _usable()})
    return max(1, min(nodes.most_common(1)[0][1], int(_quota(root))))


def shares_of_cores(count: int, root: Path = ROOT) -> list[tuple[int | None, frozenset[int]]]:
    """The threads of each of so many processes that compute at the same time, and the processors it should be kept to.

    There are fewer shares if there are fewer cores. Memory nodes are dealt out in turns, and a process is kept to its
    node, where its memory then is; on a machine of one node to nothing, for the reason above. Threads are None where
    OMP_NUM_THREADS says how many.
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
    """Let PyTorch's threads wait for each other for some 50 us, as kvern's do, where the user has not said how long.

    To be called before PyTorch is imported. They spin for milliseconds otherwise: beside busy processes, which have the
    core of one of them meanwhile, a step of two threads took ten times the processor's time that one of them takes, and
    alone it is as fast.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _asked_threads() -> int:
    """By OMP_NUM_THREADS; 0: it says nothing."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() else 0


def _usable() -> set[int]:
    """The processors that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _place(root: Path, processor: int) -> tuple[str, str]:
    """The memory node and the core that a processor belongs to; of those that share a core, one is counted."""
    folder = root / f"sys/devices/system/cpu/cpu{processor}"
    node = next((found.name for found in folder.glob("node[0-9]*")), "")
    return node, _read(folder / "topology/thread_siblings_list") or str(processor)


def _quota(root: Path) -> float:
    """Processors' worth of time that the control groups of this process may use, as containers are given it."""
    limits = [float(os.cpu_count() or 1)]
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("" if number == "0" else controllers)
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):  # each of its groups has a limit
            if not folder.is_relative_to(mounted):
                break
            both = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
            limit, _, period = (_read(folder / "cpu.max") or both).partition(" ")
            if limit.isdecimal() and period.isdecimal():
                limits.append(int(limit) / int(period))
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
