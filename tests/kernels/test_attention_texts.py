"""Attention within texts beside float64, for heads of sizes that are no powers of two."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from kvern.kernels.attention_prefill import PrefillShape
from kvern.kernels.attention_texts import TextForm, TextTiles, head_parts, text_attention
from tests.support.kernels.references import relative_error

SMALL, LARGE = PrefillShape(16, 16, 4, 2), PrefillShape(128, 128, 8, 2)


def launch(rows: torch.Tensor, lengths: Sequence[int], shape: PrefillShape, window: int | None = None) -> torch.Tensor:
    """Of `rows [T, 3 * heads, head_dim]`, queries, keys and values side by side."""
    query, key, value = rows.chunk(3, 1)
    out = torch.full(query.shape, float("nan"), dtype=rows.dtype, device=rows.device)
    tiles = [(text, first) for text, length in enumerate(lengths) for first in range(0, length, shape.queries)]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    numbers = (starts, torch.tensor(lengths), *torch.tensor(tiles).t().contiguous())
    texts = TextTiles(*(part.to(torch.int32).to(rows.device) for part in numbers))
    text_attention(query, key, value, texts, out, shape, TextForm(0.1, window))
    return out


DIMS = ((64, SMALL), (72, SMALL), (72, LARGE), (80, LARGE), (88, LARGE), (96, SMALL))
LAUNCHES: list[Callable[[], object]] = [
    partial(launch, torch.zeros(140, 6, dim, dtype=torch.bfloat16), (140,), shape, window)
    for dim, shape in DIMS
    for window in (None, 8)
]


def test_parts_of_heads_are_no_more_than_a_power_of_two() -> None:
    for head_dim in range(1, 300):
        dim, rest = head_parts(head_dim)
        assert dim.bit_count() == 1 and dim >= 16 and (rest == 0 or (rest.bit_count() == 1 and rest >= 16))
        assert head_dim <= dim + rest <= max(16, 1 << (head_dim - 1).bit_length())
    assert [head_parts(head_dim) for head_dim in (64, 72, 96, 100)] == [(64, 0), (64, 16), (64, 32), (128, 0)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("head_dim", [8, 20, 32, 40, 48, 72])
def test_texts_attend_to_themselves(device: torch.device, head_dim: int, window: int | None) -> None:
    lengths = (1, 37, 16)
    rows = torch.randn(sum(lengths), 6, head_dim, generator=torch.Generator().manual_seed(head_dim)).to(device)
    expected = []
    for part in rows.double().split(lengths):
        query, key, value = part.chunk(3, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.1
        place = torch.arange(len(part), device=device)
        hidden = (place[:, None] - place).abs() >= (window or len(part))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        expected.append(torch.einsum("hqk,khd->qhd", weights, value))
    assert relative_error(launch(rows, lengths, SMALL, window), torch.cat(expected)) < 1e-5
