"""Attention of texts that are read as a whole: tokens see those on both sides, or before them, and nothing is kept."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.attention.compiled import CompiledAttend, CompiledAttention
from kvern.attention.memory import CacheOptions
from kvern.cpu.attention import Step
from kvern.device.text_batch import TextBatch
from kvern.layers.build import Build
from kvern.layers.step_context import Attend
from kvern.spec.mixers import AttentionSpec

LOCAL_QUERIES = 256
"""Queries of a layer with a window that attend together; with more, most keys would be hidden from most queries."""
BLOCK = 16
"""Texts begin at multiples of so many tokens in the memory for keys and values."""


class StoredTexts:
    """The memory for keys and values that layers rotate and store: of one layer, a block of one token each.

    The next layer writes when the one before has been computed. All `layers` have heads of the same size.
    """

    def __init__(
        self, layers: Sequence[AttentionSpec], dtype: torch.dtype, lengths: Sequence[int], device: torch.device
    ) -> None:
        """`dtype`: of the activations. `lengths`: of the texts."""
        self._layers = layers
        self._dtype, self._device = dtype, device
        self._tokens = sum(lengths)

    @cached_property
    def _slots(self) -> Tensor:
        return torch.arange(self._tokens, device=self._device)

    def slot_mapping(self, layer: int) -> Tensor:
        """Tokens lie as they come."""
        return self._slots

    @cached_property
    def _stored(self) -> Tensor:
        spec = self._layers[0]
        shape = 2, self._tokens, 1, spec.heads, spec.head_dim
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def cache(self, layer: int) -> Tensor:
        return self._stored

    def scales(self, layer: int) -> None:
        return None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    def over_cache(self, layer: int, query: Tensor, wanted: Tensor | None = None) -> Tensor:
        """The attention of queries to what the layer has stored."""
        key, value = self._stored.flatten(1, 2)
        out = self(layer, query, key, value)
        return out if wanted is None else out.index_select(0, wanted)


class TorchSlices(StoredTexts):
    """A `SlicedAttend` of one text, by PyTorch."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._key, self._value = key, value
        return query

    def of(self, layer: int, query: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(0).transpose(1, 2) for part in (query, self._key, self._value))
        attended = F.scaled_dot_product_attention(query, key, value, scale=self._layers[layer].scale)
        return attended.transpose(1, 2).squeeze(0)


class TorchAttend(StoredTexts):
    """An `Attend` by PyTorch for the texts of a batch; a `PagedAttend` for layers that rotate, and store that.

    Neighbours of the same length are one call: there is no padding, and nothing to be hidden but by windows.
    """

    def __init__(self, layers: Sequence[AttentionSpec], batch: TextBatch, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(layers, dtype, batch.lengths, batch.starts.device)
        self._groups = [(length, len(list(group))) for length, group in groupby(batch.lengths)]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended, first = [], 0
        for length, texts in self._groups:
            end = first + length * texts
            rows = (part[first:end] for part in (query, key, value))
            heads = [torch.unflatten(part, 0, (texts, length)).transpose(1, 2) for part in rows]
            attended.append(_joined(list(_attended(self._layers[layer], *heads)), 2).transpose(1, 2).flatten(0, 1))
            first = end
        return _joined(attended, 0)


def _joined(parts: list[Tensor], dimension: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def _attended(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
    """The attention of tensors `[texts, heads, length, head_dim]`, in runs of queries."""
    length, window = query.shape[2], spec.window
    if window is None or length <= window:
        yield F.scaled_dot_product_attention(query, key, value, is_causal=spec.causal, scale=spec.scale)
        return
    assert not spec.causal, "windows of texts that are read as a whole reach to both sides"
    places = torch.arange(length, device=query.device)
    for begin in range(0, length, LOCAL_QUERIES):
        end = min(begin + LOCAL_QUERIES, length)
        seen = slice(max(0, begin + 1 - window), min(length, end - 1 + window))
        mask = (places[begin:end, None] - places[seen]).abs() < window
        yield F.scaled_dot_product_attention(
            query[:, :, begin:end], key[:, :, seen], value[:, :, seen], mask, scale=spec.scale
        )


class CompiledTexts:
    """Attention by a kernel for CPUs, with memory for the keys and values of one layer of the largest step."""

    def __init__(self, layers: Sequence[AttentionSpec], dtype: torch.dtype, most_tokens: int, most_texts: int) -> None:
        """`dtype`: of the activations, float32 or bfloat16."""
        blocks = most_tokens // BLOCK + most_texts
        self._attention = CompiledAttention(CacheOptions(layers, blocks, BLOCK, dtype), dtype, one_cache=True)

    def attend(self, batch: TextBatch) -> CompiledAttend:
        """An `Attend` for the texts of a batch."""
        lengths = batch.lengths
        blocks = [-(-length // BLOCK) for length in lengths]
        firsts = list(accumulate(blocks[:-1], initial=0))
        table = torch.tensor(firsts, dtype=torch.int32)[:, None] + torch.arange(max(blocks), dtype=torch.int32)
        requests = torch.tensor([list(range(len(lengths))), [0] * len(lengths), list(lengths)])
        slots = [torch.arange(first * BLOCK, first * BLOCK + n) for first, n in zip(firsts, lengths, strict=True)]
        return self._attention.attend((Step(table, requests), torch.cat(slots)))


def attend_once(layers: Sequence[AttentionSpec], build: Build, batch: TextBatch, *, sliced: bool = False) -> Attend:
    """An `Attend` of the layers of a build for one batch, with memory of its own if kernels attend.

    `sliced`: a `SlicedAttend` of a single text.
    """
    if sliced:
        return TorchSlices(layers, build.dtype, batch.lengths, batch.starts.device)
    if "cpu_attention" not in build.kernels:
        return TorchAttend(layers, batch, build.dtype)
    return CompiledTexts(layers, build.dtype, sum(batch.lengths), len(batch.lengths)).attend(batch)
