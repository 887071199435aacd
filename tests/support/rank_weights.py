"""A comparison of ranks that hold packed weights and adapters with one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern import LLM, SamplingParams
from kvern.request.sampling_params import StructuredOutput
from tests.support.internals import check_integrity

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


ASKED = {
    "greedy": GREEDY,
    "seeded": GREEDY.replace(temperature=0.8, seed=3),
    "pattern": GREEDY.replace(structured=StructuredOutput(regex="20[0-9]{2}-(0[1-9]|1[0-2])"), ignore_eos=False),
    "beams": SamplingParams(beam_width=3, n=2, max_tokens=6, temperature=None),
}


PROMPTS = ["The quick brown fox jumps over the lazy dog, and the dog", "over the lazy dog"]


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 96,
    "max_batch_requests": 8,
    "max_batch_tokens": 24,
    "kv_cache_tokens": 1024,
}


TWO_RANKS = {"tensor_parallel_size": 2}


def answers(llm: LLM, adapters: list[str | None]) -> list[list[list[int]]]:
    """Every adapter with every way to be asked, in one batch and one after another: places change hands."""
    asked = [(prompt, params, name) for prompt in PROMPTS for params in ASKED.values() for name in adapters]
    prompts, params, names = map(list, zip(*asked, strict=True))
    outputs = llm.generate(prompts, params, adapter=names)
    outputs += [llm.generate(PROMPTS[0], GREEDY, adapter=name)[0] for name in (*adapters, *adapters)]
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def check_weights(
    model: Path, adapters: Mapping[str, Path], divided: Mapping[str, int] = TWO_RANKS, **options: Any
) -> list[list[list[int]]]:
    """The answers of two ranks, or of the `divided` model, which are those of one process."""
    given = {name: str(path) for name, path in adapters.items()}
    found = []
    for ranks in ({}, divided):
        with LLM(str(model), adapters=given, **(OPTIONS | options | ranks)) as llm:
            found.append(answers(llm, [None, *adapters]))
            check_integrity(llm)
    assert found[1] == found[0]
    return found[0]
