"""Keys and values that no query sees are others': blocks that a window has passed, and what lies behind a context."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.attention import paged
from kvern.attention.eight_bit import LARGEST_CODE, codes_of
from kvern.attention.flash_attn import FlashAttnKernels, held_blocks
from kvern.attention.selection import Shapes, make_queries, reference_attention
from kvern.attention.triton import cached_layer
from kvern.runner.device_runner import DeviceRunner
from kvern.spec.mixers import AttentionSpec
from tests.support.families import make_checkpoint, prompts_with_windows
from tests.support.kernels.attention_batches import (
    Batch,
    attention_reference,
    decode,
    give_back,
    make_batch,
    prefill,
    split,
)
from tests.support.kernels.references import relative_error
from tests.support.outputs import chosen_logprobs, token_ids
from tests.support.spoiled_blocks import spoiled_engine

KERNELS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "decode": (decode, True),
    "decode, its keys shared out": (lambda *given, **options: decode(*given, programs=40, **options), True),
    "decode, tiles as long as several blocks": (lambda *given, **options: decode(*given, keys=64, **options), True),
    "prefill": (prefill, False),
    "split": (split, False),
    "split, its keys shared out": (lambda *given, **options: split(*given, splits=3, **options), False),
}
"""How each is launched, and whether it takes single queries."""


def in_codes(batch: Batch, dtype: torch.dtype) -> tuple[Batch, Batch, torch.Tensor]:
    """With a cache in 8 bits, with the numbers that it stands for, and its scales."""
    scales = torch.tensor([[0.7, 1.3], [1.1, 0.9]], device=batch.cache.device) * 4 / LARGEST_CODE[dtype]
    codes = [codes_of(kind.flatten(0, 1), scale, dtype) for kind, scale in zip(batch.cache, scales, strict=True)]
    cache = torch.stack(codes).view(batch.cache.shape)
    plain = cache.float() * scales[:, None, None, :, None]
    return batch._replace(cache=cache), batch._replace(cache=plain), scales


def lives(seed: int, single: bool) -> tuple[int, int, list[int], list[int]]:
    """A window, the size of blocks, and where requests are: most of them far beyond the window."""
    chance = random.Random(seed)
    window, size = chance.randint(1, 40), chance.choice([4, 8, 16, 24, 64])
    starts = [chance.randint(0, 40), chance.randint(60, 150), window + size * chance.randint(1, 3)]
    return window, size, starts, [1 if single else chance.choice([1, 2, 5, 19]) for _ in starts]


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 40))])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_a_window_passed_is_not_read(kernel: str, seed: int, device: torch.device) -> None:
    attend, single = KERNELS[kernel]
    window, size, starts, counts = lives(seed, single)
    batch = make_batch(device, starts, counts, 4, 2, 16, torch.float32, size)
    expected = attention_reference(batch, 0.3, window, None)
    give_back(batch, window)
    assert relative_error(attend(batch, window=window), expected) < 1e-5


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", LARGEST_CODE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_that_a_window_passed_are_not_read(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of e4m3 some code is no number; integers are numbers, and what they stand for is large."""
    attend, single = KERNELS[kernel]
    window, size, starts, counts = lives(0, single)
    coded, plain, scales = in_codes(make_batch(device, starts, counts, 4, 2, 16, torch.float32, size), dtype)
    expected = attention_reference(plain, 0.3, window, None)
    give_back(coded, window)
    assert relative_error(attend(coded, window=window, scales=scales), expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *LARGEST_CODE], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_a_window_passed_is_not_read_on_a_gpu(kernel: str, dtype: torch.dtype) -> None:
    """In tiles of several stages, which are fetched ahead."""
    device, (attend, single) = torch.device("cuda"), KERNELS[kernel]
    for window, size in ((1, 16), (100, 16), (128, 16), (130, 64), (50, 24)):
        counts = [1, 1, 1] if single else [70, 3, 128]
        batch = make_batch(device, [900, 300, 63], counts, 8, 2, 128, torch.bfloat16, size)
        plain, scales = batch, None
        if dtype in LARGEST_CODE:
            batch, plain, scales = in_codes(batch, dtype)
        expected = attention_reference(plain, 0.3, window, None)
        give_back(batch, window)
        assert relative_error(attend(batch, window=window, scales=scales), expected) < 2e-2


def test_a_table_names_no_blocks_that_a_window_passed() -> None:
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    found = held_blocks(table, torch.tensor([0, 19, 31], dtype=torch.int32), window=9, block_size=4)
    assert found.dtype == torch.int32
    assert found.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [10, 10, 10, 11, 12, 13, 14, 15],
        [21, 21, 21, 21, 21, 21, 22, 23],
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("requests", [[(900, 1), (300, 1), (63, 1)], [(900, 70), (300, 3), (63, 128)]], ids=str)
def test_flash_attention_reads_no_blocks_that_a_window_passed(requests: list[tuple[int, int]]) -> None:
    pytest.importorskip("flash_attn.cute")
    device, layer = torch.device("cuda"), AttentionSpec(heads=8, kv_heads=2, head_dim=128, scale=0.1, window=100)
    shapes = Shapes([layer], 16, torch.bfloat16, torch.bfloat16, device, 8, 2000)
    queries, query, cache = make_queries(requests, shapes, layer)
    expected, out = reference_attention(queries, query, cache, layer), torch.empty_like(query)
    for row, (start, _) in zip(queries.block_table, requests, strict=True):
        cache[:, row[: max(0, start + 1 - 100) // 16].long()] = float("nan")
    FlashAttnKernels([layer]).prefill(queries)(0, query, cached_layer(layer, cache), out)
    assert relative_error(out, expected) < 2e-2


@pytest.mark.nightly
def test_an_engine_of_kernels_reads_no_blocks_that_others_had(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, given = make_checkpoint("gemma3", tmp_path), [prompt[:24] for prompt in prompts_with_windows()[1:3]]
    sizes: dict[str, Any] = {"block_size": 4, "max_model_len": 28, "kv_cache_tokens": 64, "max_batch_tokens": 24}
    options = sizes | {"max_batch_requests": 2, "dtype": "float32", "prefix_cache": False}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    expected = LLM(str(folder), device="cpu", **options).generate(given, params)
    llm, spoiled = spoiled_engine(monkeypatch, lambda: on_device(folder, **options), DeviceRunner, [paged])
    found = llm.generate(given, params)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
    assert spoiled
