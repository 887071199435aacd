"""A disk whose reads and writes fail: the store is off with one warning, no answer changes, and it comes back."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broken_disk import make_shim

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs a compiler, and Linux")
def test_a_disk_with_errors_is_turned_off_with_one_warning(tiny_model: Path, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    variables = os.environ | {"LD_PRELOAD": str(make_shim(tmp_path)), "BROKEN_DISK": str(flag)}
    command = [sys.executable, "-m", "tests.support.broken_disk", str(tiny_model), str(tmp_path / "pages"), str(flag)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] and found["idle"]
    assert found["failures"] >= 3 and found["is_on"]
    [warning] = found["warnings"]
    assert "is off" in warning and "Input/output error" in warning
