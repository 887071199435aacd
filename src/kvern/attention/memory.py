"""The memory of keys and values.

Layers that have the same place in a block, in different block tables, have the same memory. Where one kind of layer is
narrower than the other, several have parts of a place: of a block of the pool, which is one of the wider layer's,

    wider layer       |  block 0   |  block 1   |  ...        of block_size * width entries, keys before values
    part 0 of 2       | 0    |     | 2    |     |             blocks of half as many
    part 1 of 2       |      | 0   |      | 2   |             the same, from where part 1 begins

so the narrower layer's blocks are the pool's times two, in a tensor that begins where its part does: kernels see the
layout that they know, and block tables tell the numbers (`WindowTables` in `device/rows.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvern.attention.eight_bit import EightBit
from kvern.attention.groups import LayerGroups
from kvern.cpu.large_pages import zeros
from kvern.device.chunked_memory import ChunkedMemory
from kvern.spec.mixers import AttentionSpec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CacheOptions:
    """The KV cache that an attention backend makes.

    layers       the layers that store keys and values, in their order
    blocks       the number of blocks of `block_size` tokens
    dtype        that of the stored numbers; codes of 8 bits have scales, `eight_bit`
    groups       block tables and places of the layers; None: all layers share one table
    sinks        as `Decoder.sinks`
    chunked      has the memory, of `chunked.all_blocks` blocks; None: the cache takes its own
    """

    layers: Sequence[AttentionSpec]
    blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device = CPU
    groups: LayerGroups | None = None
    eight_bit: EightBit | None = None
    sinks: Mapping[int, torch.Tensor] | None = None
    chunked: ChunkedMemory | None = None


def zero_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: a masked key has weight 0, and 0 * NaN would be NaN.

    On the CPU memory is taken when it is used.
    """
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def zero_caches(
    layers: Sequence[AttentionSpec],
    groups: LayerGroups,
    blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    chunked: ChunkedMemory | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The memory of `blocks` blocks, and each layer's `[stored, its blocks, block_size, kv_heads, head_dim]` there.

    The memory is that of places alike in one piece, `[parts, blocks, block_size, kv_heads, head_dim]`: what is to be
    copied with a block. `chunked` has it if it is to come and go.
    """
    owning = [layers[owner] for owner in groups.owners]
    shapes = [(layer.stored, blocks, block_size, layer.kv_heads, layer.head_dim) for layer in owning]
    memory = {}
    for shape in dict.fromkeys(shapes):
        if chunked is not None:
            memory[shape] = chunked.zeros(shapes.count(shape) * shape[0], shape[2:], dtype).flatten()
            continue
        beyond = prod(shape[2:]) if max(groups.parts, default=0) else 0  # where a part's tensor ends
        memory[shape] = zero_cache((shapes.count(shape) * prod(shape) + beyond,), dtype, device)
    firsts = [shapes[:place].count(shape) * prod(shape) for place, shape in enumerate(shapes)]
    caches = []
    for layer, place, part in zip(layers, groups.places, groups.parts, strict=True):
        owner, size = owning[place], prod(shapes[place])
        first = firsts[place] + part * block_size * layer.width
        own = memory[shapes[place]][first : first + size]
        fitting = owner.width // layer.width
        caches.append(own.view(layer.stored, blocks * fitting, block_size, layer.kv_heads, layer.head_dim))
    pools = [numbers[: shapes.count(shape) * prod(shape)].view(-1, *shape[1:]) for shape, numbers in memory.items()]
    return pools, caches
