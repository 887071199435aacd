"""The interface of attention backends, which own the KV cache and attend to it in every layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from kvern.device.input_batch import InputBatch
from kvern.layers.step_context import Attend, Context, PagedAttend
from kvern.request.step import BlockCopy
from kvern.spec.mixers import AttentionSpec

if TYPE_CHECKING:
    from kvern.attention.expanded import ExpandedAttention
    from kvern.device.device_batch import Queries
    from kvern.kernels.attention_arguments import CachedLayer

__all__ = [
    "Attend",
    "AttentionBackend",
    "AttentionKernels",
    "OwnKernels",
    "PagedAttend",
    "copy_cache_blocks",
    "sinks_of",
]

Batch = TypeVar("Batch", bound=InputBatch, contravariant=True)


class AttentionBackend(Protocol[Batch]):
    """Keeps keys and values in blocks, layout [2, blocks, block_size, kv_heads, head_dim] per layer.

    Of a layer whose values are the first entries of its keys (`AttentionSpec.value_dim`) it is [1, ...]. Layers of
    different block tables may have the same (`groups.py`).
    """

    caches: list[torch.Tensor]
    """The cache of each layer."""

    pools: list[torch.Tensor]
    """The memory behind them, [parts, blocks, ...] each: all that belongs to a block of the pool."""

    captures: bool
    """A planned step of decodes may be captured in a CUDA graph: it reads what it needs from the batch's tensors."""

    prefix_members: int
    """The number of requests that share a tile of a common prefix; 0: each request reads its prefix."""

    deterministic: bool
    """A token's result depends on nothing else in the step."""

    reads_device_starts: bool
    """A step may begin where only the device knows: what the host says of `starts` are then bounds."""

    tile_sizes: frozenset[int]
    """Queries of the tiles that few tokens of each request are cut into, where the device alone knows how many."""

    def plan(self, batch: Batch) -> PagedAttend:
        """Prepare one step. The result writes a layer's keys and values to the cache, then attends causally."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the heads of blocks in every layer, in order."""


class PlannedAttention(Protocol):
    """Attention of one layer, for the T tokens of the `Queries` it was planned for."""

    def __call__(self, layer: int, query: torch.Tensor, cached: "CachedLayer", out: torch.Tensor) -> None:
        """`query [T, heads, head_dim]`, whose rows may have gaps, over the layer's cache; `out [T, heads, head_dim]`.

        Of a layer with `value_dim` queries have no gaps, and `out` is as wide. Only `TritonKernels` and PyTorch know
        scales and sinks.
        """


class AttentionKernels(Protocol):
    """Causal attention over the cache above by one library. A step is planned once, then run for each layer."""

    name: str
    captures: bool
    """Plans of `decode` may be captured in a CUDA graph."""

    def decode(self, queries: "Queries") -> PlannedAttention:
        """Plan for requests of one token each."""

    def prefill(self, queries: "Queries") -> PlannedAttention:
        """Plan for requests of any number of tokens each."""


class OwnKernels(AttentionKernels, Protocol):
    """Kernels of kvern's, which know all that the model's layers have."""

    max_requests: int
    """The most requests that `decode` is planned for."""

    prefix_members: int
    tile_sizes: frozenset[int]
    """The tile sizes of an `AttentionBackend`."""

    @property
    def expanding(self) -> "ExpandedAttention | None":
        """The kernels that make keys and values of latents for long runs."""


def sinks_of(layers: Sequence[AttentionSpec], sinks: Mapping[int, torch.Tensor] | None) -> list[torch.Tensor | None]:
    """For each layer its sinks [heads] float32, of those that `Decoder.sinks` has by index; None: it has none."""
    given = sinks or {}
    return [given[index] if layer.sinks else None for index, layer in enumerate(layers)]


def contexts_of(block_table: torch.Tensor, requests: torch.Tensor, block_size: int) -> list[Context]:
    """The context of each request.

    `requests` [3, R] int64: rows of `block_table` [slots, blocks] int32, first positions, numbers of tokens.
    """
    found, token = [], 0
    for slot, start, count in requests.t().tolist():
        blocks = block_table[slot, : -(-(start + count) // block_size)].long()
        places = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[: start + count]
        found.append(Context(slice(token, token + count), places))
        token += count
    return found


def copy_cache_blocks(caches: Sequence[torch.Tensor], copies: Sequence[BlockCopy]) -> None:
    """Copy whole blocks in caches [parts, blocks, ...], no two the same, all sources read before a target is written.

    A target's tail then holds the source's, which its owner overwrites before reading it.
    """
    if not copies:
        return
    from kvern.device.transfer import upload

    blocks = [copy.source for copy in copies] + [copy.target for copy in copies]
    sources, targets = upload(blocks, torch.int64, caches[0].device).view(2, -1)
    for cache in caches:
        numbers = cache.view(torch.uint8) if cache.itemsize == 1 else cache  # PyTorch copies no e4m3 by index
        numbers.index_copy_(1, targets, numbers.index_select(1, sources))
