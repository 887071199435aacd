"""Products of few rows with blocks of GGUF for Hopper GPUs. Gluon has no interpreter: they run there alone."""

import itertools
import struct
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kvern.formats.gguf.method import scales_and_minima
from kvern.formats.gpu.candidates import BLOCK_STREAMS, row_shape
from kvern.formats.gpu.products import counters, multiply_row
from kvern.kernels.arrange import scaled_lanes
from kvern.kernels.linear import Around, StreamPackedShape
from tests.kernels.packed_weights import make_packed, to_device
from tests.support.kernels.assembly import WORD
from tests.support.kernels.assembly import run_assembly as follow
from tests.support.kernels.hopper import GPU
from tests.support.kernels.references import relative_error
from tests.support.kernels.references import rms_norm_reference as rms_norm

SHAPES = tuple(dict.fromkeys(shape for shapes in BLOCK_STREAMS.values() for shape in shapes))
KINDS = [(shape, code) for shape in SHAPES for code in ("q4_k", "q6_k")]


def _launch(shape: StreamPackedShape, code: str) -> None:
    from kvern.kernels.stream_blocks_hopper import stream_blocks_product, streams_blocks

    packed = make_packed(f"gguf {code}", 256, 4096).packed
    assert streams_blocks(packed.code, shape)
    lanes = scaled_lanes(torch.empty(shape.rows, 4096, dtype=torch.bfloat16))
    stream_blocks_product(lanes, packed, None, shape, torch.zeros(64).int(), torch.bfloat16)


def _launch_row(activation: str | None, residual: bool) -> None:
    packed, x = make_packed("gguf q4_k", 256, 4096).packed, torch.empty(1, 4096, dtype=torch.bfloat16)
    around = Around(None, 0.0, None, torch.empty(1, 256, dtype=x.dtype)) if residual else Around(x[0], 1e-5, activation)
    multiply_row(x, packed, None, row_shape(SHAPES[2], "q4_k", activation is not None), around)


LAUNCHES: list[Callable[[], object]] = [
    *(partial(_launch, *kind) for kind in KINDS),
    partial(_launch_row, "silu", False),
    partial(_launch_row, None, True),
]


@pytest.mark.parametrize("code", ["q4_k", "q6_k"])
def test_what_assembly_makes_of_a_block(code: str) -> None:
    """Its instructions, followed for every word of two rows: code * scale, beside the format's definition."""
    import kvern.kernels.block_operands_hopper as operands

    blocks = make_packed(f"gguf {code}", 2, 256)
    codes, scale = blocks.packed.codes, blocks.packed.scale
    assert scale is not None
    d = scale[..., :2].contiguous().view(torch.float16).double().flatten()
    if code == "q4_k":
        scales, minima = scales_and_minima(scale[:, 0, 4:16])
        least = scale[..., 2:4].contiguous().view(torch.float16).double().flatten(1) * minima.double()
        scales, shift = scales.repeat_interleave(2, 1), least.repeat_interleave(32, 1)
    else:
        scales, shift = scale[:, 0, 2:].contiguous().view(torch.int8).float(), torch.zeros(2, 256)
    expected = ((blocks.plain + shift) / d[:, None]).round()
    words = codes.view(2, -1)[:, :128].contiguous().view(torch.int32)
    bits = codes.view(2, -1)[:, 128:].contiguous().view(torch.int32)
    for row, word in itertools.product(range(2), range(32)):
        run, q = divmod(word, 4)
        number = int(scales[row, 2 * run + q // 2])
        known = {"$8": int(words[row, word]) & WORD}
        if code == "q4_k":
            pairs = follow(operands._PAIRS.value, {"$4": number})
            known |= {f"${9 + index}": pairs[f"${index}"] for index in range(4)}
            assembly = operands._assembly()
        else:
            pairs = follow(operands._PAIRS_OF_SIX.value, {"$2": number & WORD})
            even, odd = (int(bits[row, 2 * run + place]) & WORD for place in range(2))
            known |= {"$9": even, "$10": odd, "$11": 0x4000 + q * 0x1010, "$12": pairs["$0"], "$13": pairs["$1"]}
            assembly = operands._assembly_of_six()
        known = follow(getattr(assembly, "value", assembly), known)
        for p, i in itertools.product(range(4), range(2)):
            found = struct.unpack("<e", struct.pack("<H", known[f"${2 * p + i}"]))[0]
            assert found == float(expected[row, 8 * word + p + 4 * i].half())


def test_a_row_in_lanes_with_its_norm(device: torch.device) -> None:
    x, gain = torch.randn(1, 512, device=device).bfloat16(), torch.randn(512, device=device)
    values, sums, by = scaled_lanes(x, gain, 1e-5)
    expected = rms_norm(x, gain, 1e-5).double()
    assert float((values.double().sum() * by - expected.sum()).abs()) < 3e-2
    assert float((sums.double().sum() * by - expected.sum()).abs()) < 3e-2
    assert abs(float(values.double().norm() * by) / float(expected.norm()) - 1) < 1e-3


def test_rows_in_lanes_beside_the_sums_of_runs(device: torch.device) -> None:
    """Numbers come back but for what is small beside a row's largest; two halves make a sum of 32."""
    x = torch.randn(4, 768, device=device)
    x[1] *= 2.0**40
    x[2] = 0
    x[3, 5] = 2.0**12
    x = x.bfloat16()
    values, sums, by = scaled_lanes(x)
    assert not (by.log2() % 1).any() and float(values.abs().max()) < 1024
    lanes = torch.empty(128, dtype=torch.int64)
    for b, h, j, i in itertools.product(range(8), range(2), range(4), range(2)):
        q, p = divmod(2 * b + h, 4)
        lanes[16 * b + 8 * h + 2 * j + i] = 32 * j + 8 * q + p + 4 * i
    plain = (values.double() * by[:, None].double()).view(4, 6, 128)
    expected = x.double().view(4, 6, 128)[..., lanes.to(device)]
    assert float(((plain - expected).abs().amax((1, 2)) / x.double().abs().amax(1).clamp(1e-30)).max()) < 2.0**-34
    high, low = sums.double().view(4, 3, 2, 8).unbind(2)
    runs = (high + low).view(4, 3, 4, 2).transpose(2, 3).reshape(4, 24) * by[:, None].double()
    error = (runs - x.double().view(4, 24, 32).sum(-1)).abs()
    assert float((error / (32 * x.double().abs().amax(1, keepdim=True)).clamp(1e-30)).max()) < 2.0**-20


@GPU
@pytest.mark.parametrize(
    ("shape", "code", "outputs", "inputs"),
    [
        *((*kind, *sizes) for kind in KINDS for sizes in ((272, 4096), (136, 14336), (1000, 768))),
        *((*kind, 64, 256) for kind in KINDS[:6]),
    ],
)
def test_product(device: torch.device, shape: StreamPackedShape, code: str, outputs: int, inputs: int) -> None:
    """Twice over the same counters, in memory that was no number, and a tile after the other; each row as by itself."""
    from kvern.kernels.stream_blocks_hopper import stream_blocks_product

    made = make_packed(f"gguf {code}", outputs, inputs)
    packed, plain = to_device(made.packed, device), made.plain.to(device)
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device=device)
    dtype = torch.float16 if inputs == 256 else torch.bfloat16
    x = torch.randn(2 * shape.rows + 5, inputs, device=device).to(dtype)
    x[3, 7] *= 100
    bias = torch.randn(outputs, device=device).to(dtype)
    for rows in (shape.rows - 3, len(x)):
        torch.full((1 << 22,), float("nan"), device=device)
        out = stream_blocks_product(scaled_lanes(x[:rows]), packed, bias, shape, arrived, dtype)
        expected = x[:rows].double() @ plain.T + bias.double()
        largest = expected.abs().amax(1, keepdim=True)
        assert float(((out.double() - expected).abs() / largest).max()) < (1e-3 if dtype == torch.float16 else 5e-3)
    for row in (0, shape.rows, len(x) - 1):
        alone = stream_blocks_product(scaled_lanes(x[row : row + 1]), packed, bias, shape, arrived, dtype)
        assert torch.equal(alone[0], out[row])
    assert not arrived.any()


@GPU
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("inputs", [4096, 14336])
@pytest.mark.parametrize(
    ("code", "dtype"), [("q4_k", torch.bfloat16), ("q4_k", torch.float16), ("q6_k", torch.bfloat16)]
)
def test_one_row_with_what_is_around_it(
    device: torch.device, splits: int, inputs: int, code: str, dtype: torch.dtype
) -> None:
    """Norm, activation and residual as layers of a single token use them, twice over the same counters."""
    outputs, shape = 528, StreamPackedShape(8, 64, 4, splits)
    made = make_packed(f"gguf {code}", outputs, inputs)
    packed, plain = to_device(made.packed, device), made.plain.to(device)
    x = torch.randn(1, inputs, device=device)
    x[:, 5] *= 30
    x[:, 64:128] *= 2.0**-30
    x = x.to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    gain = torch.randn(inputs, device=device).to(dtype)
    normed = rms_norm(x, gain, 1e-5).double() @ plain.T
    gate, up = (normed + bias.double()).chunk(2, -1)
    for _ in range(2):
        torch.full((1 << 22,), float("nan"), device=device)
        out = multiply_row(x, packed, None, row_shape(shape, code, False), Around(gain, 1e-5))
        assert relative_error(out, normed) < 5e-3
        out = multiply_row(x, packed, bias, row_shape(shape, code, True), Around(gain, 1e-5, "silu"))
        assert relative_error(out, F.silu(gate) * up) < 5e-3
        residual = torch.randn(1, outputs, device=device).to(dtype)
        expected = x.double() @ plain.T + bias.double() + residual.double()
        out = multiply_row(x, packed, bias, shape, Around(residual=residual))
        assert out is residual and relative_error(out, expected) < 5e-3
    assert not counters(device).any()
