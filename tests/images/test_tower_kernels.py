"""The encoder of images by kernels for CPUs and by PyTorch: the same rows, and quantized ones near them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvern.attention.bidirectional import TorchAttend
from kvern.attention.compiled import CompiledAttend
from kvern.images.views import Grid
from kvern.layers.linear_method import LinearMethod
from kvern.layers.step_context import Attend
from kvern.models.image_models import vision_of
from kvern.models.loader import LoadOptions, read_config
from kvern.models.vision import VisionTower, load_vision
from kvern.runner.pictures import attend_patches
from kvern.runner.plan import CPU_KERNELS
from kvern.spec import vision
from tests.support.cache_folder import load_kernels
from tests.support.vision_models import FAMILIES, make_vision_model

SIZES = [(3, 2), (1, 5), (6, 7)]
"""Images of one line of patches, in tokens: the last has more patches than a tile has keys."""


@pytest.fixture(autouse=True)
def library() -> None:
    load_kernels("cpu_linear", 1)


@pytest.fixture(scope="module", params=FAMILIES)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VisionTower]:
    folder = make_vision_model(request.param, tmp_path_factory.mktemp("vision") / request.param)
    return lambda dtype, **options: _loaded(folder, dtype, **options)


def _loaded(folder: Path, dtype: str, **options: Any) -> VisionTower:
    spec = vision_of(read_config(folder))
    assert spec is not None
    return load_vision(folder, spec, LoadOptions(dtype, **options))


def rows(tower: VisionTower, *, joined: bool = False) -> Tensor:
    """The rows of the pictures of all SIZES. `joined`: the first two see each other."""
    merge = tower.vision.merge
    grids = [Grid(rows * merge, columns * merge) for rows, columns in SIZES]
    cells = sum(grid.cells for grid in grids)
    pixels = torch.randn(cells, 3 * tower.vision.patch**2, generator=torch.Generator().manual_seed(1))

    def attend(runs: Sequence[int], sliced: bool) -> Attend:
        return attend_patches(tower, [sum(runs[:2]), *runs[2:]] if joined else runs)

    with torch.inference_mode():
        found: Tensor = tower(pixels, grids, attend)
        return found.float()


def methods(tower: nn.Module) -> list[LinearMethod]:
    """Those that multiply, without those that clip or join the results of others."""
    found = [item for item in tower.modules() if isinstance(item, LinearMethod)]
    return [item for item in found if item.name not in ("clipped", "parted")]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.sample(5)
def test_kernels_compute_what_pytorch_does(tower: Callable[..., VisionTower]) -> None:
    plain, compiled = tower("float32"), tower("float32", kernels=CPU_KERNELS)
    assert all(item.compiled for item in methods(compiled))
    assert not any(item.compiled for item in plain.layers.modules() if isinstance(item, LinearMethod))
    assert isinstance(attend_patches(compiled, [24]), CompiledAttend) and isinstance(
        attend_patches(plain, [24]), TorchAttend
    )
    expected = rows(plain)
    assert distance(rows(compiled), expected) < 1e-5
    assert distance(rows(compiled, joined=True), expected) > 1e-3, "patches that see another picture's"


@pytest.mark.sample(3)
def test_bfloat16_is_as_near_as_in_pytorch(tower: Callable[..., VisionTower]) -> None:
    exact = rows(tower("float32"))
    plain, compiled = (distance(rows(tower("bfloat16", **given)), exact) for given in ({}, {"kernels": CPU_KERNELS}))
    assert 0 < compiled < 1.5 * plain + 1e-3


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernels", [frozenset(), CPU_KERNELS], ids=["PyTorch", "kernels"])
def test_int8_quantizes_the_encoder_too(tower: Callable[..., VisionTower], kernels: frozenset[str]) -> None:
    quantized = tower("float32", kernels=kernels, quantization="int8")
    assert {item.name for item in methods(quantized.layers)} == {"int8 by row, W8A8"}
    assert 0 < distance(rows(quantized), rows(tower("float32"))) < 0.25  # random weights are far from even


@pytest.mark.sample(9)
@pytest.mark.parametrize("kernels", [frozenset(), CPU_KERNELS], ids=["PyTorch", "kernels"])
def test_slices_of_a_large_picture_are_the_whole(
    kernels: frozenset[str], tower: Callable[..., VisionTower], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tower("float32", kernels=kernels)
    grid = Grid(5 * made.vision.merge, 7 * made.vision.merge)
    pixels = torch.randn(grid.cells, 3 * made.vision.patch**2)

    def parts() -> list[Tensor | None]:
        with torch.inference_mode():
            return list(made.by_parts(pixels, [grid], partial(attend_patches, made)))

    *layers, expected = parts()
    assert len(layers) + 1 == made.vision.parts([grid.cells]) == len(made.layers)
    monkeypatch.setattr(vision, "SLICE_PAIRS", grid.cells**2 // 3)
    *sliced, found = parts()
    assert len(sliced) + 1 == made.vision.parts([grid.cells]) > len(layers) + 1
    assert expected is not None and found is not None and not any(part is not None for part in sliced)
    assert distance(found, expected) < 1e-5
