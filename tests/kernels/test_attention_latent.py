"""Attention to latents over the paged cache beside float64, however a launch is cut."""

from collections.abc import Iterator

import pytest
import torch

from kvern.kernels.attention_arguments import CachedLayer, Decodes, Runs
from kvern.kernels.attention_latent import QUERIES, LatentShape, latent_attention, latent_shape
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.support.kernel_list import Call, Inputs
from tests.support.kernel_list.latent import KERNELS
from tests.support.kernels.attention_batches import Batch, make_batch, runs_of
from tests.support.kernels.references import relative_error

SIZES = [(5, 20, 8), (16, 32, 16), (40, 24, 4)]
"""Heads, entries of the latent, and of the rotated key."""


def calls() -> Iterator[Call]:
    """As GLM-4.7-Flash launches them, without a device."""
    spec = spec_of("glm4_moe_lite", LARGE_MODELS)
    inputs = Inputs(torch.device("cpu"), torch.bfloat16, "empty")
    for kernel in KERNELS:
        yield from (kernel.make(spec, inputs, *arguments) for arguments in kernel.launched(spec, inputs))


LAUNCHES = [call.launch for call in calls()]


def reference(batch: Batch, latent: int, scale: float) -> torch.Tensor:
    out = []
    for slot, start, count, token in zip(
        *(item.tolist() for item in (batch.slots, batch.starts, batch.counts, batch.tokens)), strict=True
    ):
        rows = batch.cache[0, batch.table[slot].long()].double().flatten(0, 2)[: start + count]
        scores = torch.einsum("qhd,kd->hqk", batch.query[token : token + count].double(), rows) * scale
        at = torch.arange(start, start + count, device=rows.device)[:, None]
        hidden = torch.arange(start + count, device=rows.device)[None] > at
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,kd->qhd", weights, rows[:, :latent]))
    return torch.cat(out)


def attended(batch: Batch, latent: int, shape: LatentShape, scale: float, runs: Runs | None) -> torch.Tensor:
    query = batch.query.contiguous()
    out = torch.full((*query.shape[:2], latent), float("nan"), dtype=query.dtype, device=query.device)
    requests = runs or Decodes(batch.slots, batch.starts)
    latent_attention(query, CachedLayer(batch.cache[:1], scale), batch.table, requests, out, shape)
    return out


@pytest.mark.parametrize(("heads", "latent", "rest"), SIZES)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(device: torch.device, heads: int, latent: int, rest: int, splits: int) -> None:
    """Of keys that take one part, or several."""
    batch = make_batch(device, [0, 40, 600 if splits > 1 else 17], [1] * 3, heads, 1, latent + rest, torch.float32)
    shape = LatentShape(16, 32, splits, 4, 4, 1)
    found = attended(batch, latent, shape, 0.3, None)
    assert relative_error(found, reference(batch, latent, 0.3)) < 1e-5


@pytest.mark.parametrize(("splits", "heads", "latent", "rest"), [(1, *SIZES[1]), (3, *SIZES[0])])
def test_runs(device: torch.device, splits: int, heads: int, latent: int, rest: int) -> None:
    batch = make_batch(device, [0, 9, 300], [18, 1, 3], heads, 1, latent + rest, torch.float32)
    found = attended(batch, latent, LatentShape(32, 32, splits, 4, 4, 1), 0.3, runs_of(batch, QUERIES))
    assert relative_error(found, reference(batch, latent, 0.3)) < 1e-5


@pytest.mark.parametrize("splits", [1, 2])
def test_16_bits(device: torch.device, splits: int) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # which are all that the interpreter multiplies
    batch = make_batch(device, [11, 530], [1, 1], 20, 1, 48, dtype, block_size=16)
    found = attended(batch, 32, LatentShape(32, 64, splits, 4, 4, 2), 0.2, None)
    assert relative_error(found, reference(batch, 32, 0.2)) < 2e-2


@pytest.mark.parametrize(("requests", "turns"), [(8, 1), (70, 4), (128, 1)])
def test_decodes_are_cut_so_that_few_processors_are_idle(requests: int, turns: int) -> None:
    shape = latent_shape(20, requests, True, 132, torch.device("cpu"))
    assert shape.programs == turns * 132
    assert shape.splits >= shape.programs // requests


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 32, 5])
def test_decodes_on_hopper(heads: int) -> None:
    """Of few keys and many, in parts and alone, of blocks that lie anywhere, with NaN behind the last key."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    starts = [0, 15, 62, 63, 64, 700, 5001, 9000]
    batch = make_batch(device, starts, [1] * len(starts), heads, 1, 576, torch.bfloat16, block_size=16)
    for requests in (len(starts), 1):
        shape = latent_shape(heads, requests, True, 132, device)
        found = attended(batch, 512, shape, 0.05, None)
        assert relative_error(found, reference(batch, 512, 0.05)) < 1e-2
