"""Every kernel, in every specialisation that is launched, compiles for an H200 without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.models import LARGE_MODELS

FOLDER = Path(__file__).parent
MODULES = sorted(f"tests.kernels.{path.stem}" for path in FOLDER.glob("test_*.py") if "\nLAUNCHES" in path.read_text())


@pytest.mark.parametrize("name", [*LARGE_MODELS, *MODULES])
def test_launches_compile_for_sm90(name: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.kernels.compile_sm90", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled" in done.stdout
