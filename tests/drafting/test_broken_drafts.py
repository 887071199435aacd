"""A request that a logits processor ends while drafts are verified leaves nothing wrong in the prefix cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.request.request import Request
from tests.support import processors
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, vocab_size_of
from tests.support.speculation import AnyLength

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 256,
    "block_size": 4,
    "kv_cache_tokens": 2048,
    "logits_processors": ("break",),
}
PROMPT = list(range(5, 20))


class Wrong:
    """Guesses what nobody says."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [[(request.token_ids[-1] * 7 + 11) % 80 + 5] * 3 for request in requests]


@pytest.mark.parametrize("family", ["kvern-1m", "qwen3_next"])
def test_an_answer_that_breaks_leaves_what_was_computed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(processors.install(tmp_path / "processors")))
    model = family if family.startswith("kvern") else str(make_checkpoint(family, tmp_path / "model"))
    fault = {"break": {"how": "nothing", "after": 4}}
    ending = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logits_processors=fault)
    after = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(model, **OPTIONS) as llm:
        core: Any = core_of(llm)
        core.drafting = AnyLength(Wrong(), vocab_size_of(llm))
        [broken] = llm.generate([PROMPT], ending, on_error="return")
        assert broken.outputs[0].finish_reason == "abort" and llm.statistics().draft_tokens
        core.drafting = None
        longer = [*PROMPT, *broken.outputs[0].token_ids, 33]
        [again] = llm.generate([longer], after)
        core.scheduler.check_integrity()
    with LLM(model, **OPTIONS, prefix_cache=False) as plain:
        core_of(plain).drafting = None
        [right] = plain.generate([longer], after)
    assert again.outputs[0].token_ids == right.outputs[0].token_ids
    found, expected = (
        [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or [], strict=True)]
        for output in (again.outputs[0], right.outputs[0])
    )
    assert found == pytest.approx(expected, abs=1e-3)
