"""Compiled modules are kept in the cache folder where they cannot be kept beside their sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "from kvern.io.bytecode import keep_bytecode; keep_bytecode(); import torch, sys; print(sys.pycache_prefix)"


def started(tmp_path: Path, **environment: str) -> tuple[str, list[str]]:
    """The prefix that a process with a torch of its own takes, and which modules it keeps in the cache folder."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    path = os.pathsep.join([str(package.parent), *sys.path])
    given = {"PYTHONPATH": path, "KVERN_CACHE_DIR": str(tmp_path / "cache"), "PATH": os.environ["PATH"]} | environment
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == "", "a process is left without a word"
    kept = (tmp_path / "cache").rglob("torch/*.pyc")
    return done.stdout.strip(), [file.name for file in kept]


def test_where_python_may_not_write_it_is_kept_in_the_cache_folder(tmp_path: Path) -> None:
    prefix, kept = started(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert prefix == str(tmp_path / "cache" / "bytecode")
    assert [name.split(".")[0] for name in kept] == ["__init__"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/nowhere"},
        {"PYTHONDONTWRITEBYTECODE": "1", "KVERN_CACHE_DIR": "/dev/null"},
    ],
    ids=str,
)
def test_where_python_keeps_it_or_was_told_where_or_nobody_can_nothing_changes(
    environment: dict[str, str], tmp_path: Path
) -> None:
    prefix, kept = started(tmp_path, **environment)
    assert prefix == environment.get("PYTHONPYCACHEPREFIX", "None")
    assert kept == []
