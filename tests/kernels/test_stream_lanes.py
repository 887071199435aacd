"""Experts in MXFP4 for Hopper GPUs. Gluon has no interpreter: what runs on the card alone is marked so."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.kernels.expert_lanes import LARGEST_SCALE, STEP, LaneWeight, fits_lanes, in_lanes
from kvern.kernels.moe_lanes import FEWEST_ROWS, lane_experts, rows_of_block
from kvern.kernels.moe_routing import Alignment
from kvern.kernels.packed import E2M1
from kvern.spec.model import MoeSpec
from tests.kernels.packed_weights import make_packed, to_device
from tests.support.kernel_list.experts import activated

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no GPU of compute capability 9.0",
    ),
]
GPU = pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=on_hopper)])


def _launch(rows: int, activation: str | None) -> None:
    """Of blocks of so many rows, 0: of pairs alone."""
    from kvern.kernels.stream_lanes_hopper import ALONE, SHAPES, stream_lanes

    shape, rows = (SHAPES[rows], rows) if rows else (ALONE, FEWEST_ROWS)
    words, numbers = partial(torch.empty, dtype=torch.int32), partial(torch.empty, dtype=torch.bfloat16)
    outputs = 4 * 320 * (1 if activation is None else 2)
    weight = LaneWeight(words(outputs, 192 // 8), words(2, outputs))
    blocks = Alignment(words(8 * rows), words(8), words(8))
    weights = torch.empty(8) if activation is None else None
    stream_lanes(
        numbers(8, 192), weight, numbers(8, 320), blocks, shape,
        activation=activation, bias=numbers(outputs), weights=weights, early=activation is None,
    )  # fmt: skip


LAUNCHES: list[Callable[[], object]] = [
    *(partial(_launch, rows, "clamped_swiglu") for rows in (0, 8, 16, 32, 64, 128)),
    *(partial(_launch, rows, None) for rows in (0, 16, 128)),
    partial(_launch, 32, "silu"),
]


def _pairs_of(word: int, scale: int) -> list[float]:
    """What the assembly of the kernel makes of a word and a scale's byte, in its order, less its factor of 2**-64."""
    odd, even = word & 0x80808080, word & 0x08080808
    shifted = ((even << 12, word << 6), (odd << 8, word << 2), (even << 4, word >> 2), (odd, word >> 6))
    by = torch.tensor([((scale & 255) * 0x00800080 + 0x1F001F00) & 0xFFFF], dtype=torch.int32)
    found = []
    for sign, magnitude in shifted:
        pair = (magnitude & 0x01C001C0) | (sign & ~0x01C001C0 & 0xFFFFFFFF)
        for half in (pair & 0xFFFF, pair >> 16):
            bits = torch.tensor([half, int(by)], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double()
            found.append(float(bits.prod()) * 2.0**64)
    return found


def test_lanes_hold_what_inputs_multiply() -> None:
    """Numbers made of words as the kernel does, in the columns of the matrix units' operand, are the format's."""
    packed, plain = make_packed("mxfp4", 5, 320, 32)[:2]
    assert fits_lanes(packed)
    weight = in_lanes(packed)
    assert weight.scales.shape == (-(-320 // STEP), 5)
    for row, block in itertools.product(range(5), range(320 // 64)):
        columns = [0.0] * 64
        scales = int(weight.scales[block // 2, row]) & 0xFFFFFFFF
        for j, q in itertools.product(range(4), range(2)):
            word = int(weight.codes[row, 8 * block + 2 * j + q]) & 0xFFFFFFFF
            numbers = _pairs_of(word, scales >> (16 * (block % 2) + 8 * q))
            for p, i in itertools.product(range(4), range(2)):
                b, h = divmod(4 * q + p, 2)
                columns[16 * b + 8 * h + 2 * j + i] = numbers[2 * p + i]
        assert columns == plain[row, 64 * block : 64 * block + 64].tolist()


@pytest.mark.parametrize("scale", [72, 118, 127, 192])
def test_all_codes_under_all_scales(scale: int) -> None:
    """Exact for every code, where the format's own number is no smaller than any weight."""
    found = _pairs_of(0x76543210, scale) + _pairs_of(0xFEDCBA98, scale)
    expected = [E2M1[base + p + 4 * i] for base in (0, 8) for p in range(4) for i in range(2)]
    assert found == [number * 2.0 ** (scale - 127) for number in expected]


def test_scales_beyond_bfloat16_do_not_fit() -> None:
    packed = make_packed("mxfp4", 5, 320).packed
    assert packed.scale is not None
    packed.scale[3, 4] = LARGEST_SCALE + 1
    assert not fits_lanes(packed)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 8), (16, 8), (32, 8), (64, 16), (128, 32), (256, 64), (1024, 64), (2048, 128), (8192, 128)]
)
def test_blocks_hold_twice_what_an_expert_gets(tokens: int, rows: int) -> None:
    """Of 32 experts, four for each token."""
    assert rows_of_block(4 * tokens, 32) == rows


@GPU
@pytest.mark.parametrize("tokens", [1, 2, 3, 9, 17, 40, 100, 500])
@pytest.mark.parametrize(("hidden", "width"), [(192, 320), (2880, 2880), (128, 64)])
@pytest.mark.parametrize("activation", ["clamped_swiglu", "silu"])
def test_experts(device: torch.device, tokens: int, hidden: int, width: int, activation: str) -> None:
    """Of every size of blocks, in memory that was no number."""
    moe = MoeSpec(experts=5, top_k=3, width=width, activation=activation)
    made = [make_packed("mxfp4", 5 * 2 * width, hidden), make_packed("mxfp4", 5 * hidden, width)]
    plain = [item.plain.to(device).view(5, -1, item.plain.shape[1]) for item in made]
    gate_up, down = (in_lanes(to_device(item.packed, device)) for item in made)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    biases = torch.randn(5, 2 * width, device=device).bfloat16(), torch.randn(5, hidden, device=device).bfloat16()
    weights, chosen = torch.randn(tokens, 5, device=device).topk(3)
    expected = torch.randn(tokens, hidden, device=device).bfloat16()
    add = expected.clone()
    expected = expected.double()
    for expert in range(5):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gated = activated(moe, x[token].double() @ plain[0][expert].T + biases[0][expert].double())
        out = gated @ plain[1][expert].T + biases[1][expert].double()
        expected.index_add_(0, token, out * weights[token, place].double()[:, None])
    torch.full((1 << 22,), float("nan"), device=device)
    out = lane_experts(x, gate_up, down, weights, chosen, activation, experts=5, biases=biases, add=add)
    assert float((out.double() - expected).abs().max() / expected.abs().max()) < 8e-3
