"""Every kernel over a cache in 8 bits: beside float64 over the numbers that its codes stand for."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.attention.eight_bit import LARGEST_CODE, codes_of
from kvern.attention.selection import Shapes, make_queries, reference_attention
from kvern.attention.triton import TritonKernels, cached_layer
from kvern.kernels.attention_prefill import PrefillShape, prefill_attention
from kvern.kernels.batch import copy_pool_blocks
from kvern.kernels.cache_plain import plain_blocks
from kvern.kernels.rotary import rotate_and_store
from kvern.runner import cache_scales
from kvern.spec.mixers import AttentionSpec
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.support.families import make_checkpoint
from tests.support.internals import check_integrity
from tests.support.kernel_list import KERNELS, Call, Inputs

EIGHT_BIT = list(LARGEST_CODE)
READING = ("decode attention", "prefill attention", "split attention")


def some_calls() -> Iterator[Call]:
    """What models with a cache in 8 bits launch, one of small heads: the last form of each kernel, to be compiled."""
    for spec, dtype in product((spec_of("llama", LARGE_MODELS), spec_of("llama")), EIGHT_BIT):
        inputs = Inputs(torch.device("cpu"), torch.bfloat16, "empty", cache_dtype=dtype)
        for kernel in KERNELS:
            if kernel.name in (*READING, "rotate and store", "plain keys and values for it"):
                yield from (kernel.make(spec, inputs, *form) for form in list(kernel.launched(spec, inputs))[-1:])


LAUNCHES = [call.launch for call in some_calls()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "forms"),
    [("gemma2", slice(-1, None))]
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
    TritonKernels([layer], device, 8, deterministic, dtype).prefill(queries)(
        0, query, cached_layer(layer, cache, scales), out
    )
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


@pytest.mark.nightly
def test_an_engine_of_kernels_answers_as_pytorch(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By scales that each measures for itself, and from cached blocks."""
    monkeypatch.setattr(cache_scales, "REQUESTS", 1)
    monkeypatch.setattr(cache_scales, "TOKENS", 6)  # interpreted programs take milliseconds each
    folder = make_checkpoint("llama", tmp_path / "model")
    sizes: dict[str, Any] = {"max_model_len": 24, "kv_cache_tokens": 64, "max_batch_requests": 2, "block_size": 4}
    options = {"kv_cache_dtype": "fp8", "dtype": "float32"} | sizes
    prompts = [[5, 9, 17, 33, 2, 81], [5, 9, 17, 33, 7]]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    expected, llm = LLM(str(folder), device="cpu", **options), on_device(folder, **options)
    answers = [answer.outputs[0].token_ids for answer in expected.generate(prompts, params)]
    assert [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)] == answers
    assert [answer.outputs[0].token_ids for answer in llm.generate(prompts[:1], params)] == answers[:1]
    check_integrity(llm)


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_blocks_become_plain(dtype: torch.dtype, device: torch.device) -> None:
    inputs = Inputs(device, torch.float32, cache_dtype=dtype)
    cache, scales = inputs.cache(dtype, 2, 7, 4, 3, 20)
    assert scales is not None
    wanted = torch.tensor([5, 0, 5, 6], dtype=torch.int32, device=device)
    found = plain_blocks(cache, scales, wanted, torch.float32)
    torch.testing.assert_close(found, (cache.float() * scales[:, None, None, :, None])[:, wanted.long()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernel stands for Gluon's, which needs a Hopper")
def test_long_runs_become_plain_for_hopper(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What is planned for the kernel that reads no codes is what the one reads that does."""
    from kvern.attention import hopper

    def stand_in(*given: Any) -> None:
        *given, _ = given
        prefill_attention(*given, PrefillShape(128, 32, 4, 2))

    monkeypatch.setattr(hopper, "hopper_prefill", stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    layer, dtype = AttentionSpec(heads=2, kv_heads=1, head_dim=16, scale=0.25), torch.float8_e4m3fn
    shapes = Shapes([layer], 8, torch.float32, dtype, device, 8, 2000)
    queries, query, numbers = make_queries([(21, 300), (0, 260)], shapes, layer)
    scales = torch.tensor([[0.0625], [0.03125]])
    cache = torch.stack([codes_of(*kind, dtype) for kind in zip(numbers.flatten(1, 2), scales, strict=True)])
    cache = cache.view(numbers.shape)
    planner = hopper.HopperPrefill([layer], device, 8, [0], dtype)
    assert planner.pays(queries)
    assert not planner.pays(make_queries([(21, 300), (0, 100)], shapes, layer)[0]), "too short"
    assert not planner.pays(replace(queries, known_tiles=queries.tiles)), "in a graph"
    assert not planner.pays(replace(queries, starts=[1 << 23, 0])), "too much memory"
    out = torch.full_like(query, float("nan"))
    planner.prefill(queries)(0, query, cached_layer(layer, cache, scales), out)
    expected = reference_attention(queries, query, cache.float() * scales[:, None, None, :, None], layer)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
