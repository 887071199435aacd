"""Writers of host memory and disks that are killed at a line of the store's code: what the next process finds is whole.

The points are drawn among all lines that a writer executes, so that they need no luck, and no busy machine moves them.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("host", 40),
        ("disk", 12),
        pytest.param("host", 400, marks=pytest.mark.nightly),
        pytest.param("disk", 50, marks=pytest.mark.nightly),
    ],
)
def test_what_a_killed_writer_leaves_is_whole(kind: str, count: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_writers", kind, str(tmp_path), str(count), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [int(line) for line in done.stdout.split()]
    assert len(found) == count and min(found) > 0
    assert len({*found}) > 2, "all were killed at one place"
