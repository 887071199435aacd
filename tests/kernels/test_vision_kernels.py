"""The encoder of images with kernels of a GPU, by Triton's interpreter: PyTorch's rows, and launches known at start."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from kvern.images.views import Grid
from kvern.models.image_models import vision_of
from kvern.models.loader import LoadOptions, read_config
from kvern.models.vision import VisionTower, load_vision
from kvern.runner.image_rows import attend_patches
from kvern.runner.loaded_model import VISION_KERNELS
from kvern.runner.recorded_kernels import _encode_patches
from tests.kernels.recorded import recorded
from tests.support.vision_models import make_vision_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded by Triton's interpreter")

KINDS = [
    pytest.param("mistral3", marks=pytest.mark.nightly),
    pytest.param("qwen3_vl", marks=pytest.mark.nightly),
    "qwen2_5_vl",
    pytest.param("llava", marks=pytest.mark.nightly),
]
"""Rotation by rows and columns in turn and one after the other, windows, and no rotation but a leading state."""


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp("vision") / request.param)


def load(folder: Path, kernels: frozenset[str]) -> VisionTower:
    spec = vision_of(read_config(folder))
    assert spec is not None
    return load_vision(folder, spec, LoadOptions("float32", torch.device("cpu"), kernels=kernels))


def rows_of(tower: VisionTower, grids: Sequence[Grid]) -> torch.Tensor:
    count = sum(grid.cells for grid in grids)
    pixels = torch.randn(count, 3 * tower.vision.patch**2, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        rows: torch.Tensor = tower(pixels, grids, partial(attend_patches, tower))
    return rows


def test_rows_are_those_of_pytorch(folder: Path) -> None:
    grids = [Grid(8, 4), Grid(4, 4), Grid(4, 12)]
    expected = rows_of(load(folder, frozenset()), grids)
    assert expected.abs().max() > 0.1
    found = rows_of(load(folder, VISION_KERNELS), grids)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_what_is_launched_is_compiled_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = load(folder, VISION_KERNELS)
    with recorded(monkeypatch) as launched:
        rows_of(tower, [Grid(20, 12), Grid(4, 4)])
        rows_of(tower, [Grid(2, 2)])
    with recorded(monkeypatch) as known, torch.inference_mode():
        _encode_patches(torch.float32, tower.vision)
    assert launched and launched.keys() <= known.keys()
