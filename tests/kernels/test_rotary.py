"""Norm, rotation and cache write beside float64."""

import pytest
import torch

from kvern.kernels.rotary import rotate_and_store
from tests.support.kernels.references import relative_error
from tests.support.pairwise import pairwise

BLOCK_SIZE, BLOCKS = 4, 6


def rotated(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, dim] turned in its first `rotary` entries, as the definition has it."""
    dim = table.shape[-1]
    cosine, sine = table[positions].double().unbind(1)
    first, second = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else x[..., :dim].chunk(2, -1)
    half = slice(0, dim, 2) if interleaved else slice(0, dim // 2)
    other = slice(1, dim, 2) if interleaved else slice(dim // 2, dim)
    c, s = cosine[..., half], sine[..., other]
    turned = first * c - second * s, second * c + first * s
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined, x[..., dim:]), -1)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary", "interleaved", "norm"),
    pairwise([1, 40], [(4, 2, 16, 16), (3, 1, 24, 8), (2, 2, 16, 0), (5, 5, 20, 12)], [False, True], [False, True]),
)
def test_rotate_and_store(
    device: torch.device, tokens: int, heads: int, kv_heads: int, dim: int, rotary: int, interleaved: bool, norm: bool
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    tokens = min(tokens, BLOCKS * BLOCK_SIZE)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(device)
    angles = torch.rand(50, rotary // 2, generator=generator) * 6
    pair = (lambda x: x.repeat_interleave(2, -1)) if interleaved else (lambda x: torch.cat((x, x), -1))
    sign = pair(torch.zeros_like(angles)) + 1
    sign[..., slice(0, None, 2) if interleaved else slice(0, rotary // 2)] = -1
    table = torch.stack((pair(angles.cos()), pair(angles.sin()) * sign), 1).unsqueeze(2).to(device)
    positions = torch.randint(50, (tokens,), generator=generator).to(device)
    places = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens].to(device)
    weight = torch.randn(heads + kv_heads, dim, generator=generator).to(device)
    cache = torch.full((2, BLOCKS, BLOCK_SIZE, kv_heads, dim), float("nan"), device=device)

    expected = qkv.double().view(tokens, -1, dim).clone()
    if norm:
        known = expected[:, : heads + kv_heads]
        known /= (known.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        known *= weight.double()
    if rotary:
        expected[:, : heads + kv_heads] = rotated(expected[:, : heads + kv_heads], table, positions, interleaved)
    query = rotate_and_store(
        qkv,
        positions,
        places,
        table if rotary else None,
        cache,
        query_heads=heads,
        interleaved=interleaved,
        norm_weight=weight if norm else None,
        epsilon=1e-5,
    )
    assert relative_error(query, expected[:, :heads]) < 1e-5
    written = cache.flatten(1, 2)[:, places]
    assert relative_error(written[0], expected[:, heads : heads + kv_heads]) < 1e-5
    assert relative_error(written[1], expected[:, heads + kv_heads :]) < 1e-6
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=device)
    untouched[places] = False
    assert cache.flatten(1, 2)[:, untouched].isnan().all()
