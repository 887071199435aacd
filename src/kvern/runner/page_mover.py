"""The bytes of pages: copied out of the blocks of a KV cache, and back.

The payload of one head, of all layers of a block table that have as many heads:

    layer | keys, then values (latents: once) | tokens in order | head_dim

It does not depend on how ranks share heads: stores that ranks share have a page for each head, which is the same on
each rank that has the head. A piece has all heads of a rank, in order. States of layers are moved likewise, with a
layer in the place of a head: their tensors, as [1, states, 1, layers, numbers].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from kvern.device.pinned import Pinnable
from kvern.ranks.ranks import Ranks
from kvern.runner.cached_model import StateStack
from kvern.runner.page_groups import STATES, HeadGroup
from kvern.spec.mixers import AttentionSpec
from kvern.tiers.page_memory import HostPages, Piece
from kvern.tiers.pages import HEADER_BYTES
from kvern.tiers.shelf import MOST_WRITING


@dataclass(frozen=True, eq=False)
class _Page:
    """A piece of a group's heads for some blocks: `bytes`, with the payloads [heads, bytes] uint8 behind the header."""

    group: HeadGroup
    blocks: Sequence[int]
    payloads: torch.Tensor
    bytes: memoryview

    def __len__(self) -> int:
        return len(self.bytes)

    def head(self, number: int) -> "_Head":
        """See `Place`."""
        size = self.payloads.shape[1]
        return _Head(self.bytes[HEADER_BYTES + number * size :][:size])


@dataclass(frozen=True, eq=False)
class _Head:
    """The payload of one head."""

    payload: memoryview

    def __len__(self) -> int:
        return HEADER_BYTES + len(self.payload)


class TorchMover(HostPages):
    """A mover that copies with PyTorch, for caches in the host's memory. Its steps' thread does what changes caches."""

    room = MOST_WRITING
    sums = "XXH3"
    cell: int | None = None

    def __init__(self, groups: Sequence[HeadGroup]) -> None:
        self.groups = groups

    def pin(self, store: Pinnable) -> Callable[[], None]:
        """See `PageMover`."""
        return lambda: None

    @torch.inference_mode()
    def pack(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[_Page]:
        """See `PageMover`."""
        return [self._packed(group, blocks) for blocks in tables]

    def _packed(self, group: HeadGroup, blocks: Sequence[int]) -> _Page:
        page = _page(group, blocks)
        payloads = page.payloads
        chosen = torch.tensor(blocks, device=group.caches[0].device)
        first = 0
        for cache in group.caches:
            numbers = cache.view(torch.uint8).index_select(1, chosen).permute(3, 0, 1, 2, 4).flatten(1)
            payloads[:, first : first + numbers.shape[1]] = numbers
            first += numbers.shape[1]
        return page

    def places(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[_Page]:
        """See `PageMover`."""
        return [_page(group, blocks) for blocks in tables]

    @torch.inference_mode()
    def settle(self, places: Sequence[_Page], has_others: bool) -> None:
        """See `PageMover`."""
        for page in places:
            self._unpack(page.group, page.blocks, page.payloads)

    def _unpack(self, group: HeadGroup, blocks: Sequence[int], payloads: torch.Tensor) -> None:
        device = group.caches[0].device
        wanted = [place for place, block in enumerate(blocks) if block >= 0]
        sources = torch.tensor(wanted)
        targets = torch.tensor([blocks[place] for place in wanted], device=device)
        first = 0
        for cache in group.caches:
            numbers = cache.view(torch.uint8)
            stored, _, size, _, width = numbers.shape
            count = stored * len(blocks) * size * width
            found = payloads[:, first : first + count].view(len(payloads), stored, len(blocks), size, width)
            numbers.index_copy_(1, targets, found.permute(1, 2, 3, 0, 4).index_select(1, sources).to(device))
            first += count

    def buffer(self, piece: Piece) -> memoryview:
        """See `PageMemory`."""
        page: _Page | _Head = piece.at
        return page.bytes if isinstance(page, _Page) else memoryview(bytearray(len(page)))

    def payload(self, piece: Piece) -> memoryview:
        """See `HostPages`."""
        page: _Page | _Head = piece.at
        return page.bytes[HEADER_BYTES:] if isinstance(page, _Page) else page.payload


def _page(group: HeadGroup, blocks: Sequence[int]) -> _Page:
    """Memory for a piece, which may have anything in it but a header."""
    heads = len(group.kinds)
    memory = torch.empty(HEADER_BYTES + heads * len(blocks) * group.block_bytes, dtype=torch.uint8)
    memory[:HEADER_BYTES] = 0  # memory that is used again may have a page that nobody has brought
    return _Page(group, blocks, memory[HEADER_BYTES:].view(heads, -1), memory.numpy().data)


def state_groups(layers: Sequence[int], stacks: Sequence[StateStack], ranks: Ranks) -> list[HeadGroup]:
    """The states of one rank's share of layers, of which each stands in the place of a head.

    `layers`: the places in the whole model of those that have states.
    """
    found = []
    for stack in stacks:
        caches = [tensor.flatten(2).transpose(0, 1)[None, :, None] for tensor in stack.tensors]
        shapes = [(*tensor.shape[2:], str(tensor.dtype)) for tensor in stack.tensors]
        kinds = [repr(("state", ranks.rank, ranks.size, layers[place], shapes)).encode() for place in stack.layers]
        width = sum(cache.shape[-1] * cache.element_size() for cache in caches)
        found.append(HeadGroup(STATES, caches, [blake2b(kind, digest_size=32).digest() for kind in kinds], True, width))
    return found


def head_groups(
    caches: Sequence[torch.Tensor],
    attentions: Sequence[AttentionSpec],
    layers: Sequence[int],
    tables: Sequence[int],
    ranks: Ranks,
    scales: Sequence[torch.Tensor] | None,
    draft: str = "",
) -> list[HeadGroup]:
    """The groups of heads in the caches of one rank.

    `attentions`: of the whole model; `layers`: their places in it; `tables`: their block tables; `scales`: of a cache
    in 8 bits, [2, the rank's heads]; `draft`: the draft model or head whose layers they are. Layers without a window
    come first.
    """
    members: dict[tuple[int, int], list[int]] = {}
    for place, attention in enumerate(attentions):
        members.setdefault((tables[place], attention.kv_heads), []).append(place)
    found = []
    for (table, whole), places in sorted(members.items(), key=lambda member: member[0][0]):
        own = [caches[place] for place in places]
        count = own[0].shape[3]
        copies = max(1, count * ranks.size // whole)
        first = ranks.rank // copies * count
        shape = [(layers[place], *cache.shape[::2], str(cache.dtype)) for place, cache in zip(places, own, strict=True)]
        kinds = []
        for head in range(count):
            kind = (repr(("head", first + head, whole, table, shape)) + draft).encode()
            for place in places:
                kind += b"" if scales is None else scales[place][:, head].cpu().numpy().tobytes()
            kinds.append(blake2b(kind, digest_size=32).digest())
        widths = [cache.shape[0] * cache.shape[2] * cache.shape[4] * cache.element_size() for cache in own]
        found.append(HeadGroup(table, own, kinds, ranks.rank % copies == 0, sum(widths), bool(draft)))
    return found
