"""Scales for a KV cache in 8 bits, measured before it is laid out: what keys and values of a few tokens are like."""

import hashlib
from collections.abc import Callable, Sequence

import torch

from kvern.attention.eight_bit import LARGEST_CODE
from kvern.cache.messages import StateMessage
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.runner.loaded_model import Runner
from kvern.runner.plan import Layout, Plan
from kvern.spec.model import ModelSpec

REQUESTS, TOKENS = 4, 128
"""Requests and tokens of random text: enough to show the range of each head."""
MARGIN = {torch.float8_e4m3fn: 2.0, torch.int8: 1.5}
"""The factor by which real text may store larger numbers than random. e4m3 loses nothing by it, integers half a bit."""


def measured_scales(
    make_runner: Callable[[Layout], Runner], spec: ModelSpec, plan: Plan, block_size: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The scales of each layer that attends, [2, kv_heads] float32, from the largest numbers that seeded tokens store.

    The same at every start: the tokens are, and so are the scales of e4m3, powers of two, if a kernel is another.
    `make_runner`: over a plain cache of this layout.
    """
    tokens = min(TOKENS, plan.max_model_len - 1)
    blocks = -(-tokens // block_size)
    layout = Layout(
        max_model_len=plan.max_model_len,
        blocks=REQUESTS * blocks,
        block_size=block_size,
        token_bytes=0,
        dtype=plan.plain_cache_dtype,
        max_batch_requests=REQUESTS,
        max_batch_tokens=REQUESTS * tokens,
        depth=1,
        attention={},
        device=plan.device,
        gpus=plan.gpus,
        states=REQUESTS if spec.recurrent else 0,
    )
    runner = make_runner(layout)
    params = ResolvedParams(temperature=0.0)
    generator = torch.Generator().manual_seed(0)
    for slot in range(REQUESTS):
        ids = torch.randint(spec.vocab_size, (tokens,), generator=generator).tolist()
        if spec.bos_token_id is not None:
            ids[0] = spec.bos_token_id
        asked = RequestSpec("", PromptInput(ids), params, 1)
        held = list(range(slot * blocks, (slot + 1) * blocks))
        joined = [NewRequest(slot, asked, params, 0, ids, held)]
        scheduled, states = [ScheduledTokens(slot, 0, tokens, 1)], StateMessage([], [(slot, slot)])
        extensions = states.by_name()
        runner.execute(SchedulerOutput(slot, joined=joined, scheduled=scheduled, extensions=extensions)).result()
    return [_scale(cache.abs().amax((1, 2, 4)).float(), dtype) for cache in runner.caches]


def _scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = largest * (MARGIN[dtype] / LARGEST_CODE[dtype])
    scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
    return scale.log2().ceil().exp2() if dtype.is_floating_point else scale


def digest(scales: Sequence[torch.Tensor]) -> str:
    """A digest that is the same for the same scales: 16 bytes in hexadecimal."""
    numbers = b"".join(scale.cpu().numpy().tobytes() for scale in scales)
    return hashlib.blake2b(numbers, digest_size=16).hexdigest()
