"""Sampling parameters, and sizes of an engine, for drafts with models that have recurrent states."""

from typing import Any

from kvern import SamplingParams

LENGTH: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, **LENGTH),
    SamplingParams(temperature=1.0, seed=4, n=3, **LENGTH),
    SamplingParams(temperature=1.0, seed=5, logprobs=1, presence_penalty=1.0, **LENGTH),
    SamplingParams(temperature=1.0, seed=6, max_tokens=20, stop_token_ids=list(range(0, 200, 9))),
    SamplingParams(temperature=0, max_tokens=4, beam_width=2),
    SamplingParams(temperature=0, **LENGTH),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 64,
    "block_size": 4,
    "max_batch_requests": 8,
    "max_batch_tokens": 24,
    "kv_cache_tokens": 1024,
}
LITTLE_ROOM = {"kv_cache_tokens": 128, "max_batch_tokens": 13}
