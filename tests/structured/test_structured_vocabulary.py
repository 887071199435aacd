"""Tokenizers that have more tokens than their model: those beyond it are never offered, and never stand in the way."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kvern import LLM, SamplingParams
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.matchers import within

FORMS: list[dict[str, Any]] = [{"json": True}, {"choice": ["<pad0>", "no"]}, {"regex": "[a-c]{2}|<pad1>"}]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of four tokens more, of which one ends answers."""
    folder = tmp_path_factory.mktemp("added") / "model"
    shutil.copytree(tiny_model, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<pad0>", "<end>"])
    backend.add_tokens(["<pad1>", "yes"])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    ends = [config["eos_token_id"], backend.token_to_id("<end>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert max(ends) >= config["vocab_size"]
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_model_len=128, threads=1) as llm:
        yield llm


@pytest.mark.parametrize("form", FORMS, ids=["json", "choice", "regex"])
def test_forms_are_held(llm: LLM, form: dict[str, Any]) -> None:
    params = SamplingParams(structured=StructuredOutput(**form), temperature=1.0, seed=1, max_tokens=60, min_tokens=2)
    [output] = llm.generate(["the fox"], params)
    assert max(output.outputs[0].token_ids) < 288
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_words_and_ends_beyond_the_model_ban_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=4)
    [plain] = llm.generate(["the fox"], params)
    [banned] = llm.generate(["the fox"], params.replace(bad_words=["<pad1>", "yes"]))
    assert plain.outputs[0].token_ids == banned.outputs[0].token_ids


def test_pieces_with_scores() -> None:
    pieces = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]
    added = [{"id": 0, "content": "<unk>"}, {"id": 3, "content": "<pad>"}]
    text = json.dumps({"added_tokens": added, "model": {"type": "Unigram", "vocab": pieces}})
    assert json.loads(within(2, text)) == {
        "added_tokens": added[:1],
        "model": {"type": "Unigram", "vocab": pieces[:2]},
    }
    assert within(4, text) == text


@pytest.mark.parametrize("pair", [False, True])
def test_merges_of_missing_tokens_go_too(pair: bool) -> None:
    merges: list[Any] = [["a", "b"], ["ab", "c"]] if pair else ["a b", "ab c"]
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    held = json.loads(within(4, json.dumps({"model": {"vocab": vocabulary, "merges": merges}})))
    assert held["model"]["merges"] == merges[:1]
    assert "abc" not in held["model"]["vocab"]
