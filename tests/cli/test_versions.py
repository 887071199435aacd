"""The oldest and the newest PyTorch and Triton that pyproject.toml allows, as a package index gives them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOUND = next(
    name
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if name.startswith("torch>")
)
OLDEST = re.sub(r"torch>=([\d.]+).*", r"torch==\1.*", BOUND)
BYTES = 12e9
"""Of disk, for a PyTorch with the libraries of a GPU."""
UNREACHABLE = (
    "from versions: none",
    "Could not fetch URL",
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
)
ON_CPUS = ("tests/sample/test_sampler.py", "tests/engine/test_engine.py", "tests/cpu/test_cpu_processors.py")

pytestmark = pytest.mark.timeout(3600)


def run(*command: str | Path, **variables: str) -> str:
    """What it prints. Fails with what it said."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    given = environment | variables
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    if "pip" in command and done.returncode and any(mark in done.stderr for mark in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def pip(python: str | Path, *arguments: str | Path) -> str:
    return run(python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments)


def test_the_versions_that_make_installs_are_within_the_bounds() -> None:
    [made] = re.findall(r"^TORCH := (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made in (ROOT / "constraints.txt").read_text().splitlines()
    version, least, most = (tuple(map(int, found.split("."))) for found in re.findall(r"[\d.]+", made + BOUND))
    assert least <= version < most


@pytest.mark.nightly
def test_kernels_compile_with_the_triton_of_the_newest_torch(tmp_path: Path) -> None:
    report = json.loads(pip(sys.executable, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", BOUND))
    needed = report["install"][0]["metadata"].get("requires_dist", [])
    triton = next((name.partition(";")[0].strip() for name in needed if name.startswith("triton")), None)
    if triton is None:
        pytest.skip(f"the index's newest {BOUND} is built without Triton")
    pip(sys.executable, "--no-deps", "--target", tmp_path, triton)
    path = os.pathsep.join(map(str, (tmp_path, *sys.path)))
    version = run(sys.executable, "-c", "import triton; print(triton.__version__)", PYTHONPATH=path).strip()
    assert re.findall(r"\d+\.\d+", triton)[0] in version
    compiled = run(sys.executable, "-m", "tests.kernels.compile_for", "90", "llama", PYTHONPATH=path)
    assert "for sm_90, 0 errors" in compiled


@pytest.mark.nightly
@pytest.mark.parametrize("torch", [OLDEST, BOUND], ids=["oldest", "newest"])
def test_a_plain_install_works_with_the_oldest_and_the_newest_torch(torch: str, tmp_path: Path) -> None:
    """The smoke test, and few tests of what depends on PyTorch most."""
    if shutil.disk_usage(tmp_path).free < BYTES:
        pytest.skip(f"{tmp_path} has less than {BYTES / 1e9:.0f} GB")
    others = tmp_path / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    others.write_text("\n".join(line for line in lines if not line.startswith(("torch==", "triton=="))))
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    try:
        pip(python, "-c", others, torch, "-e", ".")
        version = run(python, "-c", "import torch; print(torch.__version__)")
        if torch == OLDEST:
            assert version.startswith(OLDEST.partition("==")[2].rstrip("*"))
        run(python, "tests/support/smoke.py")
        pip(python, "-c", others, "hypothesis", "pytest", "pytest-timeout")
        run(python, "-m", "pytest", "-q", *ON_CPUS, OMP_NUM_THREADS="1")
    finally:
        shutil.rmtree(tmp_path / "venv")
