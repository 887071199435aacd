"""The CPU kernels for processors that this machine is not: a cross compiler builds them, and an emulator runs them."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvern.cpu import library
from kvern.cpu.check import GROUPS, check_activations, check_elementwise, check_norms
from kvern.cpu.kernel_library import FLAGS, SOURCES
from kvern.cpu.processor import ARM
from kvern.cpu.rows import scale
from tests.support.emulated_arm import EmulatedLibrary, build

CROSS = "aarch64-linux-gnu-g++"
TILES = Path(__file__).with_name("tiles.cpp")
BY_DAY = ("attention.cpp", "linear.cpp", "packed_int8.cpp", "threads.cpp", TILES.name)
"""The longest, the threads that all use, and the portable form of matrix tiles."""


@pytest.mark.sample(1)
@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"there is no {CROSS}: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=source.name, marks=[] if source.name in BY_DAY else [pytest.mark.nightly])
        for source in (*sorted(SOURCES.glob("*.cpp")), TILES)
    ],
)
def test_kernels_compile_for_arm(source: Path) -> None:
    [neon] = ARM
    command = [CROSS, *FLAGS, *neon.flags, "-Wall", "-Werror", "-fsyntax-only", f"-I{SOURCES}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EMULATOR = next((found for name in ("qemu-aarch64-static", "qemu-aarch64") if (found := shutil.which(name))), None)
ROWS = ("rows.cpp", "threads.cpp")


@pytest.fixture(scope="module", params=[ROWS, pytest.param((), marks=pytest.mark.nightly)], ids=["rows", "all"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedLibrary]:
    """Some sources quickly, or all as they are built for users."""
    if shutil.which(CROSS) is None or EMULATOR is None:
        pytest.skip(f"there is no {CROSS} and qemu-aarch64: apt-get install g++-aarch64-linux-gnu qemu-user-static")
    sources = request.param or sorted(path.name for path in SOURCES.glob("*.cpp"))
    program = build(tmp_path_factory.mktemp("arm") / "kernels", sources, *(["-O1"] if request.param else []))
    with EmulatedLibrary(EMULATOR, program) as found:
        found.sources = sources
        yield found


@pytest.fixture
def in_emulator(emulated: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch) -> EmulatedLibrary:
    """Calls of kernels are made in the emulator."""
    monkeypatch.setattr(library, "_loaded", emulated)
    monkeypatch.setattr(library, "_symbols", {})
    emulated.kvern_set_threads(2)
    return emulated


@pytest.mark.parametrize("group", [name for name in GROUPS if name != "cpu_ranks"])
def test_kernels_for_arm_pass_their_checks_in_an_emulator(group: str, in_emulator: EmulatedLibrary) -> None:
    """What a start compares on a processor; ranks are processes, which share memory with no emulator."""
    checks = GROUPS[group]
    if len(in_emulator.sources) == len(ROWS):
        checks = tuple(check for check in checks if check in (check_elementwise, check_norms, check_activations))
        if not checks:
            pytest.skip("at night: its sources take long to compile")
    before = len(in_emulator.calls)
    for check in checks:
        check(torch.Generator().manual_seed(0))
    assert len(in_emulator.calls) > before


def test_a_kernel_for_arm_that_errs_is_found(in_emulator: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.cpu.check.scale", lambda x, factor: scale(x, factor + 0.01))
    with pytest.raises(AssertionError, match="off by"):
        check_elementwise(torch.Generator().manual_seed(0))
