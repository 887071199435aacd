"""Models that read images: features of requests beside images, and options of an engine."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from tests.support.combined_batches import EVERYWHERE, check_combinations
from tests.support.combined_features import FEATURES, Alone, Ask, file_of
from tests.support.combined_images import seeing_model
from tests.support.combined_requests import TOGETHER
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, vocab_size_of
from tests.support.speculation import AnyLength, speculating
from tests.support.tiers import HOST, PAGE_TOKENS, figures, forget, trust
from tests.support.vision_models import make_vision_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
BY_DAY = "mistral3"
KINDS = [BY_DAY, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("qwen3_vl", "qwen3_5"))]


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    made = Alone(**seeing_model(request.param, tmp_path_factory.mktemp(request.param)))
    yield made
    made.check()


PAIRS = [
    pytest.param(
        frozenset({feature, "images"}),
        id=feature,
        marks=[pytest.mark.features(feature, "images"), *([] if feature == "images" else [pytest.mark.nightly])],
    )
    for feature in FEATURES
]


@pytest.mark.parametrize("features", PAIRS)
def test_a_feature_beside_images(features: frozenset[str], alone: Alone) -> None:
    check_combinations([features], alone)


@pytest.mark.nightly
@pytest.mark.features(*FEATURES)
def test_everything_beside_images(alone: Alone) -> None:
    """All requests with features have images, in one batch that is streamed, preempted and taken from the cache."""
    check_combinations([features | EVERYWHERE | {"images"} for features in TOGETHER], alone, times=1)


PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 256, "max_batch_requests": 8}


def conversation(number: int) -> list[dict[str, Any]]:
    """Two in three have an image, some of them the same."""
    number %= 5
    image = file_of(60 + 10 * number, 90, number) if number % 3 else None
    return Ask("What is it?", PARAMS, image=image).messages


def conversations() -> list[list[dict[str, Any]]]:
    return [conversation(number) for number in range(7)]


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_vision_model(request.param, tmp_path / "model")


NEAR = {"quantization": {"quantization": "int8"}, "KV cache in INT8": {"kv_cache_dtype": "int8"}}


@pytest.mark.parametrize("options", [pytest.param(NEAR[name], id=name, marks=pytest.mark.nightly) for name in NEAR])
@pytest.mark.parametrize("folder", [BY_DAY], indirect=True)
def test_numbers_of_fewer_bits_stay_near(folder: Path, options: dict[str, Any]) -> None:
    def numbers(**more: Any) -> torch.Tensor:
        params = PARAMS.replace(max_tokens=1, prompt_logprobs=0, logprobs=None)
        with LLM(str(folder), **OPTIONS, **more) as llm:
            outputs = llm.chat(conversations(), params)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry]
        return torch.tensor([next(iter(entry.values())).logprob for entry in entries])

    plain, found = numbers(), numbers(**options)
    assert 0 < (found - plain).abs().median() < 0.1 * plain.std()


@pytest.mark.parametrize(
    "folder",
    [BY_DAY, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("gemma3", "qwen3_5"))],
    indirect=True,
)
def test_images_come_out_of_a_tier(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that left the cache come back for the same image alone."""
    monkeypatch.setattr(PAGE_TOKENS, 8)
    tiered = OPTIONS | {"kv_cache_tokens": 64, "block_size": 4, "max_model_len": 64, "kv_tier": HOST}
    asked = [conversation(number) for number in (1, 2, 4)]
    with LLM(str(folder), **OPTIONS, prefix_cache=False) as llm:
        expected = [answers(llm.chat(one, PARAMS)) for one in asked]
    with LLM(str(folder), **tiered) as llm:
        trust(llm)
        for _ in range(2):
            assert [answers(llm.chat(one, PARAMS)) for one in asked] == expected
            forget(llm)
        assert figures(llm).hit_tokens


@pytest.mark.parametrize("folder", [BY_DAY], indirect=True)
def test_images_are_read_with_the_same_bits_alone_and_in_a_batch(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS | {"dtype": "bfloat16"}, deterministic=True, prefix_cache=False) as llm:
        together = [output.outputs for output in llm.chat(conversations(), PARAMS)]
        assert [llm.chat(one, PARAMS)[0].outputs for one in conversations()] == together


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(BY_DAY, marks=pytest.mark.nightly),
        pytest.param("qwen3_5", marks=pytest.mark.nightly),
    ],
    indirect=True,
)
def test_drafts_after_images_change_nothing(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS, prefix_cache=False, proposer="ngram") as llm:
        core_of(llm).drafting = None
        expected = llm.chat(conversations(), PARAMS)
        with speculating(llm, expected, 0.7):
            assert answers(llm.chat(conversations(), PARAMS)) == answers(expected)
            counts = llm.statistics()
    assert 0 < counts.accepted_tokens < counts.draft_tokens


@pytest.mark.parametrize("folder", [BY_DAY], indirect=True)
def test_a_draft_model_may_see_no_images(folder: Path, tmp_path: Path) -> None:
    draft = make_checkpoint("llama", tmp_path / "draft", vocab_size=320, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, draft)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = llm.chat(conversations(), PARAMS)
    with LLM(str(folder), **OPTIONS, draft_model=str(draft)) as llm:
        core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), on_device=3)
        assert answers(llm.chat(conversations(), PARAMS)) == answers(expected)
        assert llm.statistics().draft_tokens
