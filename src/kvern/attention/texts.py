"""Attention within the texts of a step through a Triton kernel, without padding and without a cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvern.attention.bidirectional import StoredTexts
from kvern.device.text_batch import TextBatch
from kvern.device.transfer import upload
from kvern.kernels.attention_prefill import prefill_shape
from kvern.kernels.attention_texts import TextForm, TextTiles, text_attention
from kvern.spec.mixers import AttentionSpec


class PackedTexts(StoredTexts):
    """An `Attend` for the texts of a batch; a `PagedAttend` for layers that rotate, and store what they rotated."""

    def __init__(self, layers: Sequence[AttentionSpec], dtype: torch.dtype, batch: TextBatch) -> None:
        """`dtype`: of the activations."""
        super().__init__(layers, dtype, batch.lengths, batch.starts.device)
        self._shape = prefill_shape(layers[0].head_dim, element_size=dtype.itemsize)
        longest_first = sorted(enumerate(batch.lengths), key=lambda text: -text[1])
        tiles = [(text, first) for text, length in longest_first for first in range(0, length, self._shape.queries)]
        device = batch.starts.device
        numbers = upload([number for tile in zip(*tiles, strict=True) for number in tile], torch.int32, device)
        self._texts = TextTiles(batch.starts, batch.counts, *numbers.view(2, -1))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self._layers[layer]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        form = TextForm(spec.scale, spec.window, spec.causal)
        text_attention(query, key, value, self._texts, out, self._shape, form)
        return out
