"""Attention over the paged cache beside float64, and the same result however a launch is cut."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.kernels.attention_prefix import SharedPrefix, prefix_members
from tests.support.kernels.attention_batches import (
    attention_reference,
    decode,
    make_batch,
    make_sinks,
    prefill,
    split,
    with_spans,
)
from tests.support.kernels.references import relative_error
from tests.support.pairwise import pairwise

SHAPES = [(4, 2, 16), (3, 3, 24), (8, 1, 20)]
KINDS = [(None, None, True), (7, None, False), (None, 5.0, False), (3, 2.0, True)]
OPTIONS = ("heads", "kv_heads", "dim", "window", "softcap", "sunk")


@pytest.mark.sample(6)
@pytest.mark.parametrize((*OPTIONS, "programs"), pairwise(SHAPES, KINDS, [1, 24]))
def test_decode(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    programs: int,
) -> None:
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [0, 5, 200, 16], [1, 1, 1, 1], heads, kv_heads, dim, torch.float32)
    out = decode(batch, programs, window=window, softcap=softcap, sinks=sinks)
    assert relative_error(out, attention_reference(batch, 0.3, window, softcap, sinks)) < 1e-5


@pytest.mark.parametrize("window", [None, 12])
def test_requests_of_few_keys_are_not_split(device: torch.device, window: int | None) -> None:
    """Bit by bit as one program alone finds them; those of one key more are."""
    batch = make_batch(device, [0, 63, 64, 16], [1, 1, 1, 1], 4, 2, 32, torch.float32)
    whole, found = decode(batch, window=window), decode(batch, 20, unsplit=64, window=window)
    assert torch.equal(whole[[0, 1, 3]], found[[0, 1, 3]])
    assert torch.equal(whole[2], found[2]) == (window is not None)
    assert relative_error(found, attention_reference(batch, 0.3, window, None)) < 1e-5


@pytest.mark.parametrize("window", [None, 130])
def test_requests_that_are_helped_beside_each_other(device: torch.device, window: int | None) -> None:
    """Each has parts of its own, in front of one that has none, and behind it."""
    batch = make_batch(device, [200, 180, 5, 150], [1] * 4, 4, 2, 16, torch.float32)
    whole, found = decode(batch, window=window), decode(batch, 24, window=window)
    assert relative_error(found, attention_reference(batch, 0.3, window, None)) < 1e-5
    assert (found != whole).flatten(1).any(1).tolist() == [True, True, False, True]


@pytest.mark.nightly
def test_the_last_of_many_requests_is_helped(device: torch.device) -> None:
    """More than a program counts at once, of which two others have long contexts; one of these is a share."""
    starts = [3] * 300
    starts[7], starts[150], starts[299] = 90, 150, 400
    batch = make_batch(device, starts, [1] * 300, 2, 1, 16, torch.float32)
    found, whole = decode(batch, 30), decode(batch)
    assert relative_error(found, attention_reference(batch, 0.3, None, None)) < 1e-5
    differ = (found != whole).flatten(1).any(1).nonzero().flatten().tolist()
    assert differ == [150, 299], "others are read by one program each"


@pytest.mark.sample(6)
@pytest.mark.parametrize(OPTIONS, pairwise(SHAPES, KINDS))
def test_prefill(
    device: torch.device, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, sunk: bool
) -> None:
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [0, 9, 30, 4], [21, 17, 1, 16], heads, kv_heads, dim, torch.float32)
    out = prefill(batch, window=window, softcap=softcap, sinks=sinks)
    assert relative_error(out, attention_reference(batch, 0.3, window, softcap, sinks)) < 1e-5


@pytest.mark.sample(4)
@pytest.mark.parametrize((*OPTIONS, "splits"), pairwise(SHAPES, KINDS, [1, 3]))
def test_runs_whose_keys_are_shared_out(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    splits: int,
) -> None:
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [0, 9, 60, 4], [11, 5, 1, 16], heads, kv_heads, dim, torch.float32)
    out = split(batch, splits, window=window, softcap=softcap, sinks=sinks)
    assert relative_error(out, attention_reference(batch, 0.3, window, softcap, sinks)) < 1e-5


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("attend", [prefill, split, partial(split, splits=3)], ids=["tiles", "split", "shared out"])
def test_tokens_of_a_span_see_each_other(
    attend: Callable[..., torch.Tensor], window: int | None, device: torch.device
) -> None:
    """Over the bounds of tiles, too."""
    batch = make_batch(device, [0, 9, 60, 4], [40, 17, 1, 16], 4, 2, 24, torch.float32)
    spans = with_spans(batch)
    found, expected = attend(spans, window=window), attention_reference(spans, 0.3, window, None)
    assert relative_error(found, expected) < 1e-5
    assert relative_error(attend(batch, window=window), expected) > 0.1, "which causal bounds do not"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("programs", "softcap", "sunk", "heads", "kv_heads", "dim"),
    [
        pytest.param(
            programs,
            softcap,
            programs == 24,
            *shape,
            marks=[] if (programs == 24) == (softcap is None) else pytest.mark.nightly,
        )
        for programs, softcap, shape in itertools.product((1, 24), (None, 5.0), SHAPES)
    ],
)
def test_decode_reads_a_shared_prefix_once(
    device: torch.device, programs: int, softcap: float | None, sunk: bool, heads: int, kv_heads: int, dim: int
) -> None:
    """Requests 0, 2 and 3 share four blocks, 4 and 5 two; 1 shares nothing."""
    sinks = make_sinks(heads, sunk, device)
    batch = make_batch(device, [16, 5, 150, 20, 9, 8], [1] * 6, heads, kv_heads, dim, torch.float32)
    table = batch.table
    table[batch.slots[[2, 3]].long(), :4] = table[batch.slots[0].long(), :4]
    table[batch.slots[5].long(), :2] = table[batch.slots[4].long(), :2]
    integers = {"dtype": torch.int32, "device": device}
    members = torch.full((4, prefix_members(heads // kv_heads, dim)), -1, **integers)
    members[0, :2], members[1, 0], members[2, :2] = torch.tensor([0, 3]), 2, torch.tensor([4, 5])
    members[3, 0] = 0
    shared = SharedPrefix(
        members, torch.tensor([16, 16, 8, 0], **integers), torch.tensor([16, 0, 16, 16, 8, 8], **integers)
    )
    out = decode(batch, programs, softcap=softcap, shared=shared, sinks=sinks)
    assert relative_error(out, attention_reference(batch, 0.3, None, softcap, sinks)) < 1e-5


@pytest.mark.parametrize("programs", [2, 24])
def test_long_requests_behind_a_shared_prefix(device: torch.device, programs: int) -> None:
    """Those of few keys know how many parts the long ones before them have, be it fewer than their keys would take."""
    batch = make_batch(device, [150, 40, 200, 30], [1] * 4, 2, 1, 16, torch.float32)
    slots, table = batch.slots.long(), batch.table
    table[slots[[1, 3]], :4] = table[slots[0], :4]
    integers = {"dtype": torch.int32, "device": device}
    members = torch.full((2, prefix_members(2, 16)), -1, **integers)
    members[0, :3] = torch.tensor([0, 1, 3])
    shared = SharedPrefix(members, torch.tensor([16, 0], **integers), torch.tensor([16, 16, 0, 16], **integers))
    out = decode(batch, programs, shared=shared, unsplit=64)
    assert relative_error(out, attention_reference(batch, 0.3, None, None)) < 1e-5
