"""Sums over ranks through memory of each other: between processes that share it, and beside float64."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvern.kernel_list.ranks import sent_rows, sent_words
from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_rows import PeerRows, coded_peer_rows_norm, memory_of, peer_rows, peer_rows_norm, rows_kept
from kvern.kernels.peer_sum import (
    PeerMemory,
    coded_peer_sum_norm,
    peer_sum,
    peer_sum_norm,
    row_words_of,
    slots_of,
    words_of,
)
from kvern.kernels.quantize_rows import Coding, RowCodes
from tests.kernels.test_norm import CODINGS, codings, reference, relative_error

ROWS, SLOTS, TURNS, PROGRAMS = 3, 4, 5, 2
EPSILON = 1e-5
SECONDS = 120.0


def memory(words: list[torch.Tensor], rank: int, slots: int, row_words: int) -> PeerMemory:
    """Of a rank, in a process that sees the words of all."""
    device = words[rank].device
    buffers = torch.tensor([each.data_ptr() for each in words], device=device)
    epochs = torch.zeros(slots, dtype=torch.int32, device=device)
    return PeerMemory(words[rank], buffers, epochs, rank, len(words), slots, row_words)


def rows_memory(memories: list[torch.Tensor], rank: int, slots: int, width: int, programs: int) -> PeerRows:
    """Likewise, of whole rows."""
    device = memories[rank].device
    buffers = torch.tensor([each.data_ptr() for each in memories], device=device)
    epochs = torch.zeros(programs, dtype=torch.int32, device=device)
    return PeerRows(memories[rank], buffers, epochs, rank, len(memories), slots, width)


def launch(width: int, size: int, rank: int, dtype: torch.dtype, gain: torch.dtype | None) -> object:
    """A launch for a card that is compiled for."""
    x = torch.empty(4, width, dtype=dtype)
    row_words = row_words_of(width, dtype)
    peers = memory([torch.zeros(1, dtype=torch.int64)] * size, rank, slots_of(size, row_words), row_words)
    return (
        peer_sum(x, peers)
        if gain is None
        else peer_sum_norm(x, x.clone(), torch.empty(width, dtype=gain), EPSILON, peers)
    )


def launch_rows(
    width: int, size: int, rank: int, dtype: torch.dtype, gain: torch.dtype | None, *, owned: bool = False
) -> object:
    """Likewise."""
    x = torch.empty(4, width, dtype=dtype)
    zeros = [torch.zeros(1, dtype=torch.int64)] * size
    peers = rows_memory(zeros, rank, rows_kept(size, width, dtype), width, 132)
    if gain is None:
        return peer_rows(x, peers, owned)
    return peer_rows_norm(x, x.clone(), torch.empty(width, dtype=gain), EPSILON, peers, owned)


def launch_codes(width: int, size: int, rank: int, coding: Coding) -> object:
    """Likewise."""
    x, weight = torch.empty(4, width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
    zeros, row_words = [torch.zeros(1, dtype=torch.int64)] * size, width // 2
    words = memory(zeros, rank, slots_of(size, row_words), row_words)
    rows = rows_memory(zeros, rank, rows_kept(size, width, x.dtype), width, 132)
    given = x, x.clone(), weight, EPSILON
    return coded_peer_sum_norm(*given, words, coding), coded_peer_rows_norm(*given, rows, coding)


LAUNCHES: list[Callable[[], object]] = [
    lambda: launch(8192, 2, 0, torch.bfloat16, torch.bfloat16),
    lambda: launch(8192, 2, 1, torch.bfloat16, None),
    lambda: launch(5120, 4, 2, torch.float16, torch.float32),
    lambda: launch(2048, 8, 7, torch.bfloat16, torch.bfloat16),
    lambda: launch(16384, 4, 3, torch.bfloat16, torch.bfloat16),
    lambda: launch(64, 3, 1, torch.bfloat16, None),
    lambda: launch(4096, 2, 1, torch.float32, torch.float32),
    lambda: launch_rows(8192, 2, 1, torch.bfloat16, torch.bfloat16),
    lambda: launch_rows(8192, 4, 1, torch.bfloat16, torch.bfloat16, owned=True),
    lambda: launch_rows(4096, 8, 3, torch.float16, None, owned=True),
    lambda: launch_rows(5120, 8, 0, torch.float16, None),
    lambda: launch_rows(4096, 4, 2, torch.float32, torch.float32),
    lambda: launch_codes(8192, 4, 1, Coding("e4m3")),
    lambda: launch_codes(5120, 2, 0, Coding("e4m3", 128, columns=True)),
]


def run(
    rank: int, way: str, memories: list[torch.Tensor], xs: torch.Tensor, given: tuple[torch.Tensor, ...], out: Any
) -> None:
    """One rank's sums, one after the other; slots are used by some of them."""
    (hidden, weight), width = given, xs.shape[-1]
    words = memory(memories, rank, SLOTS, row_words_of(width, xs.dtype))
    whole = rows_memory(memories, rank, SLOTS, width, PROGRAMS)
    for turn in range(TURNS):
        rows = 1 + turn % ROWS
        x, residual = xs[turn, rank, :rows], hidden[turn, :rows, :width]  # whose rows have gaps
        given = x, residual, weight, EPSILON
        owned = way == "owners" or (way == "mixed" and turn % 2 == 0)
        out[rank, turn, 0, :rows] = peer_sum(x, words) if way == "words" else peer_rows(x, whole, owned)
        norm = peer_sum_norm(*given, words) if way == "words" else peer_rows_norm(*given, whole, owned)
        out[rank, turn, 1, :rows], out[rank, turn, 2, :rows] = norm, residual


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels share memory of processes")
@pytest.mark.parametrize("way", ["words", "rows", "owners", "mixed"])
@pytest.mark.parametrize(
    ("size", "width", "dtype"), [(2, 64, torch.float16), (3, 48, torch.float16), (2, 80, torch.float32)], ids=str
)
def test_ranks_wait_for_each_other_and_get_the_same_bits(way: str, size: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    xs = torch.randn(TURNS, size, ROWS, width, generator=generator).to(dtype)
    hidden = torch.randn(TURNS, ROWS, width + 16, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator)
    count = words_of(size, SLOTS, row_words_of(width, dtype))
    count = max(count, memory_of(size, SLOTS, width, dtype, PROGRAMS))
    memories = [torch.zeros(count, dtype=torch.int64).share_memory_() for _ in range(size)]
    out = torch.zeros(size, TURNS, 3, ROWS, width, dtype=dtype).share_memory_()
    context = multiprocessing.get_context("fork")
    given = way, memories, xs, (hidden, weight), out
    processes = [context.Process(target=run, args=(rank, *given), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0] * size
    for turn in range(TURNS):
        rows = 1 + turn % ROWS
        total = xs[turn, 0, :rows].float()
        for rank in range(1, size):
            total = total + xs[turn, rank, :rows]
        residual = (hidden[turn, :rows, :width].float() + total.to(dtype)).to(dtype)
        for summed, normal, left in out[:, turn, :, :rows]:
            assert torch.equal(summed, total.to(dtype))
            assert torch.equal(left, residual)
            assert relative_error(normal, reference(residual, weight, EPSILON)) < 1e-3
            assert torch.equal(normal, out[0, turn, 1, :rows]), "all ranks go on with the same"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "size", "rows", "width"), [(0, 2, 1, 4096), (1, 4, 3, 320), (7, 8, 2, 96)])
def test_words_of_others_are_added_in_rank_order(
    device: torch.device, rank: int, size: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off")
    parts, hidden = torch.randn(size, rows, width).to(device, dtype), torch.randn(rows, width).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    row_words = row_words_of(width, dtype)
    others = torch.zeros(words_of(size, rows, row_words), dtype=torch.int64, device=device)
    words = [others] * size
    words[rank] = sent_words(parts, rows, 1)
    peers = memory(words, rank, rows, row_words)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    expected = total.to(dtype)
    assert torch.equal(peer_sum(parts[rank], peers), expected)
    assert peers.epochs.tolist() == [1] * rows
    written = others.view(2, size, rows, row_words)
    assert torch.equal(written[1, rank], sent_words(parts, rows, 1).view(2, size, rows, -1)[1, rank]), (
        "what they are sent"
    )
    assert not written[0].any()
    words[rank].copy_(sent_words(parts, rows, 2))
    left = hidden.clone()
    normal = peer_sum_norm(parts[rank], hidden, weight, EPSILON, peers)
    close = add_rms_norm(left, expected, weight, EPSILON)
    assert torch.equal(hidden, left)
    torch.testing.assert_close(normal, close, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize(("rank", "size", "rows", "width"), [(0, 2, 1, 4096), (1, 4, 5, 320), (7, 8, 2, 96)])
def test_rows_of_others_are_added_in_rank_order(
    device: torch.device, rank: int, size: int, rows: int, width: int
) -> None:
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    parts, hidden = torch.randn(size, rows, width).to(device, dtype), torch.randn(rows, width).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    others = torch.zeros(memory_of(size, rows, width, dtype, PROGRAMS), dtype=torch.int64, device=device)
    memories = [others] * size
    memories[rank] = sent_rows(parts, rows, PROGRAMS, 1)
    peers = rows_memory(memories, rank, rows, width, PROGRAMS)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    assert torch.equal(peer_rows(parts[rank], peers), total.to(dtype))
    used = min(rows, PROGRAMS)
    assert peers.epochs.tolist() == [1] * used + [0] * (PROGRAMS - used)
    numbers = others.view(dtype)[: 2 * size * rows * width].view(2, size, rows, width)
    assert torch.equal(numbers[1, rank], parts[rank]), "what they are sent"
    flags = others.view(torch.int32)[-2 * size * PROGRAMS :].view(2, size, PROGRAMS)
    assert flags[1, rank].tolist() == [1] * used + [0] * (PROGRAMS - used)
    assert int(flags.sum()) == used
    memories[rank].copy_(sent_rows(parts, rows, PROGRAMS, 2))
    left = hidden.clone()
    normal = peer_rows_norm(parts[rank], hidden, weight, EPSILON, peers)
    close = add_rms_norm(left, total.to(dtype), weight, EPSILON)
    assert torch.equal(hidden, left)
    torch.testing.assert_close(normal, close, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("way", ["words", "rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_codes_are_those_of_the_norm(device: torch.device, dtype: torch.dtype, way: str, name: str) -> None:
    size, rank, rows, width, coding = 2, 1, 3, 96, codings(device)[name]
    parts, hidden = torch.randn(size, rows, width).to(device, dtype), torch.randn(rows, width).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    found: list[RowCodes] = []
    residuals = hidden.clone(), hidden.clone()
    for turn, left in enumerate(residuals):
        given = parts[rank], left, weight, EPSILON
        if way == "words":
            own = sent_words(parts, rows, 1)
            words = memory([torch.zeros_like(own), own], rank, rows, row_words_of(width, dtype))
            found.append(coded_peer_sum_norm(*given, words, coding) if turn else coding(peer_sum_norm(*given, words)))
        else:
            own = sent_rows(parts, rows, rows, 1)
            whole = rows_memory([torch.zeros_like(own), own], rank, rows, width, rows)
            found.append(coded_peer_rows_norm(*given, whole, coding) if turn else coding(peer_rows_norm(*given, whole)))
    plain, fused = found
    assert torch.equal(*residuals) and fused.scales.stride() == plain.scales.stride()
    torch.testing.assert_close(fused.scales, plain.scales, rtol=2e-3, atol=0)
    values = [made.codes.float().cpu() for made in found]
    off = (values[0] - values[1]).abs() > 0.13 * values[0].abs() + 1  # by one code
    assert not off.any()
    assert (values[0] != values[1]).float().mean() < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_ranks_on_streams_of_one_gpu(rows: int) -> None:
    """As many programs as are on a device together, half of them of each rank."""
    size, width, turns = 2, 4096, 50
    row_words = row_words_of(width, torch.bfloat16)
    device = torch.device("cuda")
    streams = [torch.cuda.Stream() for _ in range(size)]
    words = [torch.zeros(words_of(size, rows, row_words), dtype=torch.int64, device=device) for _ in range(size)]
    memories = [memory(words, rank, rows, row_words) for rank in range(size)]
    xs = torch.randn(turns, size, rows, width, device=device).bfloat16()
    hidden, weight = torch.randn(size, rows, width, device=device).bfloat16(), torch.ones(width, device=device)
    hidden[1] = hidden[0]
    found: list[list[torch.Tensor]] = [[] for _ in range(size)]
    warm = [memory(words, rank, rows, row_words) for rank in range(size)]
    for rank in range(size):  # compile, with what the other would have sent
        words[rank].copy_(sent_words(xs[0], rows, 1))
        peer_sum_norm(xs[0, rank], hidden[rank].clone(), weight, EPSILON, warm[rank])
    torch.cuda.synchronize()
    for each in words:
        each.zero_()
    torch.cuda.synchronize()
    for turn in range(turns):
        for rank in (turn % size, 1 - turn % size):
            with torch.cuda.stream(streams[rank]):
                found[rank].append(peer_sum_norm(xs[turn, rank], hidden[rank], weight, EPSILON, memories[rank]))
    torch.cuda.synchronize()
    residual = hidden[0].clone()
    assert torch.equal(hidden[0], hidden[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert torch.isfinite(residual).all()
