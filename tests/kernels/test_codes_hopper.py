"""Products of many rows of codes on Hopper beside float64. Gluon has no interpreter: they run on such a GPU alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.formats.gpu.candidates import CODES_TILES
from kvern.kernels.codes_hopper import product_codes, tiles_codes
from kvern.kernels.linear import TileShape
from kvern.kernels.packed import Packed
from kvern.kernels.quantize_rows import quantize_rows
from tests.support.kernels.code_products import (
    BLOCKS,
    DTYPES,
    GROUPS,
    WHOLE,
    Scales,
    assert_overlap_changes_nothing,
    poison,
    product_of_codes,
)
from tests.support.kernels.hopper import on_hopper
from tests.support.kernels.references import relative_error

SHAPES = sorted({TileShape(shape.splits, 2) for shapes in CODES_TILES.values() for shape in shapes})
FORMS = [
    *(("e4m3", form) for form in (WHOLE, BLOCKS, GROUPS, Scales(256, 128, 256))),
    *(("int8", form) for form in (WHOLE, GROUPS, Scales(0, 256, 128))),
]


def _agrees(code: str, rows: int, outputs: int, inputs: int, form: Scales, arrived: torch.Tensor) -> None:
    """By all shapes; the last row alone is the same. Scales make results that float16 holds."""
    made = product_of_codes(code, rows, outputs, inputs, form)
    assert tiles_codes(made.weight, outputs, inputs, torch.float16)
    scale, bias, expected = made.scale * 2**-10, (made.bias * 2**-10).half(), made.expected * 2**-10
    for shape in SHAPES:
        poison()
        found = product_codes(made.x, scale, made.weight, bias, shape, arrived, torch.float16)
        limit = 1e-3 if code == "int8" else 2e-3
        assert relative_error(found, expected + bias.double()) < limit, (shape, rows)
        alone = product_codes(made.x[-1:], scale[-1:], made.weight, bias, shape, arrived, torch.float16)
        assert torch.equal(alone[0], found[-1]), (shape, rows)
    assert not arrived.any()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("code", "form"), FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (1000, 1536), (4104, 4352)])
def test_products_of_codes(code: str, form: Scales, outputs: int, inputs: int) -> None:
    """Where halves of tiles are empty, programs share few inputs, and the last tile is not whole."""
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    for rows in (1, 64, 150, 256, 700):
        _agrees(code, rows, outputs, inputs, form, arrived)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("code", "form"), [("e4m3", WHOLE), ("e4m3", Scales(0, 128, 128)), ("int8", WHOLE)])
@pytest.mark.parametrize("inputs", [208, 4112])
def test_the_last_step_may_be_short(code: str, inputs: int, form: Scales) -> None:
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    _agrees(code, 200, 136, inputs, form, arrived)


@pytest.mark.gpu
@on_hopper
def test_sums_are_in_float32() -> None:
    """Many numbers of one sign: sums of the matrix units alone would lose those that come late."""
    inputs, outputs = 1 << 14, 256
    x = torch.full((128, inputs), 1.125, device="cuda").to(torch.float8_e4m3fn)
    ones = torch.ones(128, 1, device="cuda") / inputs
    weight = Packed("e4m3", x.repeat(2, 1), torch.ones(outputs, 1, device="cuda"), None, inputs)
    for shape in SHAPES:
        arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
        found = product_codes(x, ones, weight, None, shape, arrived, torch.float16)
        assert relative_error(found, torch.full((128, outputs), 1.125**2, dtype=torch.float64, device="cuda")) < 2e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("code", DTYPES)
def test_launches_of_a_graph_overlap(code: str) -> None:
    """Each waits for the codes and the sums of those before, though it fetches weights earlier."""
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    made = [product_of_codes(code, 256, 4096, 4096, WHOLE) for _ in SHAPES]
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)

    def layers() -> torch.Tensor:
        hidden = x
        for one, shape in zip(made, SHAPES, strict=True):
            codes, scale = quantize_rows(hidden, code)
            hidden = product_codes(codes, scale, one.weight, None, shape, arrived, x.dtype)
            hidden /= 2**14
        return hidden

    assert_overlap_changes_nothing(layers, x)
    assert not arrived.any()


@pytest.mark.gpu
@on_hopper
def test_too_many_tiles_for_the_counters() -> None:
    made = product_of_codes("e4m3", 200, 1000, 256, WHOLE)
    arrived = torch.zeros(31, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="too many"):
        product_codes(made.x, made.scale, made.weight, None, TileShape(4, 2), arrived, torch.bfloat16)


@pytest.mark.parametrize(
    ("code", "group", "per", "inputs", "known"),
    [
        ("e4m3", 512, 1, 512, True),
        ("int8", 208, 1, 208, True),
        ("e4m3", 128, 128, 512, True),
        ("e4m3", 128, 64, 512, False),
        ("int8", 64, 128, 512, False),
        ("int4", 128, 1, 512, False),
        ("e4m3", 520, 1, 520, False),
    ],
)
def test_which_matrices_are_known(code: str, group: int, per: int, inputs: int, known: bool) -> None:
    weight = Packed(code, torch.empty(0), torch.empty(0), None, group, per)
    assert tiles_codes(weight, 64, inputs, torch.bfloat16) == known
    assert not tiles_codes(weight, 64, inputs, torch.float32)
    assert not tiles_codes(weight._replace(zero=torch.empty(0)), 64, inputs, torch.bfloat16)


def _launch(code: str, form: Scales, shape: TileShape) -> torch.Tensor:
    inputs, outputs = 4096, 1024
    x, codes = (torch.empty(size, inputs, dtype=DTYPES[code]) for size in (256, outputs))
    x_scale = torch.empty(256, inputs // form.x if form.x else 1)
    scale = torch.empty(outputs // form.outputs, inputs // form.inputs if form.inputs else 1)
    weight = Packed(code, codes, scale, None, form.inputs or inputs, form.outputs)
    return product_codes(x, x_scale, weight, None, shape, torch.zeros(64, dtype=torch.int32), torch.bfloat16)


LAUNCHES: list[Callable[[], object]] = [
    *(partial(_launch, code, form, shape) for code in DTYPES for form in (WHOLE, GROUPS) for shape in SHAPES[-2:]),
    *(partial(_launch, code, BLOCKS, SHAPES[0]) for code in DTYPES),
]
