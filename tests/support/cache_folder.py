"""A cache folder of a test's own that has the kernels for this CPU: else its engines would build them."""

from pathlib import Path

import pytest
import torch

from kvern import EngineConfig
from kvern.cpu.kernel_library import BuildError, find_maker
from kvern.cpu.ready import working_groups
from kvern.layers import unquantized


def cache_folder(path: Path) -> str:
    """The folder, made if it is not there."""
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "cpu").exists():
        (path / "cpu").symlink_to(EngineConfig().cache_folder / "cpu")
    return str(path)


def load_kernels(group: str, threads: int) -> None:
    """Load the kernels for this CPU, of which this group must work; skip the test where there is no compiler."""
    try:
        find_maker()
    except BuildError as error:
        pytest.skip(str(error))
    assert group in working_groups(EngineConfig().cache_folder, threads)


def pretend_tiles(monkeypatch: pytest.MonkeyPatch, *, there: bool, own: bool = False) -> None:
    """Let the processor have matrix tiles (AMX) or none: kernels multiply plain bfloat16 by them, or oneDNN."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: there)
    monkeypatch.setattr(unquantized, "has_tiles", lambda: own)
