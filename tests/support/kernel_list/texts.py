"""What encoders read texts with."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kvern.kernels.attention_prefill import prefill_shape
from kvern.kernels.attention_texts import TextForm, TextTiles, text_attention
from kvern.kernels.text_means import text_means
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]
SHORT, TIMED = (1, 67, 5), (20, 500, 260, 140, 380) * 26
"""Lengths of texts that stand one behind the other."""


def _starts(inputs: Inputs, lengths: Sequence[int]) -> torch.Tensor:
    return inputs.integers(sum(lengths[:index]) for index in range(len(lengths)))


def _attention(spec: ModelSpec, inputs: Inputs, attention: AttentionSpec, lengths: Sequence[int]) -> Call:
    """Of queries, keys and values that lie side by side, as a product makes them."""
    shape = prefill_shape(attention.head_dim, element_size=inputs.dtype.itemsize)
    heads = attention.heads
    head_dim = attention.head_dim
    tokens = sum(lengths)
    query, key, value = torch.split(inputs.numbers(tokens, 3 * heads, head_dim), heads, 1)
    out = torch.empty(tokens, heads, head_dim, dtype=inputs.dtype, device=inputs.device)
    tiles = [(text, first) for text, length in enumerate(lengths) for first in range(0, length, shape.queries)]
    cut = inputs.integers(text for text, _ in tiles), inputs.integers(first for _, first in tiles)
    texts = TextTiles(_starts(inputs, lengths), inputs.integers(lengths), *cut)

    def launch() -> torch.Tensor:
        form = TextForm(attention.scale, attention.window, attention.causal)
        text_attention(query, key, value, texts, out, shape, form)
        return out

    def reference() -> torch.Tensor:
        parts = []
        for rows in zip(*(torch.split(part.double(), list(lengths)) for part in (query, key, value)), strict=True):
            scores = torch.einsum("qhd,khd->hqk", *rows[:2]) * attention.scale
            place = torch.arange(len(rows[0]), device=inputs.device)
            ahead = place - place[:, None]
            hidden = ahead.abs() >= (attention.window or len(place)) if not attention.causal else ahead > 0
            scores = scores.masked_fill(hidden, float("-inf"))
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), rows[2]))
        return torch.cat(parts)

    seen = sum(length * min(length, 2 * (attention.window or length) - 1) for length in lengths)
    moved = 4 * out.numel() * out.element_size()
    seen //= 1 + attention.causal
    return Call(f"{tokens} tokens", launch, reference, moved, 4 * heads * head_dim * seen)


def _attention_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if spec.encoder is not None:
        yield from ((attention, SHORT) for attention in dict.fromkeys(spec.attentions))


def _attention_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if spec.encoder is not None:
        yield from ((attention, TIMED) for attention in dict.fromkeys(spec.attentions))


def _means(spec: ModelSpec, inputs: Inputs, lengths: Sequence[int]) -> Call:
    states = inputs.numbers(sum(lengths), spec.hidden_size)
    launch = partial(text_means, states, _starts(inputs, lengths), inputs.integers(lengths))

    def reference() -> torch.Tensor:
        return torch.stack([part.mean(0) for part in torch.split(states.double(), list(lengths))])

    return Call(f"{len(states)} x {spec.hidden_size}", launch, reference, states.numel() * states.element_size())


def _means_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if spec.encoder is not None:
        yield (SHORT,)


def _means_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if spec.encoder is not None:
        yield (TIMED,)


KERNELS = (
    Kernel("attention within texts", "texts", _attention, _attention_launched, _attention_timed),
    Kernel("means of texts", "texts", _means, _means_launched, _means_timed),
)
