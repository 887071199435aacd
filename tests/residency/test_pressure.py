"""How much memory of the machine is left for models, and how often that is read."""

import logging
import os
import resource
from pathlib import Path

import pytest

from kvern.residency.pressure import HostMemory, Watch, host_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "stalled", "floor"),
    [(2 * GIB, 0.0, 256 << 20), (2 * GIB, 9.9, 256 << 20), (2 * GIB, 10.0, 512 << 20), (100 * GIB, 0.0, 2 * GIB)],
)
def test_two_per_cent_and_a_quarter_of_a_gigabyte_stay_free_and_twice_that_where_programs_wait(
    total: int, stalled: float, floor: int
) -> None:
    memory = HostMemory(floor - 5, total, stalled)
    assert (memory.floor, memory.spare) == (floor, -5)


def test_free_memory_is_read_from_the_files_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine and of control groups in both versions; pressure may be absent."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def write(name: str, text: object) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")

    assert host_memory(tmp_path) is None
    write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable:   {3 * GIB // 1024} kB")
    assert host_memory(tmp_path) == HostMemory(3 * GIB, 64 * GIB)
    write("proc/pressure/memory", "some avg10=12.34 avg60=0.00 avg300=0.00 total=9\nfull avg10=5.00")
    assert host_memory(tmp_path) == HostMemory(3 * GIB, 64 * GIB, 12.34)
    write("proc/self/cgroup", "0::/a")
    write("sys/fs/cgroup/a/memory.max", 4 * GIB)
    write("sys/fs/cgroup/a/memory.current", 3 * GIB)
    assert host_memory(tmp_path) == HostMemory(GIB, 4 * GIB, 12.34)
    write("sys/fs/cgroup/a/memory.stat", f"inactive_file {GIB}")
    assert host_memory(tmp_path) == HostMemory(2 * GIB, 4 * GIB, 12.34)
    write("proc/self/cgroup", "4:memory:/b")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GIB)
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB + 5)
    assert host_memory(tmp_path) == HostMemory(GIB - 5, 2 * GIB, 12.34)


def test_a_watch_reads_once_a_second_or_after_a_move_and_warns_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    reads: list[int] = []

    def read() -> HostMemory:
        reads.append(len(reads))
        return HostMemory(len(reads) * 10_000_000, 2_000_000_000)

    watch = Watch(read)
    for now in (0.0, 0.5, 0.99):
        assert watch.look(now) == HostMemory(10_000_000, 2_000_000_000)
    assert watch.next_at == 1.0
    assert watch.look(1.0) == HostMemory(20_000_000, 2_000_000_000)
    watch.renew()
    assert watch.look(1.1) == HostMemory(30_000_000, 2_000_000_000) and len(reads) == 3
    with caplog.at_level(logging.WARNING, "kvern"):
        for now in (1.0, 30.0, 60.9, 61.0):
            watch.warn(now, "a becomes asleep")
    said = "little memory is left: 0.03 GB of 2.00 GB are free, and 0.27 GB shall stay so: a becomes asleep"
    assert [record.getMessage() for record in caplog.records] == [said] * 2
