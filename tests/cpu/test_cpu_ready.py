"""Which kernels of a CPU work: found out once, in the background, whatever the machine lacks."""

import logging
import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvern import EngineConfig
from kvern.cli.chat import kernels_to_come
from kvern.cpu import build as compiling
from kvern.cpu import library, ready
from kvern.cpu.build import build
from kvern.cpu.check import GROUPS
from kvern.cpu.cores import available_memory, cpu_threads, shares_of_cores, total_memory
from kvern.cpu.kernel_library import find_compiler, library_path, read_record
from kvern.cpu.ready import begin_build, working_groups
from kvern.runner.plan import CPU_KERNELS, RANK_KERNELS

COMPILER = find_compiler()
REAL = library_path(EngineConfig().cache_folder, COMPILER)
"""What stands here is compiled once, before all tests."""

SCRIPT = """#!/bin/sh
case "$*" in
*--version*) echo "{version}" ;;
*-shared*) echo linked >> {log}; for last; do :; done; {link} ;;
esac
"""

ASK = """
import sys
from pathlib import Path
from kvern.cpu import build
build._check = lambda path: dict.fromkeys(sys.argv[2:], "")
build.build(Path(sys.argv[1]))
"""

ANSWER = """
import sys
from kvern import LLM, SamplingParams
from kvern.cpu import library
with LLM("kvern-1m", cache_dir=sys.argv[1], threads=1, max_model_len=64) as llm:
    print(len(llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, ignore_eos=True))))
print(library._loaded is not None)
"""


@dataclass
class Machine:
    """A cache folder, and a compiler that makes of any sources the library at `made`, or fails."""

    folder: Path
    made: Path = REAL

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def builds(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def path(self) -> Path:
        return library_path(self.folder, find_compiler())

    def compile_by(self, version: str = "1", fails: bool = False) -> None:
        link = "echo an error of sources >&2; exit 1" if fails else f'cp {self.made} "$last"'
        compiler = self.folder / "compiler"
        compiler.write_text(SCRIPT.format(version=version, log=self.log, link=link))
        compiler.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Where nothing was compiled; the library is not loaded into the process of the tests, which has another."""
    found = Machine(tmp_path)
    found.compile_by()
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setattr(library, "load", lambda path, threads: None)
    return found


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups work, and no process looks."""
    monkeypatch.setattr(compiling, "_check", lambda path: dict.fromkeys(GROUPS, ""))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders in which builds were begun in the background, and were not."""
    folders: list[Path] = []
    monkeypatch.setattr(ready, "_begin", folders.append)
    return folders


def groups(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[frozenset[str], list[str]]:
    """The groups that work, and the warnings of asking."""
    caplog.clear()
    found = working_groups(folder, 1)
    return found, [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.nightly
def test_processes_that_ask_at_the_same_time_compile_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", ASK, str(machine.folder), *GROUPS]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert machine.builds == 1
    assert groups(machine.folder, caplog) == (frozenset(GROUPS), [])
    left = {file.suffix for file in machine.path.parent.iterdir()}
    assert left == {".so", ".json", ".lock"}


@pytest.mark.nightly
def test_a_first_start_answers_at_once_and_the_next_has_kernels(machine: Machine) -> None:
    command = [sys.executable, "-c", ANSWER, str(machine.folder)]
    for loaded in ("False", "True"):
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.split() == ["1", loaded]
        build(machine.folder)  # waits for the one in the background
    assert machine.builds == 1


def test_who_waits_for_kernels_gets_the_process_that_compiles_them(machine: Machine, unchecked: None) -> None:
    machine.compile_by(fails=True)
    process = begin_build(machine.folder)
    assert process is not None and process.wait() == 0
    record = read_record(machine.path)
    assert machine.builds == 1 and record is not None and "an error of sources" in record.error
    assert begin_build(machine.folder) is None


def test_a_chat_waits_for_missing_kernels_and_not_for_a_gpu(
    machine: Machine, begun: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(cache_dir=str(machine.folder), device="cpu")
    kernels_to_come(config)
    assert begun == [config.cache_folder]
    monkeypatch.setattr("kvern.runner.device.resolve_device", lambda config: torch.device("cuda"))
    assert kernels_to_come(config) is None and len(begun) == 1


def test_without_a_compiler_one_warning_says_what_is_lost(
    machine: Machine, begun: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert begin_build(machine.folder) is None
    found, warnings = groups(machine.folder, caplog)
    assert not found and not begun
    (warning,) = warnings
    assert "no C++ compiler" in warning and "slow" in warning


def test_what_cannot_be_compiled_is_tried_again_with_another_compiler_or_after_a_day(
    machine: Machine, begun: list[Path], unchecked: None, caplog: pytest.LogCaptureFixture
) -> None:
    machine.compile_by(fails=True)
    for _ in range(2):
        build(machine.folder)
        found, warnings = groups(machine.folder, caplog)
        assert not found
        assert len(warnings) == 1 and "an error of sources" in warnings[0]
    assert (machine.builds, begun) == (1, [])

    record = machine.path.with_suffix(".json")
    os.utime(record, (0, 0))
    assert not groups(machine.folder, caplog)[0]
    assert begun == [machine.folder]
    build(machine.folder)
    assert machine.builds == 2

    machine.compile_by(version="2")
    build(machine.folder)
    assert groups(machine.folder, caplog) == (frozenset(GROUPS), [])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("body", "reason"), [("__builtin_trap();", "status -4"), ("", "off by|no number|is wrong")])
def test_a_group_that_crashes_or_answers_wrongly_is_off_and_others_work(
    machine: Machine, body: str, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has everything of the real one but a norm, which does something else; two groups are looked at."""
    some = {name: GROUPS[name] for name in ("cpu_layers", "cpu_sampling")}
    monkeypatch.setattr("kvern.cpu.check.GROUPS", some)
    source, machine.made = machine.folder / "norm.cpp", machine.folder / "changed.so"
    source.write_text(f'extern "C" void kvern_norm() {{ {body} }}')
    made = ["-shared", "-fPIC", str(source), "-Wl,--no-as-needed", str(REAL), "-o", str(machine.made)]
    subprocess.run([COMPILER.command, *made], check=True)
    machine.compile_by()
    build(machine.folder)
    found, (warning,) = groups(machine.folder, caplog)
    assert found == {"cpu_sampling"}
    assert "cpu_layers" in warning
    assert re.search(reason, warning)


def test_a_folder_that_cannot_be_written_to_is_told_in_one_line(
    machine: Machine, begun: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    (machine.folder / "file").touch()
    found, warnings = groups(machine.folder / "file", caplog)
    assert not found and not begun
    assert len(warnings) == 1 and "cache_dir" in warnings[0] and "slow" in warnings[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_what_is_cut_short_is_made_again(
    suffix: str, machine: Machine, unchecked: None, begun: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    build(machine.folder)
    file = machine.path.with_suffix(suffix)
    whole = file.read_bytes()
    for size in (0, len(whole) // 2):
        file.write_bytes(whole[:size])
        begun.clear()
        found, (warning,) = groups(machine.folder, caplog)
        assert not found and begun == [machine.folder]
        assert "for the next start" in warning and warning.endswith(f"python -m kvern.cpu.ready {machine.folder}")
        build(machine.folder)
        assert file.read_bytes() == whole
        assert groups(machine.folder, caplog) == (frozenset(GROUPS), [])


@pytest.mark.nightly
def test_libraries_that_were_not_used_for_longest_are_forgotten(
    machine: Machine, unchecked: None, caplog: pytest.LogCaptureFixture
) -> None:
    paths = []
    for number in range(compiling.KEPT):
        machine.compile_by(version=f"number {number}")
        build(machine.folder)
        paths.append(machine.path)
        for file in machine.path.parent.glob(f"{machine.path.stem}.*"):
            os.utime(file, (number, number))
    machine.compile_by(version="number 0")
    assert groups(machine.folder, caplog)[0], "it is used"
    machine.compile_by(version="another")
    build(machine.folder)
    assert paths[0].exists() and machine.path.exists()
    assert not list(paths[1].parent.glob(f"{paths[1].stem}*"))
    assert len(list(paths[1].parent.glob("*.so"))) == compiling.KEPT


def test_a_build_that_was_killed_does_not_disturb_the_next(machine: Machine, unchecked: None) -> None:
    left = machine.path.with_suffix(".building")
    (left / "folder").mkdir(parents=True)
    build(machine.folder)
    assert machine.path.exists() and not left.exists()


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("5,2", 5), ("0", None), ("many", None), ("", None)])
def test_threads_are_those_that_the_environment_asks_for(
    asked: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of tests that run beside each other would wait for each other's threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = cpu_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert cpu_threads() == (threads or cores)


def system(root: Path, processors: int, siblings: int, nodes: int) -> None:
    """Files of a system whose processors come in cores of `siblings` each, spread over memory nodes."""
    cores = processors // siblings
    for processor in range(processors):
        core = processor % cores
        folder = root / f"sys/devices/system/cpu/cpu{processor}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(f"{','.join(map(str, range(core, processors, cores)))}\n")
        (folder / f"node{core * nodes // cores}").mkdir()


@pytest.mark.parametrize(
    ("processors", "siblings", "nodes", "usable", "threads"),
    [(8, 1, 1, range(8), 8), (16, 2, 1, range(16), 8), (16, 2, 2, range(16), 4), (16, 2, 1, (0, 8, 3), 2),
     (16, 2, 2, (0, 4, 5, 13), 2), (64, 2, 1, (5,), 1)],
)  # fmt: skip
def test_threads_are_the_physical_cores_of_one_memory_node(
    processors: int, siblings: int, nodes: int, usable: range, threads: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    system(tmp_path, processors, siblings, nodes)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(usable), raising=False)
    assert cpu_threads(tmp_path) == threads


@pytest.mark.parametrize(
    ("processors", "nodes", "count", "shares"),
    [
        (8, 1, 2, [(4, [])] * 2),
        (8, 1, 3, [(2, [])] * 3),
        (4, 1, 9, [(1, [])] * 4),
        (16, 2, 2, [(4, [0, 1, 2, 3, 8, 9, 10, 11]), (4, [4, 5, 6, 7, 12, 13, 14, 15])]),
        (4, 2, 3, [(1, [0, 2]), (1, [1, 3])]),
        (8, 2, 3, [(1, [0, 1, 4, 5]), (2, [2, 3, 6, 7]), (1, [0, 1, 4, 5])]),
    ],
)
def test_several_processes_share_the_cores_and_have_a_memory_node_each(
    processors: int,
    nodes: int,
    count: int,
    shares: list[tuple[int, list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system(tmp_path, processors, 1 if nodes == 1 else 2, nodes)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)), raising=False)
    found = shares_of_cores(count, tmp_path)
    assert [(threads, sorted(kept)) for threads, kept in found] == shares
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert {threads for threads, _ in shares_of_cores(count, tmp_path)} == {None}


@pytest.mark.parametrize(
    ("groups", "files", "threads"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/a/b", {"a/cpu.max": "350000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000"}, 1),
        ("3:cpu,cpuacct:/docker/1", {"cpu,cpuacct/cpu.cfs_quota_us": "400000",
                                     "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("2:cpuset:/", {"cpuset/cpu.max": "100000 100000"}, 64),
        ("", {}, 64),
    ],
)  # fmt: skip
def test_threads_are_no_more_than_the_control_group_has_time_for(
    groups: str, files: dict[str, str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    write_groups(tmp_path, groups, files)
    assert cpu_threads(tmp_path) == threads


def write_groups(root: Path, groups: str, files: dict[str, str]) -> None:
    """Writes the files of control groups, as the system shows them to a process in `groups`."""
    for name, text in files.items() | {("../../../proc/self/cgroup", groups)}:
        file = Path(os.path.normpath(root / "sys/fs/cgroup" / name))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


GIB = 1 << 30
V2 = {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB)}
V1 = {"memory/memory.limit_in_bytes": str(4 * GIB), "memory/memory.usage_in_bytes": str(3 * GIB)}


@pytest.mark.parametrize(
    ("groups", "files", "free", "total"),
    [
        ("0::/", V2, 1, 4),
        ("0::/", V2 | {"memory.stat": f"anon 5\ninactive_file {GIB}"}, 2, 4),
        ("0::/", V2 | {"memory.stat": f"active_file {GIB - 5}\ninactive_file 5\nshmem 9"}, 2, 4),
        ("0::/a", V2 | {"a/memory.max": "max", "a/memory.current": "5"}, 1, 4),
        ("0::/", V2 | {"memory.current": str(5 * GIB)}, 0, 4),
        ("5:memory:/docker/1", V1, 1, 4),
        ("5:memory:/docker/1", V1 | {"memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}"}, 2, 4),
        ("5:memory:/a", V1 | {"memory/memory.stat": f"active_file 1\ntotal_active_file {GIB}"}, 2, 4),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, 32, 64),
    ],
)
def test_memory_is_no_more_than_the_control_group_has(
    groups: str, files: dict[str, str], free: int, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    write_groups(tmp_path, groups, files)
    assert available_memory(tmp_path) == free * GIB
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {32 * GIB // 1024} kB\n")
    assert (available_memory(tmp_path), total_memory(tmp_path)) == (free * GIB, total * GIB)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GIB, resource.RLIM_INFINITY))
    (tmp_path / "proc/self/statm").write_text(f"{2 * GIB // 4096} 1 1 1 0 1 0\n")
    assert (available_memory(tmp_path), total_memory(tmp_path)) == (min(free, 1) * GIB, 3 * GIB)


def test_every_group_has_a_check() -> None:
    assert frozenset(GROUPS) == CPU_KERNELS | RANK_KERNELS
