"""Attention of decodes over a paged cache, beside the time that its bytes take: checked, then timed.

    python benchmarks/decode_attention.py
    python benchmarks/decode_attention.py --bandwidth 3.2

Takes one GPU. Times are microseconds of one call among several in a CUDA graph, medians. Contexts are those of requests
with prompts and answers of 100 to 1024 tokens some steps after they began, all of one length, or one long one among
short ones.
"""

import argparse
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from kvern.attention.eight_bit import LARGEST_CODE, codes_of
from kvern.device.timing import time_calls
from kvern.kernels.attention_arguments import CachedLayer, Decodes
from kvern.kernels.attention_decode import decode_attention, decode_shape
from kvern.kernels.launch import processors

BLOCK_SIZE = 16
HEADS, HEAD_DIM = 32, 128
CALLS = 6
"""Of each of two caches, so that none is in the card's own cache."""
MIXED = (
    (4, 8, 500), (16, 8, 300), (32, 4, 800), (32, 8, 300), (48, 4, 500), (64, 4, 600), (80, 4, 400), (96, 4, 300),
    (112, 4, 250), (128, 4, 60), (64, 8, 800), (224, 4, 250), (128, 8, 500), (256, 8, 60),
)  # fmt: skip
"""Requests, KV heads, and steps after they began."""


class Case(NamedTuple):
    name: str
    kv_heads: int
    lengths: list[int]
    dtype: torch.dtype = torch.bfloat16


def mixed(requests: int, steps: int) -> list[int]:
    """Contexts of those of several requests that still have no end."""
    chance = random.Random(0)
    pairs = [(chance.randint(100, 1024), chance.randint(100, 1024)) for _ in range(4 * requests)]
    return [prompt + steps for prompt, answer in pairs if answer > steps][:requests]


def cases() -> Iterator[Case]:
    for requests, kv_heads, steps in MIXED:
        yield Case(f"mixed, {steps} steps", kv_heads, mixed(requests, steps))
    for requests, length in ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (256, 1024), (256, 40), (256, 200)):
        yield Case("alike", 8, [length] * requests)
    for requests, length in ((1, 32_768), (1, 131_072), (4, 16_384)):
        yield Case("long", 8, [length] * requests)
    for requests in (32, 112, 256):
        yield Case("one of 8192", 4, [8192] + [300] * (requests - 1))
    for requests in (1, 16, 32, 64, 128, 256):
        yield Case("mixed, e4m3", 8, mixed(requests, 250), torch.float8_e4m3fn)


def measure(case: Case, bandwidth: float) -> tuple[int, int, float, float]:
    """Requests, keys, and microseconds: of their bytes, and measured; raises if an answer is wrong."""
    device, count = torch.device("cuda"), len(case.lengths)
    blocks = [-(-length // BLOCK_SIZE) for length in case.lengths]
    shape = 2, sum(blocks), BLOCK_SIZE, case.kv_heads, HEAD_DIM
    plain = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    scales, caches = None, plain
    if case.dtype != torch.bfloat16:
        scales = torch.full((2, case.kv_heads), 5 / LARGEST_CODE[case.dtype], device=device)
        caches = [codes_of(each.flatten(0, 2), scales[0], case.dtype).view(shape) for each in plain]
    free = iter(torch.randperm(sum(blocks)).tolist())
    table = torch.zeros(count, max(blocks), dtype=torch.int32)
    for request, size in enumerate(blocks):
        table[request, :size] = torch.tensor([next(free) for _ in range(size)])
    table, slots = table.to(device), torch.arange(count, dtype=torch.int32, device=device)
    starts = torch.tensor(case.lengths, dtype=torch.int32, device=device) - 1
    query = torch.randn(count, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    out, arrived = torch.full_like(query, float("nan")), torch.zeros(count * case.kv_heads, device=device).int()
    cut = decode_shape(count, case.kv_heads, HEAD_DIM, processors(device), case.dtype.itemsize)

    def attend(cache: torch.Tensor) -> None:
        layer = CachedLayer(cache, 0.088, scales=scales)
        decode_attention(query, layer, table, Decodes(slots, starts), arrived, out, cut)

    attend(caches[0])
    for request in {0, count - 1}:
        held = caches[0].view(torch.uint8)[:, table[request].long()].view(case.dtype)  # numbers of 8 bits have no index
        near(out[request], query[request], held, scales, case.lengths[request])
    seconds = time_calls([partial(attend, cache) for cache in caches * CALLS])
    moved = sum(case.lengths) * case.kv_heads * 2 * HEAD_DIM * case.dtype.itemsize
    return count, sum(case.lengths), moved / bandwidth / 1e6, seconds * 1e6


def near(found: torch.Tensor, query: torch.Tensor, cache: torch.Tensor, scales: Any, length: int) -> None:
    """Whether one request's answer is that of float64."""
    numbers = cache.double() if scales is None else cache.double() * scales[:, None, None, :, None]
    key, value = numbers.flatten(1, 2)[:, :length].repeat_interleave(HEADS // cache.shape[3], 2)
    weights = (torch.einsum("hd,khd->hk", query.double(), key) * 0.088).softmax(-1)
    torch.testing.assert_close(found.double(), torch.einsum("hk,khd->hd", weights, value), rtol=2e-2, atol=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that the card reads (default: %(default)s)")
    arguments = parser.parse_args()
    print("requests  KV heads     keys  bytes  measured")
    for case in cases():
        requests, keys, bytes_take, took = measure(case, arguments.bandwidth)
        print(f"{requests:8}  {case.kv_heads:8}  {keys:7}  {bytes_take:5.1f}  {took:8.1f}  {case.name}", flush=True)


if __name__ == "__main__":
    main()
