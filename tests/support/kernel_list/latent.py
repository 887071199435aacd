"""Attention to latents over the paged cache, and what writes it."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvern.kernels.attention_arguments import CachedLayer, Decodes, Runs
from kvern.kernels.attention_latent import QUERIES, LatentShape, latent_attention, latent_shape
from kvern.kernels.store_latents import store_latents
from kvern.spec.mixers import LatentAttentionSpec
from kvern.spec.model import LayerSpec, ModelSpec
from tests.support.kernel_list.dense import normed, rotation_table, turned
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]


def _attend(
    spec: ModelSpec, inputs: Inputs, mixer: LatentAttentionSpec, requests: int, queries: int, keys: int, planned: int
) -> Call:
    """The last `queries` of so many keys; the launch is cut for `planned` requests or tiles. 0: decodes."""
    attention, is_decode = mixer.over_latents, queries == 0
    queries = queries or 1
    blocks = -(-keys // inputs.block_size)
    cache = inputs.numbers(1, requests * blocks, inputs.block_size, 1, attention.head_dim)
    table = inputs.zeros(requests, -(-blocks // 16) * 16)[:, :blocks]
    table.copy_(inputs.permutation(requests * blocks).view(requests, blocks))
    query = inputs.numbers(requests * queries, attention.heads, attention.head_dim)
    out = torch.empty_like(query[..., : mixer.kv_lora_rank])
    slots, starts = inputs.integers(range(requests)), inputs.integers([keys - queries] * requests)
    of_requests: Decodes | Runs = Decodes(slots, starts)
    if not is_decode:
        tiles = list(itertools.product(range(requests), range(0, queries, QUERIES)))
        of_requests = Runs(
            slots,
            starts,
            inputs.integers(range(0, requests * queries, queries)),
            inputs.integers([queries] * requests),
            inputs.integers(request for request, _ in tiles),
            inputs.integers(first for _, first in tiles),
        )
    layer, shape = CachedLayer(cache, mixer.scale), _shape(mixer, inputs, planned, is_decode)
    launch = partial(latent_attention, query, layer, table, of_requests, out, shape)

    def launched() -> torch.Tensor:
        launch()
        return out

    def reference() -> torch.Tensor:
        rows = cache[0, table.long()].double().flatten(1, 3)[:, :keys]
        scores = torch.einsum("rqhd,rkd->rhqk", query.double().view(requests, queries, *query.shape[1:]), rows)
        at = torch.arange(keys - queries, keys, device=rows.device)[:, None]
        hidden = torch.arange(keys, device=rows.device)[None] > at
        weights = (scores * mixer.scale).masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("rhqk,rkd->rqhd", weights, rows[..., : mixer.kv_lora_rank]).flatten(0, 1)

    pairs = requests * queries * (keys - (queries - 1) / 2)
    operations = 2 * mixer.heads * (attention.head_dim + mixer.kv_lora_rank) * pairs
    moved = requests * keys * attention.head_dim * cache.element_size()
    return Call(f"{requests} x {queries} of {keys} keys", launched, reference, moved, operations)


def _shape(mixer: LatentAttentionSpec, inputs: Inputs, planned: int, is_decode: bool) -> LatentShape:
    return latent_shape(mixer.heads, planned, is_decode, inputs.processors, inputs.device, inputs.dtype.itemsize)


def _mixers(spec: ModelSpec) -> list[LatentAttentionSpec]:
    mixers = (layer.mixer for layer in spec.layers)
    return list(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, LatentAttentionSpec)))


def _attend_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    """With and without splits: of decodes, and of runs."""
    keys = 2 * inputs.block_size + 5
    for mixer, queries in itertools.product(_mixers(spec), (0, 3)):
        forms: dict[bool, int] = {}
        for planned in (1, inputs.batch_requests, 4096):
            forms.setdefault(_shape(mixer, inputs, planned, not queries).splits > 1, planned)
        yield from ((mixer, 2, queries, keys, planned) for planned in forms.values())


def _attend_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for mixer in _mixers(spec)[:1]:
        yield from ((mixer, requests, 0, keys, requests) for requests, keys in ((1, 32768), (8, 32768), (64, 4096)))
        yield mixer, 2, 4096, 4096, 2 * 4096 // QUERIES


def _store(spec: ModelSpec, inputs: Inputs, layer: LayerSpec, tokens: int) -> Call:
    mixer, rope = layer.mixer, layer.rope
    assert isinstance(mixer, LatentAttentionSpec)
    latent = mixer.kv_lora_rank
    rotary = mixer.qk_rope_head_dim
    heads = mixer.heads
    rows = inputs.numbers(tokens, latent + rotary)
    asked = inputs.numbers(tokens, heads * (mixer.qk_nope_head_dim + rotary))
    weight, query = inputs.numbers(latent), inputs.numbers(tokens, heads, latent + rotary)
    cache = inputs.numbers(1, -(-tokens // inputs.block_size), inputs.block_size, 1, latent + rotary)
    interleaved = rope is not None and rope.interleaved
    table = None if rope is None else rotation_table(inputs, tokens, rotary, interleaved)
    places = inputs.permutation(tokens, torch.int64)
    positions = inputs.integers(range(tokens), torch.int64)

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        given = rows, asked, positions, places, table, weight, mixer.epsilon, cache, query
        store_latents(*given, interleaved=interleaved)
        return query, cache

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        expected, stored = query.double(), cache.double()
        meets = asked.double().view(tokens, heads, -1)[..., -rotary:]
        together = torch.cat((meets, rows[:, None, latent:].double()), 1)
        rotated = together if table is None else turned(together, table, interleaved)
        expected[..., latent:] = rotated[:, :heads]
        kept = torch.cat((normed(rows[:, :latent], weight, mixer.epsilon), rotated[:, heads]), 1)
        stored.flatten(0, 3)[places] = kept
        return expected, stored

    moved = 2 * (rows.numel() + tokens * heads * rotary) * rows.element_size()
    return Call(f"{tokens} x {latent + rotary}", launch, reference, moved)


def _store_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    layers = {layer.mixer: layer for layer in spec.layers if isinstance(layer.mixer, LatentAttentionSpec)}
    yield from ((layer, 5) for layer in layers.values())


def _store_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((layer, tokens) for layer, _ in _store_launched(spec, inputs) for tokens in (1, 64, 8192))


KERNELS = (
    Kernel("attention to latents", "attention", _attend, _attend_launched, _attend_timed),
    Kernel("write of latents", "rotary", _store, _store_launched, _store_timed),
)
