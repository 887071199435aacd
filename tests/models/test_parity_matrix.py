"""Every family through the whole engine, in every configuration of cache and scheduler, against transformers."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.support.families import FAMILIES, HYBRIDS, make_checkpoint
from tests.support.parity_reference import BLOCK, CHUNK, OUTPUT, TOLERANCE, Reference, check_outputs

SWITCHES = (("paged", "contiguous"), (True, False), (True, False), ("continuous", "static"))
OTHER_CHOICES = list(itertools.product((0, 1), repeat=len(SWITCHES)))[1:]


def matrix() -> Iterator[Any]:
    """All switches for all families.

    By day each family has the usual ones, and the first families one other choice each, which together are all.
    Language models of checkpoints that see images are those of other families: by day they have
    the usual ones alone. So have all but two with states, which go through the engine alike.
    """
    others = iter(OTHER_CHOICES)
    for family, (_, fields) in FAMILIES.items():
        is_like_others = "text_config" in fields or (family in HYBRIDS and family not in ("qwen3_next", "nemotron_h"))
        by_day = [(0,) * len(SWITCHES), *([] if is_like_others else itertools.islice(others, 1))]
        for choice in itertools.product((0, 1), repeat=len(SWITCHES)):
            values = [options[one] for options, one in zip(SWITCHES, choice, strict=True)]
            yield pytest.param(family, *values, marks=[] if choice in by_day else [pytest.mark.nightly])


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


@pytest.mark.sample(36)
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
        check_outputs(llm.generate(reference.prompts, params), reference)
    states_kept = family not in HYBRIDS or (chunked_prefill and kv_cache == "paged")
    assert (llm.statistics().cached_tokens > 0) == (prefix_cache and states_kept)


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        pytest.param(family, kv_cache, marks=[] if number % 16 == 8 * place else [pytest.mark.nightly])
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
