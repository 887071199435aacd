"""Memory of KV caches that comes and goes in chunks: its addresses stay, on the host's memory."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.device.chunked_memory import ChunkedMemory, blocks_of_a_piece
from kvern.runner.device_asleep import DeviceMemoryAsleep
from tests.support.host_cuda import GRANULARITY, HostMapped, have_cuda_on_the_host
from tests.support.sampling import examples
from tests.support.sleeping import MIB, Owner

CPU = torch.device("cpu")
UNIT = 4
"""Blocks of a piece of memory."""
SHAPE, NARROW = (2, GRANULARITY // (UNIT * 4)), (1, GRANULARITY // (UNIT * 4))
"""The shapes of a block, in float16 and float32: a piece has four of them."""


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    have_cuda_on_the_host(monkeypatch)
    monkeypatch.setattr(HostMapped, "left", 64 * MIB)
    yield
    gc.collect()  # what is pinned is let go


def memory_of(blocks: int = 40, chunk: int = 8, least: int = 8) -> tuple[ChunkedMemory, list[torch.Tensor]]:
    """Memory with the pools of a model and of its draft."""
    memory = ChunkedMemory(CPU, blocks, chunk, least, UNIT)
    return memory, [memory.zeros(6, SHAPE, torch.float16), memory.zeros(2, NARROW, torch.float32)]


def taken() -> int:
    assert HostMapped.left is not None
    return 64 * MIB - HostMapped.left


def test_a_piece_has_whole_blocks_of_all_pools() -> None:
    assert blocks_of_a_piece(1 << 21, [32 << 10]) == 64
    assert blocks_of_a_piece(1 << 21, [32 << 10, 16 << 10]) == 128
    assert blocks_of_a_piece(1 << 21, [16 * 576 * 2]) == 1024
    assert blocks_of_a_piece(1 << 21, [4 << 20]) == 1


def test_what_is_mapped_is_zeros_where_it_always_was_and_nothing_else_takes_memory() -> None:
    memory, pools = memory_of()
    chunk_bytes = 8 * (6 * GRANULARITY + 2 * GRANULARITY) // UNIT
    scratch_bytes = 2 * GRANULARITY  # one for each pool, whatever parts it has
    assert memory.size == memory.least_bytes == taken() == chunk_bytes + scratch_bytes
    for blocks in (16, 40, 24, 32, 8, 40):
        before = memory.blocks
        contents = [pool[:, : min(before, blocks)].clone() for pool in pools]
        addresses = [pool.data_ptr() for pool in pools]
        assert memory.resize(blocks) == blocks == memory.blocks
        assert [pool.data_ptr() for pool in pools] == addresses
        assert taken() == memory.size == blocks // 8 * chunk_bytes + scratch_bytes
        for pool, kept in zip(pools, contents, strict=True):
            assert torch.equal(pool[:, : len(kept[0])], kept)
            assert not pool[:, len(kept[0]) : blocks].any()
            pool[:, :blocks] = blocks
            pool[:, memory.scratch] = 7
    assert memory.resize(0) == 8, "the least stays"


def test_a_last_chunk_may_be_shorter() -> None:
    memory, pools = memory_of(blocks=36, chunk=16, least=16)
    sizes = [memory.size]
    for blocks in (32, 36, 32, 36, 16):
        assert memory.resize(blocks) == blocks
        pools[0][:, :blocks] = 1
        sizes.append(memory.size)
    assert sizes[1] == sizes[3] < sizes[2] == sizes[4] and sizes[0] == sizes[5] == taken()


def test_a_chunk_for_which_there_is_no_memory_is_not_half_there() -> None:
    memory, pools = memory_of()
    chunk_bytes = memory.resize(16) and taken() - memory.least_bytes
    for pool in pools:
        pool[:, :16] = 3
    HostMapped.left = 2 * chunk_bytes + chunk_bytes // 2
    assert memory.resize(40) == 32, "two chunks fit, of the third a part would"
    assert HostMapped.left == chunk_bytes // 2
    assert all((pool[:, :16] == 3).all() and not pool[:, 16:32].any() for pool in pools)
    assert memory.resize(40) == 32
    HostMapped.left += chunk_bytes
    assert memory.resize(40) == 40


def test_it_sleeps_beside_weights_and_wakes_with_the_least_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(CPU)
    expected = owner.parts["whole"].clone()
    chunked, pools = memory_of()
    monkeypatch.setattr(HostMapped, "left", 400 * MIB)
    before = 400 * MIB + chunked.size
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache, pools[0]], chunked=chunked)
    chunked.resize(40)
    memory.leave()
    assert HostMapped.left == before
    HostMapped.left = memory.size + chunked.least_bytes - 1
    with pytest.raises(torch.OutOfMemoryError):
        memory.enter()
    assert HostMapped.left == memory.size + chunked.least_bytes - 1, "nothing is half there"
    HostMapped.left += 1
    memory.enter()
    assert HostMapped.left == 0 and chunked.blocks == chunked.least
    assert torch.equal(owner.parts["whole"], expected)
    assert not any(pool[:, :8].any() or pool[:, chunked.scratch].any() for pool in pools)


@settings(max_examples=examples(40), deadline=None)
@given(
    units=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 30)),
    turns=st.lists(st.tuples(st.sampled_from(["resize", "sleep", "others"]), st.integers(0, 140)), max_size=25),
)
def test_whatever_comes_and_goes_blocks_that_stay_keep_what_they_have(
    units: tuple[int, int, int], turns: list[tuple[str, int]]
) -> None:
    """Sizes that are no multiples of a chunk, a card that others fill and leave, and sleeps."""
    chunk, least_chunks, count = units
    least, blocks = UNIT * min(chunk * least_chunks, count), UNIT * count
    HostMapped.left = 64 * MIB
    memory, pools = memory_of(blocks, UNIT * chunk, least)
    expected = [torch.zeros(blocks) for _ in pools]
    for number, (what, size) in enumerate(turns, 1):
        before, total = memory.blocks, HostMapped.left + memory.size
        if what == "others":
            total = memory.size + size * GRANULARITY
            HostMapped.left = size * GRANULARITY
        elif what == "sleep":
            memory.leave()
            assert HostMapped.left == total
            memory.enter()
            expected = [torch.zeros(blocks) for _ in pools]
        else:
            wanted = blocks if size >= count else UNIT * size // (UNIT * chunk) * (UNIT * chunk)
            found = memory.resize(wanted)
            assert max(least, min(wanted, before)) <= found <= max(least, wanted, before)
            assert found == max(wanted, least) or HostMapped.left < (found + UNIT * chunk) * 8 * GRANULARITY
        assert HostMapped.left + memory.size == total
        assert memory.blocks >= least
        for pool, values in zip(pools, expected, strict=True):
            values[memory.blocks :] = 0
            assert (pool[:, : memory.blocks].float().amin((0, 2, 3)) == values[: memory.blocks]).all()
            pool[:, : memory.blocks] = number
            pool[:, memory.scratch] = 9
            values[: memory.blocks] = number
    HostMapped.left = 64 * MIB
