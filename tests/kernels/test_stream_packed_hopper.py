"""Products with weights of four bits for Hopper GPUs. Gluon has no interpreter: they run there alone."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.formats.gpu.candidates import STREAMS
from kvern.kernels.arrange import arrange
from kvern.kernels.linear import StreamPackedShape
from kvern.kernels.packed import Packed
from tests.kernels.packed_weights import make_packed, to_device
from tests.support.kernels.hopper import GPU

SHAPES = tuple(dict.fromkeys(shape for shapes in STREAMS.values() for shape in shapes))
KINDS = (("int4", 128), ("int4 zero", -1), ("int4 zero", 64), ("mxfp4", 32), ("nvfp4", 16))
LARGE = tuple(shape for shape in SHAPES if shape.rows * shape.outputs > 1 << 13)
"""Of those weights are multiplied by their scales, which have the dtype of x or are rounded to bfloat16."""


def _launch(shape: StreamPackedShape, kind: str, group: int, dtype: torch.dtype) -> None:
    from kvern.kernels.stream_packed_hopper import stream_packed_product, streams

    packed = make_packed(kind, 256, 4096, group).packed
    if shape in LARGE and kind.startswith("int4"):
        packed = packed._replace(scale=packed.scale.to(dtype))
    assert streams(packed, 4096, shape, dtype)
    for rows in {shape.rows, min(shape.rows, 96)}:
        stream_packed_product(torch.empty(rows, 4096, dtype=dtype), packed, None, shape, torch.zeros(64).int())


LAUNCHES: list[Callable[[], object]] = [
    partial(_launch, SHAPES[0], "int4", 128, torch.bfloat16),
    partial(_launch, SHAPES[2], "int4 zero", 128, torch.float16),
    partial(_launch, SHAPES[3], "int4 zero", 64, torch.bfloat16),
    partial(_launch, SHAPES[1], "mxfp4", 32, torch.bfloat16),
    partial(_launch, SHAPES[4], "nvfp4", 16, torch.bfloat16),
    partial(_launch, LARGE[0], "mxfp4", 32, torch.bfloat16),
    partial(_launch, LARGE[1], "int4 zero", 128, torch.bfloat16),
    partial(_launch, LARGE[2], "int4", 64, torch.float16),
    partial(_launch, LARGE[3], "nvfp4", 16, torch.bfloat16),
]


def test_lanes_hold_what_arranged_inputs_multiply() -> None:
    """Columns of the matrix units' operand, made of words as the kernel says, beside inputs in lanes."""
    packed = make_packed("int4", 6, 384).packed
    x = torch.randint(-9, 10, (3, 384)).float()
    order = torch.randperm(384).int()
    arranged = arrange(x, order, "lanes")
    words = packed.codes.view(torch.int32).view(6, 3, 4, 4)  # output, group, j, q
    columns = torch.zeros(6, 3, 128)
    for b, h, j, i in itertools.product(range(8), range(2), range(4), range(2)):
        q, p = divmod(2 * b + h, 4)
        columns[:, :, 16 * b + 8 * h + 2 * j + i] = (words[:, :, j, q] >> (4 * p + 16 * i) & 15).float()
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], -1).flatten(1).float()
    assert torch.equal(arranged @ columns.flatten(1).T, x[:, order.long()] @ codes.T)


@GPU
@pytest.mark.parametrize(
    ("shape", "outputs", "inputs", "kind", "group"),
    [
        *((shape, 2064, 4096, *kind) for shape in SHAPES for kind in KINDS),
        *((shape, 64, 128, "int4", 128) for shape in (*SHAPES[1:3], *LARGE)),
        *((shape, 1000, 640, "int4 zero", 128) for shape in (*SHAPES[1:3], *LARGE)),
        *((shape, 136, 14336, "int4 zero", 128) for shape in SHAPES),
    ],
)
def test_product(
    device: torch.device, shape: StreamPackedShape, outputs: int, inputs: int, kind: str, group: int
) -> None:
    """Twice over the same counters, in memory that was no number; a row by itself is the same."""
    from kvern.kernels.stream_packed_hopper import stream_packed_product, streams

    made = make_packed(kind, outputs, inputs, inputs if group == -1 else group, order=inputs == 640)
    packed, plain = to_device(made.packed, device), made.plain.to(device)
    if kind.startswith("int4") and outputs == 2064:
        packed = packed._replace(scale=packed.scale.bfloat16())
        plain = _plain(packed)
    dtype = torch.float16 if inputs == 640 else torch.bfloat16
    if inputs == 640 and shape in LARGE:
        packed = packed._replace(scale=packed.scale.to(dtype))
    if not streams(packed, inputs, shape, dtype):
        assert shape.splits == 1 and shape not in LARGE
        return
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device=device)
    x = torch.randn(shape.rows - 3, inputs, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    arranged = arrange(x, packed.order, "lanes")
    for added in (None, bias):
        torch.full((1 << 22,), float("nan"), device=device)
        out = stream_packed_product(arranged, packed, added, shape, arrived)
        expected = x.double() @ plain.T + (0 if added is None else added.double())
        allowed = 1e-2 if shape in LARGE else 5e-3  # they round weights times scales
        assert float((out.double() - expected).abs().max() / expected.abs().max()) < allowed
    assert torch.equal(stream_packed_product(arranged[-1:], packed, bias, shape, arrived)[0], out[-1])
    assert not arrived.any()


@GPU
@pytest.mark.parametrize("shape", dict.fromkeys((*STREAMS[64], *STREAMS[128], *STREAMS[256])))
@pytest.mark.parametrize("more", [32, 261])
def test_more_rows_than_a_tile(device: torch.device, shape: StreamPackedShape, more: int) -> None:
    """Tiles side by side, of 128 rows and of 96; each row as by itself, with outputs that fill no tile."""
    from kvern.kernels.stream_packed_hopper import stream_packed_product

    made = make_packed("int4 zero", 1000, 4096, 128)
    packed, plain = to_device(made.packed, device), made.plain.to(device)
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device=device)
    x = torch.randn(shape.rows + more, 4096, device=device).bfloat16()
    bias = torch.randn(1000, device=device).bfloat16()
    arranged = arrange(x, None, "lanes")
    torch.full((1 << 22,), float("nan"), device=device)
    out = stream_packed_product(arranged, packed, bias, shape, arrived)
    expected = x.double() @ plain.T + bias.double()
    assert float((out.double() - expected).abs().max() / expected.abs().max()) < 5e-3
    for row in (0, shape.rows, len(x) - 1):
        assert torch.equal(stream_packed_product(arranged[row : row + 1], packed, bias, shape, arrived)[0], out[row])
    assert not arrived.any()


def _plain(packed: Packed) -> torch.Tensor:
    """Of int4 without an order, in float64."""
    assert packed.scale is not None
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], -1).flatten(1).double()
    zero = 8.0 if packed.zero is None else packed.zero.double().repeat_interleave(packed.group, 1)
    return (codes - zero) * packed.scale.double().repeat_interleave(packed.group, 1)
