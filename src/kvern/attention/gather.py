"""The keys and values that PyTorch's attention gathers for requests that it computes together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Gather:
    """B requests with `queries` tokens each, over the same number of gathered keys.

    tokens  index of their tokens in the batch: a slice, or [B * queries] int64
    blocks  [B * blocks per request] int64
    run     the first key's place in the cache where one request's blocks follow each other: they are read in place
    shared  [S] int64, blocks before those that all B requests have in common; None: none
    mask    [B, 1, queries, keys] float, added to the scores; None: nothing is hidden, or `causal` says it all
    behind  [N] int64, gathered keys behind the last of their request; None: there are none
    """

    requests: int
    queries: int
    tokens: slice | torch.Tensor
    blocks: torch.Tensor
    run: int | None
    keys: int
    mask: torch.Tensor | None
    causal: bool
    shared: torch.Tensor | None = None
    behind: torch.Tensor | None = None


def consecutive(blocks: list[int], block_size: int) -> int | None:
    """The place of the first key of blocks that follow each other."""
    first = blocks[0]
    return first * block_size if blocks == list(range(first, first + len(blocks))) else None


def keys_behind(lengths: Sequence[int], block_size: int) -> torch.Tensor:
    """The places without a key, where each request's keys take as many places as the longest request's."""
    keys = max(lengths)
    places = keys if keys < block_size else -(-keys // block_size) * block_size
    left = torch.arange(keys) >= torch.tensor(lengths)[:, None]
    request, key = left.nonzero(as_tuple=True)
    return request * places + key
