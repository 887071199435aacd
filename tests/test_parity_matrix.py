"""Every family through the whole engine, in every configuration of cache and scheduler, against transformers."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from tests.families import FAMILIES, HYBRIDS, WINDOW, make_checkpoint, reference_logits

BLOCK = 4
CHUNK = 7
OUTPUT = 8
TOLERANCE = 1e-4
SHARED = 5 * BLOCK + 1
LENGTHS = (1, BLOCK, SHARED + BLOCK, SHARED + WINDOW, SHARED + 2 * CHUNK + 2)
"""Prompts within a block, at its end, over several, over the window, and over several chunks."""

SWITCHES = (("paged", "contiguous"), (True, False), (True, False), ("continuous", "static"))
OTHER_CHOICES = list(itertools.product((0, 1), repeat=len(SWITCHES)))[1:]


def matrix() -> Iterator[Any]:
    """All switches for all families.

    By day each family has the usual ones, and one other choice, which differs from that of the next family, so that
    together they are all. Language models of checkpoints that see images are those of other families: by day they have
    the usual ones alone. So have all but two with states, which go through the engine alike.
    """
    others = itertools.cycle(OTHER_CHOICES)
    for family, (_, fields) in FAMILIES.items():
        is_like_others = "text_config" in fields or (family in HYBRIDS and family not in ("qwen3_next", "nemotron_h"))
        by_day = [(0,) * len(SWITCHES), *([] if is_like_others else [next(others)])]
        for choice in itertools.product((0, 1), repeat=len(SWITCHES)):
            values = [options[one] for options, one in zip(SWITCHES, choice, strict=True)]
            yield pytest.param(family, *values, marks=[] if choice in by_day else [pytest.mark.nightly])


class Reference:
    """What transformers says about the prompts of one family."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = random.Random(3)
        head = [rng.randrange(3, 131) for _ in range(SHARED)]
        self.prompts = [
            [rng.randrange(3, 131) for _ in range(length)]
            if length < SHARED
            else head + [rng.randrange(3, 131) for _ in range(length - SHARED)]
            for length in LENGTHS
        ]
        self.outputs, self.logprobs = [], []
        for prompt in self.prompts:
            tokens = list(prompt)
            for _ in range(OUTPUT):
                logits = reference_logits(folder, tokens)
                tokens.append(int(logits[-1].argmax()))
            self.outputs.append(tokens[len(prompt) :])
            self.logprobs.append(logits.log_softmax(-1))  # row i predicts token i + 1


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """By family, each made once: pytest would make it again for each test that has other parameters beside it."""
    return functools.cache(lambda family: Reference(make_checkpoint(family, tmp_path_factory.mktemp(family))))


def engine(reference: Reference, kv_cache: str, prefix_cache: bool, chunked_prefill: bool, batching: str) -> LLM:
    return LLM(
        str(reference.folder),
        kv_cache=kv_cache,
        prefix_cache=prefix_cache,
        chunked_prefill=chunked_prefill,
        batching=batching,
        block_size=BLOCK,
        max_model_len=64,
        kv_cache_tokens=8 * 64,
        max_batch_tokens=CHUNK,
        max_batch_requests=4,
        threads=1,
    )


def check(outputs: list[RequestOutput], reference: Reference) -> None:
    """Same tokens, and log-probabilities (logits up to a constant for each row) within the tolerance."""
    for output, tokens, logprobs in zip(outputs, reference.outputs, reference.logprobs, strict=True):
        [answer] = output.outputs
        assert answer.token_ids == tokens
        assert answer.logprobs is not None
        for position, entry in enumerate(answer.logprobs):
            expected = logprobs[len(output.prompt_token_ids) - 1 + position]
            ids = torch.tensor(list(entry))
            actual = torch.tensor([value.logprob for value in entry.values()])
            torch.testing.assert_close(actual, expected[ids], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "kv_cache", "prefix_cache", "chunked_prefill", "batching"), list(matrix()))
def test_tokens_and_logits_equal_transformers(
    references: Callable[[str], Reference],
    family: str,
    kv_cache: str,
    prefix_cache: bool,
    chunked_prefill: bool,
    batching: str,
) -> None:
    reference = references(family)
    llm = engine(reference, kv_cache, prefix_cache, chunked_prefill, batching)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=100)
    for _ in range(2):  # the second time, prompts and answers are in the prefix cache
        check(llm.generate(reference.prompts, params), reference)
    states_kept = family not in HYBRIDS or (chunked_prefill and kv_cache == "paged")
    assert (llm.statistics().cached_tokens > 0) == (prefix_cache and states_kept)


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        pytest.param(family, kv_cache, marks=[pytest.mark.nightly] if number % len(SWITCHES[0]) != place else [])
        for number, family in enumerate(FAMILIES)
        for place, kv_cache in enumerate(SWITCHES[0])
    ],
)
def test_prompt_logprobs_equal_transformers(references: Callable[[str], Reference], family: str, kv_cache: str) -> None:
    reference = references(family)
    llm = engine(reference, kv_cache, True, True, "continuous")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
    for output, expected in zip(llm.generate(reference.prompts, params), reference.logprobs, strict=True):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None and output.prompt_token_ids[position + 1] in entry
            for token, value in entry.items():
                assert value.logprob == pytest.approx(float(expected[position, token]), abs=TOLERANCE)
