"""Attention by PyTorch, beside float64, over caches whose other numbers are none: they are others', or nobody's."""

import itertools

import pytest
import torch

from kvern.attention.eight_bit import LARGEST_CODE, EightBit
from kvern.attention.memory import CacheOptions
from kvern.attention.torch_sdpa import TorchAttention
from kvern.device.input_batch import InputBatch
from kvern.spec.mixers import AttentionSpec
from tests.support.kernels.cpu_attention_batches import MIXED, Batch, Case, close, make_batch, spans_of

ALIKE = [(start, 1) for start in (299, 250, 270, 301, 288)]
"""Decodes that are gathered together."""
PLAIN = {"dtype": torch.float32, "cache_dtype": torch.float32}


def attend(batch: Batch) -> torch.Tensor:
    """What PyTorch finds; places of a block table that are not used name a block of others."""
    case, (starts, counts) = batch.case, zip(*batch.requests, strict=True)
    layer = AttentionSpec(
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.scale,
        case.window,
        case.softcap,
        sinks=case.sinks,
        spans=case.spans,
    )
    eight_bit = None if batch.scales is None else EightBit([batch.scales], case.dtype)
    sinks = None if (logits := case.logits()) is None else {0: logits}
    sizes = batch.cache.shape[1], case.block_size, case.cache_dtype
    attention = TorchAttention(CacheOptions([layer], *sizes, eight_bit=eight_bit, sinks=sinks))
    attention.caches[0].view(torch.uint8).copy_(batch.cache.view(torch.uint8))
    positions = itertools.chain(*(range(start, start + count) for start, count in batch.requests))
    step = InputBatch(
        slots=list(range(len(starts))),
        starts=list(starts),
        counts=list(counts),
        positions=torch.tensor(list(positions)),
        token_ids=torch.empty(0),
        slot_mapping=torch.empty(0),
        block_table=batch.table.clamp(min=0),
        sample_slots=[],
        logits_indices=torch.empty(0),
        sample_positions=torch.empty(0),
        spans=[tuple(spans_of(*request)) for request in batch.requests],
    )
    return attention.plan(step).over_cache(0, torch.cat(batch.queries))


@pytest.mark.parametrize("requests", [ALIKE, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize(
    "case",
    [
        Case(**PLAIN),
        Case(),
        Case(block_size=512, **PLAIN),
        Case(block_size=1024, **PLAIN),
        Case(softcap=5.0, **PLAIN),
        Case(sinks=True, **PLAIN),
        *(Case(dtype=torch.float32, cache_dtype=dtype) for dtype in LARGEST_CODE),
        *(Case(window=window, block_size=size, **PLAIN) for window, size in [(50, 4), (64, 16), (1, 16), (130, 512)]),
        Case(window=50, softcap=5.0, **PLAIN),
        *(Case(spans=True, window=window, **PLAIN) for window in (None, 20, 400)),
        Case(spans=True, softcap=5.0, **PLAIN),
        Case(spans=True, window=50, dtype=torch.float32, cache_dtype=torch.int8),
        Case(window=50, sinks=True, **PLAIN),
        *(Case(window=50, dtype=torch.float32, cache_dtype=dtype) for dtype in LARGEST_CODE),
    ],
    ids=str,
)
def test_what_nobody_sees_is_not_read(case: Case, requests: list[tuple[int, int]]) -> None:
    batch = make_batch(case, requests)
    if case.window is not None:
        for row, (start, _) in zip(batch.table, requests, strict=True):
            passed = row[: max(0, start + 1 - case.window) // case.block_size].long()
            batch.cache.view(torch.uint8)[:, passed] = 0x7F if case.cache_dtype.itemsize == 1 else 0xFF
    close(attend(batch), batch.reference(), case)


def test_a_prefix_is_read_once_beside_what_nobody_sees() -> None:
    batch = make_batch(Case(**PLAIN), ALIKE, shared=160)
    close(attend(batch), batch.reference(), batch.case)
