"""Which runs of queries share their keys out, and that they attend as others do."""

import pytest
import torch

from kvern.attention.selection import Shapes, make_queries, reference_attention
from kvern.attention.triton import SplitPrefill, TritonKernels, cached_layer
from kvern.spec.mixers import AttentionSpec

LAYER = AttentionSpec(heads=8, kv_heads=2, head_dim=16, scale=0.25)
PROCESSORS = 132


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(26000, 19)], True),
        ([(2000, 4)] * 64, True),
        ([(0, 19)], False),
        ([(2000, 2048)] * 4, False),
        ([(100, 4)] * 64, False),
    ],
    ids=["one behind many keys", "verified drafts", "no context", "many queries", "short contexts"],
)
def test_runs_that_would_leave_the_card_idle_share_their_keys_out(
    runs: list[tuple[int, int]], expected: bool, device: torch.device
) -> None:
    shapes = Shapes([LAYER], 16, torch.float32, torch.float32, device, 64, 30000)
    queries, _, _ = make_queries(runs, shapes, LAYER)
    arrived = torch.zeros(1024, dtype=torch.int32)
    assert SplitPrefill([LAYER], PROCESSORS, arrived, 2).pays(queries) == expected
    assert not SplitPrefill([LAYER], PROCESSORS, arrived[:1], 2).pays(queries)


@pytest.mark.sample(1)
@pytest.mark.parametrize("deterministic", [False, True])
def test_they_attend_as_others_do(deterministic: bool, device: torch.device) -> None:
    shapes = Shapes([LAYER], 4, torch.float32, torch.float32, device, 8, 2000)
    queries, query, cache = make_queries([(1600, 3), (20, 5)], shapes, LAYER)
    kernels = TritonKernels([LAYER], device, 8, deterministic)
    out = torch.full_like(query, float("nan"))
    kernels.prefill(queries)(0, query, cached_layer(LAYER, cache), out)
    torch.testing.assert_close(out, reference_attention(queries, query, cache, LAYER), rtol=1e-4, atol=1e-4)
