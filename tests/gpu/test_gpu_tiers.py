"""Tiers of a GPU's cache: pages packed, copied beside steps and checked, and engines that load what they saved.

Run with `pytest -m gpu`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.runner.device_page_mover import DeviceMover, Ring
from kvern.runner.page_groups import HeadGroup
from kvern.runner.page_mover import TorchMover
from kvern.tiers.host import HostStore
from kvern.tiers.page_memory import Piece
from kvern.tiers.pages import HEADER_BYTES
from kvern.tiers.shelf import Shelf
from tests.support.families import make_checkpoint
from tests.support.served import eventually
from tests.support.tiers import check_hits, figures, tier_of, trust

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

BLOCKS, PAGE = 64, 4
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "kv_cache_tokens": 1024,
    "max_batch_requests": 4,
    "gpu_memory_share": 0.1,
}
PROMPT = [3 + place * place % 60 for place in range(200)]


def make_group(heads: int = 4, width: int = 64) -> HeadGroup:
    caches = [torch.randn(2, BLOCKS, 16, heads, width, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    return HeadGroup(0, caches, [bytes([head]) for head in range(heads)], True, 3 * 2 * 16 * width * 2)


def piece_of(page: int, at: Any) -> Piece:
    return Piece(bytes([page]) * 32, at, 64, head_count=4)


@pytest.fixture
def group() -> HeadGroup:
    torch.manual_seed(1)
    return make_group()


@pytest.fixture
def mover(group: HeadGroup) -> DeviceMover:
    return DeviceMover([group], [PAGE], 8 << 20)


@pytest.fixture
def shelf(mover: DeviceMover) -> Shelf:
    store = HostStore(64 << 20, None, mover.cell)
    mover.pin(store)
    eventually(lambda: store._usable == store._count)
    return Shelf({"host": store}, lambda: 0.0, mover)


def save(shelf: Shelf, mover: DeviceMover, group: HeadGroup, tables: list[list[int]]) -> None:
    pages = mover.pack(group, tables)
    assert len(pages) == len(tables)
    shelf.save([piece_of(page, at) for page, at in enumerate(pages)])


def load(shelf: Shelf, mover: DeviceMover, group: HeadGroup, tables: list[list[int]]) -> list[tuple[int, int]]:
    pages = mover.places(group, tables)
    wanted = [[piece_of(page, at)] for page, at in enumerate(pages)]
    shelf.load(1, wanted)
    found: list[tuple[int, int]] = []

    def has_ended() -> bool:
        found.extend(shelf.ended())
        return bool(found)

    eventually(has_ended)
    mover.settle([piece.at for of in wanted[: found[0][1]] for piece in of], found[0][1] < len(wanted))
    return found


def test_pages_are_those_of_the_cpu_and_come_back_to_other_blocks(
    shelf: Shelf, mover: DeviceMover, group: HeadGroup
) -> None:
    tables = [[1, 5, 9, 2], [7, 3, 60, 61]]
    on_host = HeadGroup(0, [cache.cpu() for cache in group.caches], group.kinds, True, group.block_bytes)
    expected = TorchMover([on_host]).pack(on_host, tables)
    before = [cache.clone() for cache in group.caches]
    save(shelf, mover, group, tables)
    for cache in group.caches:  # what was packed may change
        cache.zero_()
    eventually(lambda: shelf.is_quiet)
    store = shelf.stores[0].store
    for page, right in enumerate(expected):
        place = memoryview(bytearray(len(right)))
        assert store.get([bytes([page]) * 32], [place]) == [True]
        assert place[HEADER_BYTES:] == right.bytes[HEADER_BYTES:]
    targets = [[10, 11, -1, 13], [14, 15, 16, 17]]
    assert load(shelf, mover, group, targets) == [(1, 2)]
    for cache, old in zip(group.caches, before, strict=True):
        wanted = torch.zeros_like(cache)
        for table, target in zip(tables, targets, strict=True):
            for block, to in zip(table, target, strict=True):
                if to >= 0:
                    wanted[:, to] = old[:, block]
        assert torch.equal(cache, wanted)


def test_a_flipped_bit_is_a_miss(shelf: Shelf, mover: DeviceMover, group: HeadGroup) -> None:
    save(shelf, mover, group, [[1, 2, 3, 4], [5, 6, 7, 8]])
    eventually(lambda: shelf.is_quiet)
    store: Any = shelf.stores[0].store
    size = HEADER_BYTES + 4 * PAGE * group.block_bytes
    for place in (3, 40, HEADER_BYTES + 1000, size - 1):
        [lent] = store.lend([bytes([1]) * 32], [size])
        lent.parts[0][place] ^= 16
        store.give_back([lent])
        assert load(shelf, mover, group, [[20, 21, 22, 23], [24, 25, 26, 27]]) == [(1, 1)]
        save(shelf, mover, group, [[1, 2, 3, 4], [5, 6, 7, 8]])
        eventually(lambda: shelf.is_quiet)
    assert shelf.figures()["host"].corrupt_pages == 4
    assert load(shelf, mover, group, [[20, 21, 22, 23], [24, 25, 26, 27]]) == [(1, 2)]


def test_what_comes_too_late_is_not_behind_what_later_steps_write(
    shelf: Shelf, mover: DeviceMover, group: HeadGroup
) -> None:
    """The stream of the steps waits for pages that were on their way when their load ended."""
    tables = [[place * PAGE + number for number in range(PAGE)] for place in range(BLOCKS // PAGE)]
    save(shelf, mover, group, tables)
    eventually(lambda: shelf.is_quiet)
    for _ in range(20):
        pages = mover.places(group, tables)
        shelf.load(2, [[piece_of(page, at)] for page, at in enumerate(pages)])
        shelf.abandon()
        mover.settle([], has_others=True)
        for cache in group.caches:
            cache.fill_(7.0)
        eventually(lambda: not shelf.ended() and not shelf.stores[0].reading_bytes)
        torch.cuda.synchronize()
        assert all(bool((cache == 7.0).all()) for cache in group.caches)


def is_pinned(llm: LLM) -> None:
    """Wait until an engine's host memory can be used."""
    store: Any = tier_of(llm).shelf.stores[0].store
    eventually(lambda: not isinstance(store, HostStore) or store._usable == store._count)


def test_a_ring_without_room_saves_nothing(group: HeadGroup) -> None:
    mover = DeviceMover([group], [PAGE], 1)
    assert mover.pack(group, [[0, 1, 2, 3]]) and not mover.pack(group, [[0, 1, 2, 3]])


def test_the_regions_of_a_ring_never_overlap() -> None:
    dice = random.Random(1)
    ring, used = Ring(1000), dict[int, int]()
    for _ in range(5000):
        count = dice.randrange(1, 400)
        start = ring.take(count)
        if start is not None:
            assert start + count <= 1000
            assert all(start + count <= other or other + size <= start for other, size in used.items())
            used[start] = count
        while used and (start is None or dice.random() < 0.4):
            ring.give_back(freed := dice.choice([*used]))
            del used[freed]
            start = 0
    for start in used:
        ring.give_back(start)
    assert ring.take(1000) == 0


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("deepseek_v3", {"dtype": "float32"}),
        ("gemma3", {"dtype": "float32"}),
        ("qwen3_5", {"dtype": "float32"}),
    ],
)
def test_a_hit_gives_the_bits_of_the_prefix_tree(
    family: str, options: dict[str, Any], store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvern.engine.factory.STATES_APART", 1)  # short prompts leave states
    folder = make_checkpoint(family, tmp_path / "model")
    tier = "host:64MB" if store == "host" else f"disk:{tmp_path / 'pages'}:1GB"
    with LLM(str(folder), kv_tier=(tier,), **OPTIONS | options) as llm:
        is_pinned(llm)
        assert check_hits(llm, PROMPT) == 192


def test_answers_beside_a_tier_are_those_without(tmp_path: Path) -> None:
    """Conversations that evict each other, with steps on their way while pages are packed and loaded."""
    folder = make_checkpoint("llama", tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = OPTIONS | {"dtype": "float32"}
    talks = [[3 + (place * (talk + 7)) % 50 for place in range(180)] for talk in range(12)]
    answers: list[list[list[int]]] = []
    for tier in ((), ("host:64MB",)):
        with LLM(str(folder), kv_tier=tier, **options) as llm:
            answers.append([])
            if tier:
                is_pinned(llm)
                trust(llm)
            for turn in range(3):
                prompts = [[*talk, *range(5, 5 + 16 * turn)] for talk in talks]
                outputs = llm.generate(prompts, params)
                answers[-1].append([token for output in outputs for token in output.outputs[0].token_ids])
            if tier:
                found = figures(llm)
                assert found.hit_tokens and not found.corrupt_pages and not found.failures
    assert answers[0] == answers[1]
