"""Attention within the texts of a step through a Triton kernel, without padding and without a cache."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvern.device.text_batch import TextBatch
from kvern.device.transfer import upload
from kvern.kernels.attention_prefill import prefill_shape
from kvern.kernels.attention_texts import TextTiles, text_attention
from kvern.spec.mixers import AttentionSpec


class PackedTexts:
    """An `Attend` for the texts of a batch; a `PagedAttend` for layers that rotate, and store what they rotated.

    All `layers` have heads of the same size. There is memory for keys and values of one layer, a block of one token
    each: the next layer writes when the one before has been computed.
    """

    def __init__(self, layers: Sequence[AttentionSpec], dtype: torch.dtype, batch: TextBatch) -> None:
        """`dtype`: of the activations."""
        self._layers = layers
        self._dtype = dtype
        self._batch = batch
        self._shape = prefill_shape(layers[0].head_dim, element_size=dtype.itemsize)
        longest_first = sorted(enumerate(batch.lengths), key=lambda text: -text[1])
        tiles = [(text, first) for text, length in longest_first for first in range(0, length, self._shape.queries)]
        device = batch.starts.device
        numbers = upload([number for tile in zip(*tiles, strict=True) for number in tile], torch.int32, device)
        self._texts = TextTiles(batch.starts, batch.counts, *numbers.view(2, -1))

    @cached_property
    def _slots(self) -> Tensor:
        return torch.arange(len(self._batch.token_ids), device=self._batch.starts.device)

    def slot_mapping(self, layer: int) -> Tensor:
        """Tokens lie as they come."""
        return self._slots

    @cached_property
    def _stored(self) -> Tensor:
        spec, tokens = self._layers[0], len(self._batch.token_ids)
        shape = 2, tokens, 1, spec.heads, spec.head_dim
        return torch.empty(shape, dtype=self._dtype, device=self._batch.starts.device)

    def cache(self, layer: int) -> Tensor:
        return self._stored

    def scales(self, layer: int) -> None:
        return None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self._layers[layer]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        text_attention(query, key, value, self._texts, out, self._shape, scale=spec.scale, window=spec.window)
        return out

    def over_cache(self, layer: int, query: Tensor, wanted: Tensor | None = None) -> Tensor:
        key, value = self._stored.flatten(1, 2)
        out = self(layer, query, key, value)
        return out if wanted is None else out.index_select(0, wanted)
