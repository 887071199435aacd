"""Pages packed and unpacked by a kernel: the bytes that the mover of CPUs makes, and sums that notice what changes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvern.kernels.page_copy import FIRST, SECOND, STEP, PageTable, page_copy
from kvern.runner.device_page_mover import rows_of_heads
from kvern.runner.page_groups import HeadGroup
from kvern.runner.page_mover import TorchMover

BLOCKS, BLOCK = 9, 4
CACHES = {
    "dense": [(2, 3, 8, torch.bfloat16)] * 3,
    "latents": [(1, 1, 36, torch.bfloat16)] * 2,
    "8 bits": [(2, 2, 24, torch.int8)] * 2,
    "odd": [(2, 2, 5, torch.int8)],
    "widths": [(2, 2, 8, torch.bfloat16), (2, 2, 16, torch.bfloat16), (1, 2, 8, torch.bfloat16)],
    "states": [(1, 1, 3000, torch.float32)],
    "states of layers": [(1, 3, 3000, torch.float32), (1, 3, 12, torch.bfloat16)],
    "parts of places": [(2, 2, 8, torch.bfloat16)] * 2,
}


def summed(payload: bytes, word: int) -> int:
    """The definition, in Python's integers."""
    mask = (1 << 64) - 1
    total = 0
    for index in range(len(payload) // word):
        mixed = int.from_bytes(payload[index * word :][:word], "little", signed=word < 8 and word > 1)
        mixed = (mixed + (index + 1) * STEP) & mask
        mixed = ((mixed ^ mixed >> 30) * FIRST) & mask
        mixed = ((mixed ^ mixed >> 27) * SECOND) & mask
        total += mixed ^ mixed >> 31
    return total & mask


def group_of(kind: str, device: torch.device) -> HeadGroup:
    size = 1 if kind.startswith("states") else BLOCK
    caches = [
        torch.randint(-128, 128, (stored, BLOCKS, size, heads, width * dtype.itemsize), dtype=torch.int8)
        .view(dtype)
        .to(device)
        for stored, heads, width, dtype in CACHES[kind]
    ]
    if kind == "states of layers":  # which stand one after another
        caches = [cache.transpose(1, 3).contiguous().transpose(1, 3) for cache in caches]
    if kind == "parts of places":  # whose blocks are a part of the pool's
        caches = [torch.cat((cache, cache), 2).view(2, -1, *cache.shape[2:])[:, ::2] for cache in caches]
    heads = caches[0].shape[3]
    width = sum(cache.shape[0] * size * cache.shape[4] * cache.element_size() for cache in caches)
    return HeadGroup(0, caches, [bytes([head]) for head in range(heads)], True, width)


def packed(group: HeadGroup, tables: Sequence[Sequence[int]]) -> list[bytes]:
    """What the mover of CPUs packs: payloads by table and head."""
    on_host = HeadGroup(0, [cache.cpu() for cache in group.caches], group.kinds, True, group.block_bytes)
    return [head.numpy().tobytes() for page in TorchMover([on_host]).pack(on_host, tables) for head in page.payloads]


def moved(
    group: HeadGroup, memory: torch.Tensor, tables: Sequence[Sequence[int]], packs: bool
) -> tuple[int, list[int], int]:
    """Bytes between pages, their sums, and the bytes of a word."""
    heads, device = len(group.kinds), memory.device
    rows = rows_of_heads(group.caches, len(tables[0]))
    word = rows[0].dtype.itemsize
    size = -(-len(tables[0]) * group.block_bytes // 16) * 16
    count = len(tables) * heads
    rows_of_pages = [[place * heads * size // word, 0, *table] for place, table in enumerate(tables)]
    table = PageTable(torch.tensor(rows_of_pages, dtype=torch.int64, device=device), heads, size // word)
    sums = torch.zeros(count, dtype=torch.int64, device=device)
    page_copy(memory, rows, table, sums, packs)
    return size, [total % (1 << 64) for total in sums.tolist()], word


@pytest.mark.parametrize("kind", CACHES)
def test_pages_are_those_of_the_cpu_and_come_back(kind: str, device: torch.device) -> None:
    torch.manual_seed(len(kind))
    group = group_of(kind, device)
    is_state = kind.startswith("states")
    tables = [[2], [8]] if is_state else [[2, 7, 1], [8, 3, 4]]
    memory = torch.full((1 << 18,), 85, dtype=torch.uint8, device=device)
    size, sums, word = moved(group, memory, tables, packs=True)
    expected = packed(group, tables)
    for place, payload in enumerate(expected):
        assert bytes(memory[place * size :][: len(payload)].cpu().numpy()) == payload
    assert sums == [summed(payload, word) for payload in expected]
    end = (len(expected) - 1) * size + len(expected[-1])
    assert bool((memory[end:] == 85).all()), "more is written than the pages have"

    others = group_of(kind, device)
    before = [cache.clone() for cache in others.caches]
    targets = [[5], [0]] if is_state else [[5, -1, 0], [6, 2, -1]]
    _, again, _ = moved(others, memory, targets, packs=False)
    assert again == sums
    for cache, old, source in zip(others.caches, before, group.caches, strict=True):
        wanted = old.clone().view(torch.int8)
        for table, target in zip(tables, targets, strict=True):
            for block, to in zip(table, target, strict=True):
                if to >= 0:
                    wanted[:, to] = source.view(torch.int8)[:, block]
        assert torch.equal(cache.view(torch.int8), wanted)


def test_any_flipped_bit_and_any_two_words_in_other_places_change_the_sum() -> None:
    dice = np.random.default_rng(1)
    payload = dice.bytes(512)
    right = summed(payload, 8)
    for bit in range(8 * len(payload)):
        changed = bytearray(payload)
        changed[bit // 8] ^= 1 << bit % 8
        assert summed(bytes(changed), 8) != right
    for _ in range(50):
        first, second = dice.choice(64, 2, replace=False)
        words = np.frombuffer(payload, np.uint64).copy()
        words[[first, second]] = words[[second, first]]
        assert summed(words.tobytes(), 8) != right
