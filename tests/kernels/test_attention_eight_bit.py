"""Every kernel over a cache in 8 bits: beside float64 over the numbers that its codes stand for."""

from collections.abc import Iterator

import pytest
import torch

from kvern.attention.eight_bit import LARGEST_CODE, codes_of
from kvern.attention.selection import Shapes, make_queries, reference_attention
from kvern.attention.triton import TritonKernels
from kvern.kernel_list import KERNELS, Call, Inputs
from kvern.kernels.batch import copy_pool_blocks
from kvern.kernels.rotary import rotate_and_store
from kvern.model_spec import AttentionSpec
from tests.kernels.models import LARGE_MODELS, spec_of

EIGHT_BIT = list(LARGEST_CODE)
READING = ("decode attention", "prefill attention", "split attention")


def some_calls() -> Iterator[Call]:
    """What a model with a cache in 8 bits launches, in the last form of each kernel; to be compiled."""
    spec = spec_of("llama", LARGE_MODELS)
    for dtype in EIGHT_BIT:
        inputs = Inputs(torch.device("cpu"), torch.bfloat16, "empty", cache_dtype=dtype)
        for kernel in KERNELS:
            if kernel.name in (*READING, "rotate and store"):
                yield kernel.make(spec, inputs, *list(kernel.launched(spec, inputs))[-1])


LAUNCHES = [call.launch for call in some_calls()]


@pytest.mark.parametrize(
    ("model", "forms"),
    [("llama", slice(-1, None)), ("gemma2", slice(-1, None))]
    + [pytest.param(model, slice(None), marks=pytest.mark.nightly) for model in ("llama", "gemma2", "glm4")],
    ids=str,
)
@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_kernels_that_read_codes(model: str, forms: slice, dtype: torch.dtype, device: torch.device) -> None:
    spec, inputs = spec_of(model), Inputs(device, torch.float32, block_size=4, cache_dtype=dtype)
    for kernel in KERNELS:
        for arguments in list(kernel.launched(spec, inputs))[forms] if kernel.name in READING else ():
            call = kernel.make(spec, inputs, *arguments)
            expected = call.reference()
            torch.testing.assert_close(call.launch().double(), expected, rtol=2e-3, atol=4e-3, msg=kernel.name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_a_plan_of_runs_reads_codes(dtype: torch.dtype, deterministic: bool, device: torch.device) -> None:
    layer = AttentionSpec(heads=8, kv_heads=2, head_dim=16, scale=0.25)
    shapes = Shapes([layer], 4, torch.float32, dtype, device, 8, 2000)
    queries, query, numbers = make_queries([(130, 3), (20, 5)], shapes, layer)
    scales = torch.tensor([[0.01, 0.03], [0.02, 0.05]], device=device) * 448 / LARGEST_CODE[dtype]
    kinds = zip(numbers.flatten(1, 2), scales, strict=True)
    cache = torch.stack([codes_of(*kind, dtype) for kind in kinds]).view(numbers.shape)
    out = torch.full_like(query, float("nan"))
    TritonKernels([layer], device, 8, deterministic, dtype).prefill(queries)(0, query, cache, out, scales)
    expected = reference_attention(queries, query, cache.float() * scales[:, None, None, :, None], layer)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("dtype", "interleaved"), [*zip(EIGHT_BIT, [True, False], strict=True)], ids=str)
def test_what_is_written(dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    """Each code is the nearest, of two the even one; what is too large becomes the largest."""
    tokens, heads, kv_heads, dim = 10, 4, 2, 20
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator)
    qkv *= torch.logspace(-6, 3, tokens)[:, None]  # from what is zero to what has no code
    scales = torch.tensor([[0.01, 0.03], [0.25, 2.0]], device=device)
    given = qkv.to(device).view(tokens, -1, dim)
    cache = torch.zeros(2, 6, 4, kv_heads, dim, dtype=torch.uint8, device=device).view(dtype)
    places = torch.arange(tokens, device=device)
    rotate_and_store(
        given.clone().flatten(1),
        places,
        places,
        None,
        cache,
        query_heads=heads,
        interleaved=interleaved,
        scales=scales,
    )
    for kind, scale in enumerate(scales):
        first = heads + kind * kv_heads
        expected = codes_of(given[:, first : first + kv_heads], scale, dtype)
        found = cache[kind].flatten(0, 1)[:tokens]
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert cache.float().abs().max() == LARGEST_CODE[dtype]


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_blocks_are_copied(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(256, (2, 6, 4, 3, 6), dtype=torch.uint8, generator=generator).to(device)
    expected = pool.clone()
    expected[:, [4, 1]] = pool[:, [1, 2]]
    indices = (torch.tensor(numbers, device=device) for numbers in ([1, 2], [4, 1], [0, 1]))
    copy_pool_blocks(pool.view(dtype), *indices)
    assert torch.equal(pool, expected)
