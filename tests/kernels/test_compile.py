"""Every kernel, in every specialisation that is launched, compiles for an H200 without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("test_*.py") if "\nLAUNCHES" in path.read_text())


@pytest.mark.parametrize("module", MODULES)
def test_launches_compile_for_sm90(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.kernels.compile_sm90", f"tests.kernels.{module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled" in done.stdout
