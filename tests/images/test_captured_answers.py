"""Answers about images on a CPU are captured decodes, whose tokens turn as their row says."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, RequestOutput, SamplingParams
from kvern.device.rows import BatchRows
from kvern.request.step import NewRequest
from kvern.runner.captured_decodes import CapturedDecodes
from tests.support.cache_folder import load_kernels, pretend_tiles
from tests.support.vision_models import make_vision_model, picture

PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
]
PICTURES = [picture(100, 130), picture(64, 40), None]
QUESTIONS = ["what is in this picture", "and in that one and in that one", "what is in that one and in that one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("qwen3_vl", tmp_path_factory.mktemp("vision") / "qwen3_vl")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels("cpu_sampling", 1)
    pretend_tiles(monkeypatch, there=False)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Whether steps may be captured, and how many are."""
    found: dict[str, Any] = {"lets": True, "captured": 0}

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def ran(*given: Any) -> Any:
            result = run(*given) if found["lets"] else None
            found["captured"] += result is not None
            return result

        return ran

    for name in ("decode", "score"):
        monkeypatch.setattr(CapturedDecodes, name, counted(getattr(CapturedDecodes, name)))
    return found


def answers(folder: Path, **options: Any) -> list[RequestOutput]:
    """Two conversations with pictures and one without, in the same steps."""
    talks = []
    for image, question in zip(PICTURES, QUESTIONS, strict=True):
        parts = [] if image is None else [{"type": "image", "image": image}]
        talks.append([{"role": "user", "content": [*parts, {"type": "text", "text": question}]}])
    given: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 512, "max_batch_requests": 8}
    given |= options
    with LLM(str(folder), **given) as llm:
        return llm.chat(talks, PARAMS)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", [{}, {"proposer": "ngram"}, {"kv_cache_tokens": 96, "block_size": 4, "max_model_len": 96}], ids=str
)
def test_captured_or_not_they_are_the_same(options: dict[str, Any], folder: Path, steps: dict[str, Any]) -> None:
    found = answers(folder, **options)
    assert steps["captured"] > 5
    steps["lets"] = False
    expected = answers(folder, **options)
    assert tokens(found) == tokens(expected)
    logprobs = [output.outputs[0].logprobs for output in (found[0], expected[0])]
    for one, other in zip(*(each or [] for each in logprobs), strict=True):
        assert {token: entry.logprob for token, entry in one.items()} == pytest.approx(
            {token: entry.logprob for token, entry in other.items()}, abs=1e-5
        )


def test_without_their_turns_answers_are_others(
    folder: Path, steps: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers(folder)
    join = BatchRows.join

    def joined_without_turns(rows: BatchRows, joined: Sequence[NewRequest]) -> None:
        join(rows, joined)
        rows.turn_shift.zero_()

    monkeypatch.setattr(BatchRows, "join", joined_without_turns)
    for lets in (True, False):
        steps["lets"] = lets
        without = answers(folder)
        assert tokens(without)[:2] != tokens(found)[:2] and tokens(without)[2] == tokens(found)[2]
