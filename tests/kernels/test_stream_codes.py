"""Products of codes with codes on Hopper beside float64. Gluon has no interpreter: they run on such a GPU alone."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.formats.gpu.candidates import CODES_STREAMS
from kvern.formats.scaled import ROWS, Block, Rounding, Scaled, ScaledMethod
from kvern.kernels.linear import StreamShape
from kvern.kernels.packed import Packed
from kvern.kernels.quantize_rows import quantize_rows
from kvern.kernels.stream_hopper import stream_codes, streams_codes
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearMethods
from tests.support.kernels.code_products import (
    BLOCKS,
    DTYPES,
    GROUPS,
    WHOLE,
    Product,
    Scales,
    assert_overlap_changes_nothing,
    poison,
    product_of_codes,
)
from tests.support.kernels.hopper import on_hopper
from tests.support.kernels.references import relative_error

SHAPES = [StreamShape(*shape[:-1]) for shapes in CODES_STREAMS.values() for shape in shapes]


FORMS = [
    *(("e4m3", form) for form in (WHOLE, BLOCKS, Scales(256, 128, 64))),
    *(("int8", form) for form in (WHOLE, GROUPS, Scales(0, 256, 1))),
]


def _agrees(made: Product, shape: StreamShape, arrived: torch.Tensor) -> None:
    """Integers of whole rows are summed without error; e4m3 in about 14 bits within a step."""
    integers = made.x.dtype == torch.int8
    poison()
    found = stream_codes(made.x, made.scale, made.weight, made.bias, shape, arrived, torch.float32)
    assert relative_error(found, made.expected + made.bias.double()) < (1e-5 if integers else 2e-3), shape
    alone = stream_codes(made.x[-1:], made.scale[-1:], made.weight, made.bias, shape, arrived, torch.float32)
    assert torch.equal(alone[0], found[-1])
    assert not arrived.any()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("code", "form"), FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (1000, 1536), (4104, 4352)])
def test_products_of_codes(code: str, form: Scales, outputs: int, inputs: int) -> None:
    """Where programs get unequal shares of the inputs, or none, and the last tile is not whole."""
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    for shape in SHAPES:
        for rows in {max(1, shape.rows - 3), shape.rows}:
            _agrees(product_of_codes(code, rows, outputs, inputs, form), shape, arrived)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("code", "form"), [("e4m3", WHOLE), ("e4m3", Scales(0, 128, 128)), ("int8", WHOLE)])
@pytest.mark.parametrize("inputs", [208, 4112])
def test_the_last_step_may_be_short(code: str, inputs: int, form: Scales) -> None:
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    for shape in SHAPES[::3]:
        _agrees(product_of_codes(code, shape.rows - 1, 136, inputs, form), shape, arrived)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("code", DTYPES)
def test_launches_of_a_graph_overlap(code: str) -> None:
    """Each waits for the codes and the sums of those before, though it fetches weights earlier."""
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    made = [product_of_codes(code, 32, 4096, 4096, WHOLE) for _ in range(4)]
    cuts = 2 * CODES_STREAMS[32]
    x = torch.randn(32, 4096, device="cuda", dtype=torch.bfloat16)

    def layers() -> torch.Tensor:
        hidden = x
        for one, cut in zip(made, cuts, strict=True):
            codes, scale = quantize_rows(hidden, code)
            hidden = stream_codes(codes, scale, one.weight, None, StreamShape(*cut[:-1]), arrived, x.dtype)
        return hidden

    assert_overlap_changes_nothing(layers, x)
    assert not arrived.any()


LAYERS = (
    Scaled("e4m3", ROWS, Rounding("e4m3")),
    Scaled("e4m3", Block(128, 128), Rounding("e4m3", 128)),
    Scaled("int8", ROWS, Rounding("int8")),
)


def _layer(
    form: Scaled, device: torch.device, hopper: bool = True, outputs: int = 640, dtype: torch.dtype = torch.bfloat16
) -> Linear:
    kernels = frozenset({"quantized", "hopper_linear"} if hopper else {"quantized"})
    linear = Linear(512, {"o_proj": outputs}, Build(dtype, device, 1, kernels, linear=LinearMethods(form)), bias=True)
    linear.fill_random(torch.Generator(device).manual_seed(0))
    linear.finish()
    return linear


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("form", LAYERS)
def test_codes_of_a_layer_for_every_number_of_rows(form: Scaled) -> None:
    linear = _layer(form, torch.device("cuda"))
    method = linear.method
    assert isinstance(method, ScaledMethod) and linear.bias is not None
    own = method.own_products()
    plain, counts = method.dequantize().double(), sorted(method.candidates())
    for fewer, most in itertools.pairwise(counts):
        ways = {
            name: way
            for name, way in method.candidates()[most].items()
            if name in own or name[-1] in ("stream", "tiles")
        }
        for rows in range(fewer + 1, min(most, 256) + 1):
            x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
            expected = method.rounded(x).double() @ plain.T + linear.bias.double()
            for name, way in ways.items():
                assert relative_error(way(x, linear.bias), expected) < 0.02, (name, rows)


@pytest.mark.parametrize("form", LAYERS)
def test_what_is_timed_on_hopper(form: Scaled) -> None:
    cpu = torch.device("cpu")

    def kinds(linear: Linear, rows: int) -> set[object]:
        return {name[-1] for name in linear.method.candidates()[rows] if isinstance(name, tuple)} & {
            "codes",
            "stream",
            "tiles",
        }

    assert kinds(_layer(form, cpu), 1) == set()
    assert kinds(_layer(form, cpu, hopper=False), 16) == {"codes"}
    assert kinds(_layer(form, cpu), 16) == {"stream"}
    assert kinds(_layer(form, cpu), 128) == {"tiles"}
    assert kinds(_layer(form, cpu), 256) == {"tiles"}
    assert kinds(_layer(form, cpu), 8192) == {"codes"}
    assert kinds(_layer(form, cpu, dtype=torch.float32), 1024) == {"codes"}
    assert kinds(_layer(form, cpu, outputs=644), 16) == {"codes"}


@pytest.mark.parametrize(
    ("code", "group", "inputs", "known"),
    [("e4m3", 64, 64, True), ("int8", 128, 512, True), ("int8", 64, 512, False), ("int4", 128, 512, False)],
)
def test_which_matrices_are_known(code: str, group: int, inputs: int, known: bool) -> None:
    assert streams_codes(code, group, 64, inputs) == known
    assert not streams_codes(code, group, 64, inputs + 8)


def _launch(code: str, form: Scales, shape: StreamShape) -> torch.Tensor:
    inputs, outputs = 4096, 1024
    x, codes = (torch.empty(size, inputs, dtype=DTYPES[code]) for size in (shape.rows, outputs))
    x_scale = torch.empty(shape.rows, inputs // form.x if form.x else 1)
    scale = torch.empty(outputs // form.outputs, inputs // form.inputs if form.inputs else 1)
    weight = Packed(code, codes, scale, None, form.inputs or inputs, form.outputs)
    return stream_codes(x, x_scale, weight, None, shape, torch.zeros(64, dtype=torch.int32), torch.bfloat16)


LAUNCHES: list[Callable[[], object]] = [
    partial(_launch, code, form, StreamShape(*CODES_STREAMS[rows][place][:-1]))
    for code in DTYPES
    for form, rows, place in ((WHOLE, 8, 0), (WHOLE, 32, 1), (BLOCKS, 64, 2), (GROUPS, 64, 0))
]
