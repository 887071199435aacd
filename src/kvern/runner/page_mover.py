"""The bytes of pages: copied out of the blocks of a KV cache, and back, one page for each KV head.

The payload of a page of one head, of all layers of a block table that have as many heads:

    layer | keys, then values (latents: once) | tokens in order | head_dim

It does not depend on how ranks share heads: the page of a head is the same on each rank that has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch

from kvern.ranks.ranks import Ranks
from kvern.spec.mixers import AttentionSpec
from kvern.tiers.pages import HEADER_BYTES


@dataclass(frozen=True)
class HeadGroup:
    """Layers of one block table that have as many KV heads, and of these the heads of one rank.

    caches       of each layer [stored, blocks, block_size, heads, head_dim], of any dtype
    kinds        for each head what a page of it is, as bytes for its name
    is_own       False: a rank before this one has the same heads, and saves their pages for all
    block_bytes  the bytes of a head in a block
    """

    table: int
    caches: Sequence[torch.Tensor]
    kinds: Sequence[bytes]
    is_own: bool
    block_bytes: int


class PageMover(Protocol):
    """Moves pages between the blocks of a device and host memory, in the order of the steps that the thread starts."""

    groups: Sequence[HeadGroup]

    def pack(self, group: HeadGroup, blocks: Sequence[int]) -> torch.Tensor:
        """Returns the pages of all heads, [heads, HEADER_BYTES + payload] uint8 on the host, without headers.

        The blocks may change when this has returned.
        """
        ...

    def unpack(self, group: HeadGroup, blocks: Sequence[int], pages: torch.Tensor) -> None:
        """Writes pages that `pack` made to blocks; those below 0 are left out. Later steps read what is written."""
        ...


class TorchMover:
    """A mover that copies with PyTorch, and waits for what it copies from a GPU."""

    def __init__(self, groups: Sequence[HeadGroup]) -> None:
        self.groups = groups

    @torch.inference_mode()
    def pack(self, group: HeadGroup, blocks: Sequence[int]) -> torch.Tensor:
        """See `PageMover`."""
        pages = torch.empty(len(group.kinds), HEADER_BYTES + len(blocks) * group.block_bytes, dtype=torch.uint8)
        chosen = torch.tensor(blocks, device=group.caches[0].device)
        first = HEADER_BYTES
        for cache in group.caches:
            numbers = cache.view(torch.uint8).index_select(1, chosen).permute(3, 0, 1, 2, 4).flatten(1)
            pages[:, first : first + numbers.shape[1]] = numbers
            first += numbers.shape[1]
        return pages

    @torch.inference_mode()
    def unpack(self, group: HeadGroup, blocks: Sequence[int], pages: torch.Tensor) -> None:
        """See `PageMover`."""
        device = group.caches[0].device
        wanted = [place for place, block in enumerate(blocks) if block >= 0]
        sources = torch.tensor(wanted)
        targets = torch.tensor([blocks[place] for place in wanted], device=device)
        first = HEADER_BYTES
        for cache in group.caches:
            numbers = cache.view(torch.uint8)
            stored, _, size, _, width = numbers.shape
            count = stored * len(blocks) * size * width
            found = pages[:, first : first + count].view(len(pages), stored, len(blocks), size, width)
            numbers.index_copy_(1, targets, found.permute(1, 2, 3, 0, 4).index_select(1, sources).to(device))
            first += count


def head_groups(
    caches: Sequence[torch.Tensor],
    attentions: Sequence[AttentionSpec],
    layers: Sequence[int],
    tables: Sequence[int],
    ranks: Ranks,
    scales: Sequence[torch.Tensor] | None,
) -> list[HeadGroup]:
    """The groups of heads in the caches of one rank.

    `attentions`: of the whole model; `layers`: their places in it; `tables`: their block tables; `scales`: of a cache
    in 8 bits, [2, the rank's heads].
    """
    members: dict[tuple[int, int], list[int]] = {}
    for place, attention in enumerate(attentions):
        members.setdefault((tables[place], attention.kv_heads), []).append(place)
    found = []
    for (table, whole), places in members.items():
        own = [caches[place] for place in places]
        count = own[0].shape[3]
        copies = max(1, count * ranks.size // whole)
        first = ranks.rank // copies * count
        shape = [(layers[place], *cache.shape[::2], str(cache.dtype)) for place, cache in zip(places, own, strict=True)]
        kinds = []
        for head in range(count):
            kind = repr(("head", first + head, whole, table, shape)).encode()
            for place in places:
                kind += b"" if scales is None else scales[place][:, head].cpu().numpy().tobytes()
            kinds.append(blake2b(kind, digest_size=32).digest())
        widths = [cache.shape[0] * cache.shape[2] * cache.shape[4] * cache.element_size() for cache in own]
        found.append(HeadGroup(table, own, kinds, ranks.rank % copies == 0, sum(widths)))
    return found
