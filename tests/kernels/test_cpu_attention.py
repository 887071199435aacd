"""Attention by kernels for CPUs: beside float64, over caches whose unused numbers are none, alone and in company."""

from collections.abc import Iterator

import pytest
import torch

from kvern.attention.eight_bit import LARGEST_CODE
from kvern.cpu.attention import AttentionForm, CachedLayer, Step
from tests.support.cache_folder import load_kernels
from tests.support.kernels.cpu_attention_batches import MIXED, Case, close, make_batch


@pytest.fixture(autouse=True, params=[1])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    set_threads(request.param)
    yield
    set_threads(1)


def set_threads(threads: int) -> None:
    load_kernels("cpu_attention", threads)


CASES = [
    Case(),
    Case(dtype=torch.float32, cache_dtype=torch.float32),
    *(Case(head_dim=size, heads=4, kv_heads=4) for size in (16, 80, 96, 112)),
    *(Case(head_dim=size, heads=8, kv_heads=1, dtype=torch.float32, cache_dtype=torch.float32) for size in (16, 80)),
    Case(head_dim=256, heads=4, block_size=7, scale=0.07),
    Case(head_dim=512, heads=8, scale=0.05),
    Case(head_dim=512, heads=4, scale=0.05, dtype=torch.float32, cache_dtype=torch.float32),
    Case(head_dim=36, heads=2, dtype=torch.float32, cache_dtype=torch.float32),
    Case(head_dim=36, heads=7, kv_heads=1, block_size=1),
    Case(heads=71, kv_heads=1, block_size=64),
    Case(window=50),
    Case(window=300, block_size=4, dtype=torch.float32, cache_dtype=torch.float32),
    Case(softcap=5.0, scale=1.0, dtype=torch.float32, cache_dtype=torch.float32),
    Case(softcap=30.0, window=70, scale=0.3),
    Case(dtype=torch.float32),
    Case(cache_dtype=torch.float32),
    Case(heads=20, kv_heads=1, head_dim=576, value_dim=512, scale=0.07),
    Case(heads=128, kv_heads=1, head_dim=40, value_dim=24, dtype=torch.float32),
    Case(heads=3, kv_heads=1, head_dim=28, value_dim=20, dtype=torch.float32, cache_dtype=torch.float32),
    Case(heads=4, kv_heads=2, head_dim=100, value_dim=36),
    Case(sinks=True, heads=8, kv_heads=1),
    Case(sinks=True, window=50, dtype=torch.float32, cache_dtype=torch.float32),
    Case(sinks=True, cache_dtype=torch.int8),
    *(Case(spans=True, window=window) for window in (None, 20)),
    Case(spans=True, softcap=5.0, window=50, dtype=torch.float32, cache_dtype=torch.float32),
    *(Case(cache_dtype=dtype, head_dim=80) for dtype in LARGEST_CODE),
    *(Case(cache_dtype=dtype, dtype=torch.float32, head_dim=40) for dtype in LARGEST_CODE),
]


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers(case: Case) -> None:
    batch = make_batch(case, MIXED)
    found = batch.attend()
    close(found, batch.reference(), case)
    wanted = torch.tensor([0, 69, 70, 73, 75, 107])
    assert torch.equal(batch.attend(wanted=wanted), found[wanted])


@pytest.mark.parametrize("window", [1, 50, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_that_a_window_passed_are_others(dtype: torch.dtype, window: int) -> None:
    """What is in them may be no number, and changes nothing."""
    case = Case(window=window, block_size=4, dtype=dtype, cache_dtype=dtype)
    batch = make_batch(case, [(700, 1), (333, 1), (322, 3), (610, 1), (320, 70)])
    expected = batch.attend()
    for row, (start, _) in zip(batch.table, batch.requests, strict=True):
        passed = max(0, start + 1 - window) // case.block_size
        batch.cache[:, row[:passed].long()] = float("nan")
        row[:passed] = 0
    assert torch.equal(batch.attend(), expected)


@pytest.mark.sample(5)
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dtype=torch.float32, cache_dtype=torch.float32, head_dim=80),
        Case(window=200),
        Case(softcap=20.0),
        Case(sinks=True),
        Case(cache_dtype=torch.int8, heads=9, kv_heads=3),
    ],
    ids=str,
)
def test_company_changes_no_bit(case: Case) -> None:
    """Alone, in a batch, behind a prefix that others share, token by token, and over threads."""
    batch = make_batch(case, [(700, 1), (333, 1), (322, 3), (610, 1), (320, 70)], shared=320)
    set_threads(1)
    alone = [batch.attend([index]) for index in range(5)]
    set_threads(2)
    together = batch.attend()
    close(together, batch.reference(), case)
    assert torch.equal(together, torch.cat(alone))
    reordered = batch.attend([3, 0, 2, 1, 4])
    assert torch.equal(reordered, torch.cat([alone[index] for index in (3, 0, 2, 1, 4)]))
    assert torch.equal(batch.attend([0]), alone[0]), "over threads"
    start, count = batch.requests[4]
    whole = batch.queries[4]
    for token in (0, 1, 63, count - 1):
        batch.requests[4], batch.queries[4] = (start + token, 1), whole[token : token + 1]
        assert torch.equal(batch.attend([4]), alone[4][token : token + 1]), "as a prompt's token and as a decode's"


@pytest.mark.parametrize("cache_dtype", LARGEST_CODE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_is_read(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A query that sees one key gets its value."""
    codes = torch.arange(256).to(torch.uint8).view(16, 16)
    cache = torch.stack([torch.zeros_like(codes), codes]).view(2, 16, 1, 1, 16).view(cache_dtype)
    step = Step(torch.arange(16).int()[:, None], torch.tensor([list(range(16)), [0] * 16, [1] * 16]))
    found = CachedLayer(cache, torch.ones(2, 1), dtype, AttentionForm(1, 1.0)).attend(
        step, torch.zeros(16, 1, 16, dtype=dtype)
    )
    expected = codes.view(cache_dtype).to(dtype)
    assert torch.equal(found[:, 0].nan_to_num(1000.0), expected.nan_to_num(1000.0))
    assert found.isnan().sum() == (2 if cache_dtype.is_floating_point else 0)


def test_nothing_of_a_query_is_lost_in_weights() -> None:
    """Weights are powers that this library computes: of two keys with known scores they are known."""
    differences = torch.cat([torch.linspace(-87, 0, 4001), -torch.logspace(-7, 0, 500)])
    cache = torch.zeros(2, 1, 2, 1, 16)
    cache[0, 0, 1, 0, 0] = 1.0
    cache[1, 0, 1, 0, 0] = 1.0
    step = Step(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[0], [1], [1]]))
    query = torch.zeros(1, len(differences), 16)
    query[0, :, 0] = differences
    layer = CachedLayer(cache, None, torch.float32, AttentionForm(len(differences), 1.0))
    power = differences.double().exp()
    found, expected = layer.attend(step, query)[0, :, 0].double(), power / (1 + power)
    errors = (found - expected).abs() / expected
    allowed = torch.finfo(torch.float32).eps * (2 + 1.5 * differences.double().abs())  # scores are rounded as well
    assert (errors <= allowed).all()
