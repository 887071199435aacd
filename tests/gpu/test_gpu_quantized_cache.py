"""Keys and values in 8 bits on a GPU: the CPU's answers by the same scales, whatever is switched on or off.

Run with `pytest -m gpu`.
"""

from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.attention.eight_bit import LARGEST_CODE, codes_of
from kvern.attention.selection import Shapes, make_queries, reference_attention
from kvern.attention.triton import TritonKernels, cached_layer
from kvern.spec.mixers import AttentionSpec
from tests.support.internals import engine_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

KINDS = ("fp8", "int8")
SMALL: dict[str, Any] = {"max_model_len": 512, "kv_cache_tokens": 32 * 512, "max_batch_requests": 16}
TEXT = "Once upon a time there was a small dog who lived near the sea. "
PROMPTS = [TEXT * count for count in (1, 3, 12, 2)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(llm: LLM) -> torch.Tensor:
    """Of the prompts' tokens."""
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    entries = (entry for output in outputs for entry in (output.prompt_logprobs or [])[1:])
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries if entry])


@pytest.fixture(scope="module")
def exact() -> dict[str, torch.Tensor]:
    """What the CPU finds in float32, by the kind of cache."""
    return {kind: logprobs(LLM(device="cpu", dtype="float32", kv_cache_dtype=kind, **SMALL)) for kind in KINDS}


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *(("float32", kind) for kind in KINDS),
        *(("bfloat16", kind) for kind in KINDS),
        ("float16", "fp8"),
        pytest.param("float16", "int8", marks=pytest.mark.nightly),
    ],
)
def test_logprobs_are_the_cpus(kind: str, dtype: str, exact: dict[str, torch.Tensor]) -> None:
    """As near to float32's as the CPU's of the same dtype are; where a code rounds to its neighbour, e4m3's is far."""
    options = SMALL | {"dtype": dtype, "kv_cache_dtype": kind, "speculation": "off"}  # a draft model takes memory, too
    there, here = (LLM(device=name, **options) for name in ("cpu", "cuda"))
    rounding, found = ((logprobs(llm) - exact[kind]).abs() for llm in (there, here))
    assert found.mean() < 1.5 * rounding.mean() + (0.04 if kind == "fp8" else 0.02)
    assert found.median() < 1.5 * rounding.median() + 0.002
    assert engine_of(here).layout.token_bytes == engine_of(there).layout.token_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": False},
        {"prefix_cache": False, "shared_prefix_attention": False},
        {"attention_backend": "torch_sdpa"},
        {"deterministic": True},
        {"max_batch_tokens": 64, "max_batch_requests": 4},
    ],
    ids=str,
)
def test_switches_leave_the_answers(kind: str, options: dict[str, Any]) -> None:
    """In float32, where kernels and PyTorch read the same codes."""
    llm = LLM(dtype="float32", kv_cache_dtype=kind, **SMALL)
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected, "from cached blocks"
    found = tokens(LLM(dtype="float32", kv_cache_dtype=kind, **(SMALL | options)).generate(PROMPTS, GREEDY))
    same = sum(a == b for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.9 * sum(map(len, expected)), "a code that rounds to its neighbour may change a word"


@pytest.mark.parametrize("dtype", LARGEST_CODE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_read_codes(dtype: torch.dtype, head_dim: int) -> None:
    """Decodes; runs that are few, long, and, on Hopper, long enough for its own kernel."""
    device = torch.device("cuda")
    layer = AttentionSpec(heads=8, kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)
    hopper = None
    if torch.cuda.get_device_capability() == (9, 0):
        from kvern.attention.hopper import HopperPrefill

        hopper = HopperPrefill([layer], device, 16, [0], dtype)
    kernels = TritonKernels([layer], device, 64, dtype=dtype, hopper=hopper)
    shapes = Shapes([layer], 16, torch.bfloat16, dtype, device, 64, 9000)
    for phase, requests in (
        (kernels.decode, [(0, 1), (77, 1), (4290, 1)]),
        (kernels.prefill, [(3000, 4), (2000, 3)]),
        (kernels.prefill, [(0, 70), (131, 33)]),
        (kernels.prefill, [(0, 700), (1310, 333)]),
    ):
        queries, query, numbers = make_queries(requests, shapes, layer)
        scales = torch.tensor([[0.01, 0.02], [0.03, 0.01]], device=device) * 448 / LARGEST_CODE[dtype]
        cache = torch.stack([codes_of(*kind, dtype) for kind in zip(numbers.flatten(1, 2), scales, strict=True)])
        cache = cache.view(numbers.shape)
        out = torch.full_like(query, float("nan"))
        phase(queries)(0, query, cached_layer(layer, cache, scales), out)
        expected = reference_attention(queries, query, cache.float() * scales[:, None, None, :, None], layer)
        assert ((out.float() - expected).abs().max() / expected.abs().max()).item() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, *LARGEST_CODE], ids=str)
@pytest.mark.parametrize(("requests", "longest"), [(1, 20480), (3, 9216), (40, 1024), (150, 512)])
def test_decodes_of_every_cut(dtype: torch.dtype, requests: int, longest: int) -> None:
    """Requests whose keys many programs share, some, and none; several times, because programs race."""
    device = torch.device("cuda")
    layer = AttentionSpec(heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
    kernels = TritonKernels([layer], device, requests, dtype=dtype)
    shapes = Shapes([layer], 16, torch.bfloat16, dtype, device, requests, longest)
    lengths = torch.linspace(longest, longest / 3, requests).int().tolist()
    queries, query, numbers = make_queries([(length - 1, 1) for length in lengths], shapes, layer)
    scales = torch.linspace(0.5, 2, 16, device=device).view(2, 8) * 4 / LARGEST_CODE.get(dtype, 4)
    cache, plain = numbers, numbers.float()
    if dtype in LARGEST_CODE:
        codes = [codes_of(*kind, dtype) for kind in zip(numbers.flatten(1, 2), scales, strict=True)]
        cache = torch.stack(codes).view(numbers.shape)
        plain = cache.float() * scales[:, None, None, :, None]
    expected = reference_attention(queries, query, plain, layer)
    cached = cached_layer(layer, cache, scales if dtype in LARGEST_CODE else None)
    decode, first = kernels.decode(queries), torch.empty_like(query)
    for turn in range(8):
        out = first if turn == 0 else torch.empty_like(query)
        out.fill_(float("nan"))
        decode(0, query, cached, out)
        assert torch.equal(out, first), "the order of arrival changes nothing"
    assert ((first.float() - expected).abs().max() / expected.abs().max()).item() < 0.02
