"""The sources of the CPU kernels for processors that this machine is not: a cross compiler reads them, nothing runs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvern.cpu.kernel_library import FLAGS, SOURCES
from kvern.cpu.processor import ARM

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
