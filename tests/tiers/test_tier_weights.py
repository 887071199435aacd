"""KV tiers and the prefix tree of an engine whose weights change: pages and blocks of old weights are found no more."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from kvern import LLM, SamplingParams
from tests.support.internals import check_integrity, engine_of
from tests.support.new_weights import change_weights, perturbed
from tests.support.tiers import GREEDY, answer, forget, trust

OPTIONS: dict[str, Any] = {"max_model_len": 256, "kv_cache_tokens": 1024, "threads": 1, "block_size": 8}
PROMPT = [*range(10, 160)]


@pytest.fixture(scope="module")
def new(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("new") / "new.safetensors"
    save_file(perturbed(tiny_model), file)
    return file


def test_a_tier_gives_no_pages_of_other_weights(tiny_model: Path, new: Path) -> None:
    with LLM(str(tiny_model), kv_tier=("host:32MB",), **OPTIONS) as llm:
        trust(llm)
        old, _ = answer(llm, PROMPT)
        forget(llm)
        assert answer(llm, PROMPT)[1] >= 64, "pages of the same weights are found"
        forget(llm)
        change_weights(llm, "1", new)
        found, cached = answer(llm, PROMPT)
        assert cached == 0 and found.token_ids != old.token_ids
        forget(llm)
        again, cached = answer(llm, PROMPT)
        assert cached >= 64 and again.token_ids == found.token_ids
        change_weights(llm, "2", tiny_model)
        back, cached = answer(llm, PROMPT)
        assert cached == 0 and back.token_ids == old.token_ids
        check_integrity(llm)


@pytest.mark.sample(1)
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_requests_that_run_share_nothing_with_later_ones(
    tiny_model: Path, new: Path, keep: bool, prefix_cache: bool
) -> None:
    """Three samples of a prompt, of which two wait while the weights change, and the same prompt afterwards."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=3)
    with LLM(str(tiny_model), max_batch_requests=2, prefix_cache=prefix_cache, **OPTIONS) as llm:
        engine = engine_of(llm)
        (sampled,) = llm.generate([PROMPT], params)
        old = sampled.outputs[0].token_ids
        running = engine.add("running", [*PROMPT, 1], params)
        while len(running.outputs[0].token_ids) < 9:
            engine.step()
        known = list(running.outputs[0].token_ids)
        change_weights(llm, "1", new, keep=keep)
        check_integrity(llm)
        while engine.has_work:
            engine.step()
        assert [len(one.token_ids) for one in running.outputs] == [40, 40, 40]
        assert running.outputs[0].token_ids[: len(known)] == known
        longer = [*PROMPT, 1, *running.outputs[0].token_ids[:30]]
        found, cached = answer(llm, longer)
        again, _ = answer(llm, PROMPT)
        check_integrity(llm)
        assert again.token_ids != old[:6]
        kept = len(PROMPT) + 1  # of the sample that waited
        assert (cached > kept) == (prefix_cache and not keep)
    with LLM(str(tiny_model), **OPTIONS) as llm:
        change_weights(llm, "1", new)
        assert answer(llm, longer)[0].token_ids == found.token_ids
        if not keep:
            (rest,) = llm.generate([[*PROMPT, 1, *known]], params.replace(n=1, max_tokens=40 - len(known)))
            assert running.outputs[0].token_ids == known + rest.outputs[0].token_ids
        assert answer(llm, PROMPT, GREEDY)[0].token_ids == again.token_ids
