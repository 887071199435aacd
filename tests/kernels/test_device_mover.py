"""The mover of GPUs beneath a shelf: what is saved comes back, from each kind of store, whatever the heads' sizes."""

from typing import Any

import pytest
import torch

from kvern.cache.messages import PageLoad, PageSave
from kvern.runner import device_page_mover
from kvern.runner.device_page_mover import DeviceMover
from kvern.runner.page_groups import DRAFTS, STATES, HeadGroup
from kvern.runner.tier import Tier
from kvern.tiers.host import HostStore
from kvern.tiers.pages import HEADER_BYTES
from kvern.tiers.shelf import Shelf
from kvern.tiers.store import Store
from tests.support.host_cuda import have_cuda_on_the_host
from tests.support.served import eventually
from tests.support.stores import MemoryStore

BLOCKS, BLOCK, PAGE = 12, 16, 4
SHAPES = {
    "several heads": [(0, 3, 8, torch.bfloat16)],
    "one head": [(0, 1, 8, torch.bfloat16)],
    "a draft and states": [(0, 2, 8, torch.bfloat16), (DRAFTS, 2, 4, torch.bfloat16), (STATES, 3, 7, torch.uint8)],
}


def group_of(table: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> HeadGroup:
    size = 1 if table == STATES else BLOCK
    shape = (2, BLOCKS, size, heads, width * dtype.itemsize)
    caches = [torch.randint(-128, 128, shape, dtype=torch.int8).view(dtype).to(device) for _ in range(2)]
    kinds = [bytes([table % 256, head]) + bytes(30) for head in range(heads)]
    return HeadGroup(table, caches, kinds, True, 2 * 2 * size * width * dtype.itemsize, table == DRAFTS)


class Moved:
    """Groups of heads with a tier, of which pages are saved from some blocks and loaded to others."""

    def __init__(self, shape: str, device: torch.device, ring: int = 1 << 20, **stores: Store) -> None:
        torch.manual_seed(len(shape))
        self.groups = [group_of(*each, device) for each in SHAPES[shape]]
        self.mover = DeviceMover(self.groups, [1 if each.table == STATES else PAGE for each in self.groups], ring)
        for store in stores.values():
            if isinstance(store, HostStore):
                self.mover.pin(store)
                eventually(lambda store=store: store._usable == store._count)  # type: ignore[misc]
        self.tier = Tier(self.mover, Shelf(stores, memory=self.mover), bytes(16), BLOCK)
        self.saved = [[cache.clone() for cache in group.caches] for group in self.groups]

    @property
    def has(self) -> set[int]:
        return {group.table for group in self.groups}

    def save(self, key: int, blocks: list[int]) -> None:
        draft = blocks if DRAFTS in self.has else []
        state = blocks[0] if STATES in self.has else -1
        self.tier.save([PageSave(bytes([key]) * 32, [blocks], state, draft)])
        self.tier.put()
        eventually(lambda: self.tier.shelf.is_quiet)

    def load(self, *pages: tuple[int, list[int]]) -> int:
        """The number of leading pages that came."""
        loads = []
        for key, blocks in pages:
            draft = blocks if DRAFTS in self.has else []
            state = blocks[0] if STATES in self.has else -1
            loads.append(PageLoad(1, bytes([key]) * 32, [blocks], state, 60.0, draft))
        self.tier.load(loads)
        found: list[tuple[int, int]] = []

        def has_ended() -> bool:
            found.extend(self.tier.finished())
            return bool(found)

        eventually(has_ended)
        return found[0][1]

    def check(self, sources: list[int], targets: list[int]) -> None:
        """The blocks have what others had when these were saved."""
        for group, saved in zip(self.groups, self.saved, strict=True):
            count = 1 if group.table == STATES else len(targets)
            for cache, old in zip(group.caches, saved, strict=True):
                found, wanted = (each.view(torch.int8) for each in (cache, old))
                assert torch.equal(found[:, targets[:count]], wanted[:, sources[:count]])

    def forget(self) -> None:
        for group in self.groups:
            for cache in group.caches:
                cache.view(torch.int8).fill_(85)

    def restore(self) -> None:
        for group, saved in zip(self.groups, self.saved, strict=True):
            for cache, old in zip(group.caches, saved, strict=True):
                cache.copy_(old)


@pytest.fixture(autouse=True)
def _cuda(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAGE_BYTES", "STEPS_STAGE_BYTES"):
        monkeypatch.setattr(device_page_mover, name, 40 << 10)  # some pages at once
    if device.type == "cpu":
        have_cuda_on_the_host(monkeypatch)


def host() -> HostStore:
    return HostStore(4 << 20, None, device_page_mover.SMALLEST_CELL)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", [("host",), ("far",), ("host", "far"), ("far", "host")])
def test_what_is_saved_comes_back(shape: str, kinds: tuple[str, ...], device: torch.device) -> None:
    stores: dict[str, Any] = {kind: host() if kind == "host" else MemoryStore() for kind in kinds}
    moved = Moved(shape, device, **stores)
    moved.save(1, [1, 2, 3, 4])
    moved.save(2, [5, 6, 7, 8])
    moved.forget()
    assert moved.load((1, [8, 9, 10, 11]), (2, [3, 2, 1, 0])) == 2
    moved.check([1, 2, 3, 4], [8, 9, 10, 11])
    moved.check([5, 6, 7, 8], [3, 2, 1, 0])
    heads = sum(len(group.kinds) for group in moved.groups)
    counts = {kind: store.pages if kind == "host" else len(store.pages) for kind, store in stores.items()}
    assert counts == {kind: 2 * (len(moved.groups) if kind == "host" else heads) for kind in kinds}
    assert {found.corrupt_pages for found in moved.tier.figures().values()} == {0}


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_of_heads_become_one_in_the_hosts_memory(shape: str, device: torch.device) -> None:
    """A store that ranks share has what another engine wrote, and the memory of this one gets it in passing."""
    near, far = host(), MemoryStore()
    moved = Moved(shape, device, near=near, far=far)
    moved.save(1, [1, 2, 3, 4])
    kept = near.pages
    near.drop([*near._pages])
    moved.forget()
    assert moved.load((1, [4, 5, 6, 7])) == 1
    moved.check([1, 2, 3, 4], [4, 5, 6, 7])
    eventually(lambda: near.pages == kept)
    far.pages.clear()
    moved.forget()
    assert moved.load((1, [8, 9, 10, 11])) == 1
    moved.check([1, 2, 3, 4], [8, 9, 10, 11])
    assert moved.tier.figures()["near"].corrupt_pages == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["host", "far"])
def test_any_flipped_bit_is_a_miss(shape: str, kind: str, device: torch.device) -> None:
    store: Any = host() if kind == "host" else MemoryStore()
    moved = Moved(shape, device, store=store)
    moved.save(1, [1, 2, 3, 4])
    for name in [*(store._pages if kind == "host" else store.pages)]:
        size = store._pages[name].length if kind == "host" else len(store.pages[name])
        for place in (2, HEADER_BYTES, HEADER_BYTES + (size - HEADER_BYTES) // 2, size - 5):  # 4 may be padding
            if kind == "host":
                [lent] = store.lend([name], [size])
                lent.parts[0][place] ^= 4
                store.give_back([lent])
            else:
                page = bytearray(store.pages[name])
                page[place] ^= 4
                store.pages[name] = bytes(page)
            assert moved.load((1, [8, 9, 10, 11])) == 0
            moved.restore()
            moved.save(1, [1, 2, 3, 4])
    assert moved.tier.figures()["store"].corrupt_pages > 0
    assert moved.load((1, [8, 9, 10, 11])) == 1


def test_a_step_is_saved_before_the_one_before_it_has_reached_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring for two steps takes the pages of two, to the last."""
    page = PAGE * group_of(0, 3, 8, torch.bfloat16, torch.device("cpu")).block_bytes * 3
    moved = Moved("several heads", device, ring=4 * page, store=host())
    waiting: list[Any] = []
    monkeypatch.setattr(moved.tier.shelf._sealing, "submit", lambda call, _: waiting.append(call))
    for key in (1, 3):
        moved.tier.save([PageSave(bytes([key + more]) * 32, [[0, 1, 2, 3]]) for more in range(2)])
        moved.tier.put()
    moved.tier.save([PageSave(bytes([5]) * 32, [[0, 1, 2, 3]])])
    moved.tier.put()
    for call in waiting:
        call()
    eventually(lambda: moved.tier.shelf.is_quiet)
    [found] = moved.tier.figures().values()
    assert (found.stored_tokens, found.skipped_tokens) == (4 * PAGE * BLOCK, PAGE * BLOCK)
