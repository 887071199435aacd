"""The attention kernel for Hopper beside float64. Gluon has no interpreter: it runs on such a GPU alone."""

import pytest
import torch

from kvern.kernels.attention_arguments import CachedLayer
from tests.support.kernels.attention_batches import attention_reference, give_back, make_batch, make_sinks, runs_of
from tests.support.kernels.references import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no GPU of compute capability 9.0",
    ),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap", "block_size", "dtype", "sunk"),
    [
        (8, 2, 128, None, None, 16, torch.bfloat16, False),
        (7, 1, 128, 130, None, 24, torch.float16, False),
        (4, 4, 128, 17, 5.0, 1024, torch.bfloat16, True),
        (4, 4, 64, None, 5.0, 8, torch.bfloat16, False),
        (8, 2, 64, 200, None, 64, torch.float16, True),
        (4, 2, 256, None, None, 16, torch.float16, True),
        (4, 2, 256, 130, 2.0, 128, torch.bfloat16, False),
    ],
)  # each is compiled, for seconds
def test_hopper_prefill(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
    dtype: torch.dtype,
    sunk: bool,
) -> None:
    """Runs of any length behind any context, of blocks that lie anywhere; what no query sees is no number."""
    from kvern.kernels.attention_hopper import QUERIES, hopper_prefill

    device = torch.device("cuda")
    counts = [300, 33, 1, 128, 200]
    batch = make_batch(device, [0, 131, 770, 128, 1001], counts, heads, kv_heads, dim, dtype, block_size)
    sinks = make_sinks(heads, sunk, device)
    expected = attention_reference(batch, 0.1, window, softcap, sinks)
    if window is not None:
        give_back(batch, window)
    out = torch.full((len(batch.query) + 1, heads, dim), float("nan"), dtype=dtype, device=device)
    hopper_prefill(
        batch.query,
        CachedLayer(batch.cache, 0.1, window, softcap, sinks=sinks),
        batch.table,
        runs_of(batch, QUERIES),
        out,
        processors=5,  # so that each takes several tiles
    )
    assert out[-1].isnan().all()
    assert relative_error(out[:-1], expected) < 5e-3
