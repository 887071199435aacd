"""Prompts, and sampling parameters of all kinds, whose answers drafts must not change."""

from typing import Any

from kvern import SamplingParams
from kvern.request.sampling_params import StructuredOutput

PROMPTS = [[5, 9, 17, 33, 2, 81], [5, 9, 17, 33, 2, 80, 40, 41, 42, 43, 44, 45], [100] * 10]
LENGTH: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 5, **LENGTH}
DRY: dict[str, Any] = {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["the", "a b"]}
EVERYTHING = [
    SamplingParams(temperature=0, **LENGTH),
    SamplingParams(**DRAWN, n=3),
    SamplingParams(**DRAWN, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5, logprobs=1),
    SamplingParams(**DRAWN, logit_bias={7: 4.0, 9: -50.0}, logprobs=2),
    SamplingParams(**DRAWN, typical_p=0.6),
    SamplingParams(**DRAWN, allowed_token_ids=[3, 4, 5, 6, 7], bad_words=["a", "of"]),
    SamplingParams(temperature=1.5, seed=2, max_tokens=24, min_tokens=20, stop_token_ids=list(range(0, 200, 3))),
    SamplingParams(temperature=1.5, seed=3, max_tokens=24, stop_token_ids=list(range(0, 200, 7))),
    SamplingParams(**DRAWN, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(temperature=0, max_tokens=6, structured=StructuredOutput(regex="[ab]{3,9}")),
    SamplingParams(temperature=0, max_tokens=5, beam_width=2),
    SamplingParams(temperature=0, prompt_logprobs=1, **LENGTH),
    SamplingParams(temperature=0, **DRY, **LENGTH),
    SamplingParams(**DRAWN, **DRY, top_n_sigma=1.5, xtc_probability=0.5, xtc_threshold=0.02, dynatemp_range=0.5),
]
