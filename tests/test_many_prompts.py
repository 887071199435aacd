"""Five hundred prompts, greedy and sampled: tokens with drafts of anybody are those without."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.models.hub import resolve_model
from tests.draft_heads import write_eagle, write_medusa
from tests.speculation import AnyLength

MODEL = "kvern-12m"
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_batch_requests": 24, "max_batch_tokens": 96}
ROOM = {"kv_cache_tokens": 512, "block_size": 8, "prefix_cache": False}
"""For a few requests at a time."""
HEROES = ["a gull", "an old keeper", "two sisters", "a robot", "the baker", "a whale", "my cat", "a sailor", "ice", "I"]
PLACES = [
    "at sea",
    "in a tower",
    "on the hill",
    "by the fire",
    "in the rain",
    "at night",
    "at home",
    "afar",
    "up",
    "alone",
]
WISHES = ("Tell me of", "Write a poem about", "Repeat twice:", "List three facts of", "Why is there")


def asked() -> list[str]:
    return [f"{wish} {hero} {place}." for wish, hero, place in product(WISHES, HEROES, PLACES)]


def answers(llm: LLM) -> list[list[int]]:
    """Of each prompt, greedy, then with a temperature of 1."""
    params = [SamplingParams(temperature=t, seed=n, max_tokens=20) for t in (0, 1) for n in range(len(asked()))]
    return [
        output.outputs[0].token_ids
        for output in llm.chat([[{"role": "user", "content": text}] for text in asked()] * 2, params)
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(MODEL, speculation="off", **OPTIONS) as llm:
        return answers(llm)


def eagle(folder: Path) -> dict[str, Any]:
    write_eagle(folder / "head", resolve_model(MODEL))
    return {"draft_model": str(folder / "head")}


def medusa(folder: Path) -> dict[str, Any]:
    write_medusa(folder / "heads", resolve_model(MODEL))
    return {"draft_model": str(folder / "heads")}


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, ROOM])
@pytest.mark.parametrize(
    "drafting",
    [
        lambda folder: {"proposer": "ngram"},
        lambda folder: {"proposer": "suffix"},
        lambda folder: {"draft_model": "kvern-1m"},
        eagle,
        medusa,
    ],
    ids=["ngram", "suffix", "draft model", "eagle", "medusa"],
)
def test_tokens_are_those_without_drafts(
    drafting: Callable[[Path], dict[str, Any]], options: dict[str, Any], expected: list[list[int]], tmp_path: Path
) -> None:
    guessing = drafting(tmp_path)
    with LLM(MODEL, **OPTIONS, **options, **guessing) as llm:
        core: Any = llm._engine.core
        most = 3 if "draft_model" in guessing else 0
        core.drafting = AnyLength(core.drafting._proposer, llm._engine.inputs.vocab_size, most)
        found, statistics = answers(llm), llm.statistics()
    assert len(expected) == 1000
    assert [place for place, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]] == []
    assert statistics.draft_tokens > 1000
