"""Sums over ranks through memory of each other: between processes that share it, and beside float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_exchange import peer_gather, peer_sum_scattered
from kvern.kernels.peer_sum import coded_peer_sum_norm, peer_sum, peer_sum_norm
from kvern.kernels.peer_words import PeerMemory, row_words_of, rows_kept
from kvern.kernels.quantize_rows import Coding, RowCodes
from tests.support.kernel_list.ranks import sent
from tests.support.kernels.peer_memories import (
    EPSILON,
    PROGRAMS,
    ROWS,
    SLOTS,
    TURNS,
    absent,
    memory,
    together,
)
from tests.support.kernels.references import CODINGS, codings, relative_error, rms_norm_reference


def compiled_for(width: int, size: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, PeerMemory]:
    """Arguments of a launch for a card that is compiled for."""
    row_words = row_words_of(width, dtype)
    zeros = [torch.zeros(1, dtype=torch.int64)] * size
    return torch.empty(4, width, dtype=dtype), memory(zeros, rank, rows_kept(size, row_words), row_words)


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    """The same numbers, and NaN where the other has any."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def launch(
    width: int, size: int, rank: int, dtype: torch.dtype, gain: torch.dtype | None, *, parts: bool = False
) -> object:
    """A launch for a card that is compiled for."""
    x, peers = compiled_for(width, size, rank, dtype)
    if gain is None:
        return peer_sum(x, peers, parts=parts)
    return peer_sum_norm(x, x.clone(), torch.empty(width, dtype=gain), EPSILON, peers, parts=parts)


def launch_codes(width: int, size: int, rank: int, coding: Coding, *, parts: bool = False) -> object:
    """Likewise."""
    x, peers = compiled_for(width, size, rank, torch.bfloat16)
    weight = torch.empty(width, dtype=torch.bfloat16)
    return coded_peer_sum_norm(x, x.clone(), weight, EPSILON, peers, coding, parts=parts)


LAUNCHES: list[Callable[[], object]] = [
    lambda: launch(8192, 2, 0, torch.bfloat16, torch.bfloat16),
    lambda: launch(8192, 2, 1, torch.bfloat16, None),
    lambda: launch(5120, 4, 2, torch.float16, torch.float32),
    lambda: launch(2048, 8, 7, torch.bfloat16, torch.bfloat16),
    lambda: launch(16384, 4, 3, torch.bfloat16, torch.bfloat16),
    lambda: launch(64, 3, 1, torch.bfloat16, None),
    lambda: launch(4096, 2, 1, torch.float32, torch.float32),
    lambda: launch(8192, 4, 1, torch.bfloat16, torch.bfloat16, parts=True),
    lambda: launch(4096, 8, 3, torch.float16, None, parts=True),
    lambda: launch(5120, 3, 0, torch.float16, torch.float32, parts=True),
    lambda: launch(4096, 4, 2, torch.float32, torch.float32, parts=True),
    lambda: peer_gather(*compiled_for(2048, 4, 1, torch.bfloat16)),
    lambda: peer_sum_scattered(*compiled_for(2048, 2, 1, torch.bfloat16)),
    lambda: peer_sum_scattered(*compiled_for(7168, 4, 3, torch.float16)),
    lambda: launch_codes(8192, 4, 1, Coding("e4m3")),
    lambda: launch_codes(5120, 2, 0, Coding("e4m3", 128, columns=True)),
    lambda: launch_codes(8192, 4, 2, Coding("e4m3"), parts=True),
]


def run(
    rank: int, way: str, memories: list[torch.Tensor], xs: torch.Tensor, given: tuple[torch.Tensor, ...], out: Any
) -> None:
    """One rank's sums, one after the other; slots are used by some of them."""
    (hidden, weight), width = given, xs.shape[-1]
    peers = memory(memories, rank, SLOTS, row_words_of(width, xs.dtype), PROGRAMS)
    for turn in range(TURNS):
        rows = 1 + turn % ROWS
        x, residual = xs[turn, rank, :rows], hidden[turn, :rows, :width]  # whose rows have gaps
        parts = way == "parts" or (way == "mixed" and turn % 2 == 0)
        out[rank, turn, 0, :rows] = peer_sum(x, peers, parts=parts)
        norm = peer_sum_norm(x, residual, weight, EPSILON, peers, parts=parts)
        out[rank, turn, 1, :rows], out[rank, turn, 2, :rows] = norm, residual


def exchange(rank: int, memories: list[torch.Tensor], xs: torch.Tensor, others: torch.Tensor, out: Any) -> None:
    """One rank's rows to all, and sums of them, in turns."""
    peers = memory(memories, rank, SLOTS, row_words_of(xs.shape[-1], xs.dtype), PROGRAMS)
    size = len(memories)
    for turn in range(TURNS):
        rows = 1 + turn % ROWS
        out[rank, turn, 0, : size * rows] = peer_gather(xs[turn, rank, :rows], peers)
        out[rank, turn, 1, :rows] = peer_sum_scattered(others[turn, rank, : size * rows], peers)


@pytest.mark.sample(4)
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels share memory of processes")
@pytest.mark.parametrize("way", ["whole", "parts", "mixed"])
@pytest.mark.parametrize(
    ("size", "width", "dtype"), [(2, 64, torch.float16), (3, 48, torch.float16), (2, 80, torch.float32)], ids=str
)
def test_ranks_wait_for_each_other_and_get_the_same_bits(way: str, size: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    xs = torch.randn(TURNS, size, ROWS, width, generator=generator).to(dtype)
    xs[0, :, 0, :2] = torch.full((2,), -1, dtype=torch.int32).view(dtype)[:2]  # a NaN that means absence
    hidden = torch.randn(TURNS, ROWS, width + 16, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator)
    memories = [absent(size, SLOTS, row_words_of(width, dtype)).share_memory_() for _ in range(size)]
    out = torch.zeros(size, TURNS, 3, ROWS, width, dtype=dtype).share_memory_()
    together(run, size, way, memories, xs, (hidden, weight), out)
    for turn in range(TURNS):
        rows = 1 + turn % ROWS
        total = xs[turn, 0, :rows].float()
        for rank in range(1, size):
            total = total + xs[turn, rank, :rows]
        residual = (hidden[turn, :rows, :width].float() + total.to(dtype)).to(dtype)
        for summed, normal, left in out[:, turn, :, :rows]:
            same(summed, total.to(dtype))
            same(left, residual)
            if turn:
                assert relative_error(normal, rms_norm_reference(residual, weight, EPSILON)) < 1e-3
            same(normal, out[0, turn, 1, :rows])  # all ranks go on with it
    assert all(bool((each == -1).all()) for each in memories), "all words were taken"


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels share memory of processes")
@pytest.mark.parametrize(("size", "width", "dtype"), [(2, 64, torch.float16), (3, 48, torch.float32)], ids=str)
def test_dp_attention_come_to_all_and_back(size: int, width: int, dtype: torch.dtype) -> None:
    xs, others = torch.randn(TURNS, size, ROWS, width).to(dtype), torch.randn(TURNS, size, size * ROWS, width).to(dtype)
    memories = [absent(size, SLOTS, row_words_of(width, dtype)).share_memory_() for _ in range(size)]
    out = torch.zeros(size, TURNS, 2, size * ROWS, width, dtype=dtype).share_memory_()
    together(exchange, size, memories, xs, others, out)
    for turn in range(TURNS):
        rows = 1 + turn % ROWS
        total = others[turn, 0].float()
        for rank in range(1, size):
            total = total + others[turn, rank]
        for rank in range(size):
            assert torch.equal(out[rank, turn, 0, : size * rows], xs[turn, :, :rows].flatten(0, 1))
            assert torch.equal(out[rank, turn, 1, :rows], total[rank * rows :][:rows].to(dtype))
    assert all(bool((each == -1).all()) for each in memories)


@pytest.mark.sample(6)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "size", "rows", "width"), [(0, 2, 1, 4096), (1, 4, 3, 320), (7, 8, 2, 96)])
def test_words_of_others_are_added_in_rank_order(
    device: torch.device, rank: int, size: int, rows: int, width: int, dtype: torch.dtype, in_parts: bool
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off")
    parts, hidden = torch.randn(size, rows, width).to(device, dtype), torch.randn(rows, width).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    row_words = row_words_of(width, dtype)
    others = absent(size, rows, row_words, device)
    memories = [others] * size
    memories[rank] = sent(parts, rank, rows, 0, in_parts=in_parts)
    peers = memory(memories, rank, rows, row_words)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    expected = total.to(dtype)
    assert torch.equal(peer_sum(parts[rank], peers, parts=in_parts), expected)
    assert peers.epochs.tolist() == [1] * rows
    assert bool((memories[rank] == -1).all()), "words are taken"
    written = others.view(torch.int32).view(2, size, rows, row_words)
    words, width_of_part = parts[rank].view(torch.int32).clone(), -(-row_words // size)
    if in_parts:
        own = slice(rank * width_of_part, (rank + 1) * width_of_part)
        words[:, own] = expected.view(torch.int32)[:, own]
    assert torch.equal(written[0, rank], words), "what they are sent"
    assert bool((written[1] == -1).all())
    memories[rank].copy_(sent(parts, rank, rows, 1, in_parts=in_parts))
    left = hidden.clone()
    normal = peer_sum_norm(parts[rank], hidden, weight, EPSILON, peers, parts=in_parts)
    close = add_rms_norm(left, expected, weight, EPSILON)
    assert torch.equal(hidden, left)
    torch.testing.assert_close(normal, close, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_codes_are_those_of_the_norm(device: torch.device, dtype: torch.dtype, in_parts: bool, name: str) -> None:
    size, rank, rows, width, coding = 2, 1, 3, 96, codings(device)[name]
    parts, hidden = torch.randn(size, rows, width).to(device, dtype), torch.randn(rows, width).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    found: list[RowCodes] = []
    residuals = hidden.clone(), hidden.clone()
    for turn, left in enumerate(residuals):
        given = parts[rank], left, weight, EPSILON
        own = sent(parts, rank, rows, 0, in_parts=in_parts)
        other = torch.zeros_like(own)
        peers = memory([other, own], rank, rows, row_words_of(width, dtype))
        if turn:
            found.append(coded_peer_sum_norm(*given, peers, coding, parts=in_parts))
        else:
            found.append(coding(peer_sum_norm(*given, peers, parts=in_parts)))
    plain, fused = found
    assert torch.equal(*residuals) and fused.scales.stride() == plain.scales.stride()
    torch.testing.assert_close(fused.scales, plain.scales, rtol=2e-3, atol=0)
    values = [made.codes.float().cpu() for made in found]
    off = (values[0] - values[1]).abs() > 0.13 * values[0].abs() + 1  # by one code
    assert not off.any()
    assert (values[0] != values[1]).float().mean() < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_ranks_on_streams_of_one_gpu(rows: int, parts: bool) -> None:
    """As many programs as are on a device together, half of them of each rank."""
    size, width, turns = 2, 4096, 50
    row_words = row_words_of(width, torch.bfloat16)
    device = torch.device("cuda")
    streams = [torch.cuda.Stream() for _ in range(size)]
    memories = [absent(size, rows, row_words, device) for _ in range(size)]
    ranks = [memory(memories, rank, rows, row_words) for rank in range(size)]
    xs = torch.randn(turns, size, rows, width, device=device).bfloat16()
    hidden, weight = torch.randn(size, rows, width, device=device).bfloat16(), torch.ones(width, device=device)
    hidden[1] = hidden[0]
    found: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for rank in range(size):  # compile, with what the other would have sent
        memories[rank].copy_(sent(xs[0], rank, rows, 0, in_parts=parts))
        peer_sum_norm(xs[0, rank], hidden[rank].clone(), weight, EPSILON, ranks[rank], parts=parts)
        ranks[rank].epochs.zero_()
    torch.cuda.synchronize()
    for each in memories:
        each.fill_(-1)
    torch.cuda.synchronize()
    for turn in range(turns):
        for rank in (turn % size, 1 - turn % size):
            with torch.cuda.stream(streams[rank]):
                given = xs[turn, rank], hidden[rank], weight, EPSILON, ranks[rank]
                found[rank].append(peer_sum_norm(*given, parts=parts))
    torch.cuda.synchronize()
    residual = hidden[0].clone()
    assert torch.equal(hidden[0], hidden[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert torch.isfinite(residual).all()
