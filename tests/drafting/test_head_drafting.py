"""Heads draft what their definition says, whatever steps the text was computed in, and change no token."""

from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.cpu import capture
from kvern.models.loader import load_model, read_config
from tests.support.draft_heads import (
    write_eagle,
    write_medusa,
)
from tests.support.drafting_requests import EVERYTHING
from tests.support.head_drafting import OPTIONS, PROMPTS, drafting, eagle3_drafts, make_model_with_layer
from tests.support.internals import check_integrity, drafter_of
from tests.support.outputs import tokens_and_texts
from tests.support.tiny_model import make_tiny_model


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("cpu_kernels", "captures"), [pytest.param(False, False, marks=pytest.mark.nightly), (True, True), (True, False)]
)
@torch.inference_mode()
def test_eagle3_drafts_what_its_definition_says(
    cpu_kernels: bool, captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a capture fails behind all that it has computed."""
    if not captures:
        monkeypatch.setattr(capture, "place", lambda buffers: 1 // 0)
    target = make_tiny_model(tmp_path / "target")
    weights = write_eagle(tmp_path / "head", target, drafted=150)
    config, decoder = read_config(tmp_path / "head"), load_model(target)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = OPTIONS | {"cpu_kernels": cpu_kernels}
    with LLM(str(target), **options) as llm:
        expected = llm.generate(PROMPTS, params)
    with LLM(str(target), draft_model=str(tmp_path / "head"), **options) as llm, drafting(llm, 4) as found:
        assert tokens_and_texts(llm.generate(PROMPTS, params)) == tokens_and_texts(expected)
        captured = drafter_of(llm)._captured
        assert bool(captured and captured._passes and captured._draws) == captures
    assert len(found) > 20
    right = [drafts == eagle3_drafts(decoder, weights, config, text, len(drafts)) for text, drafts in found]
    assert all(right), f"{right.count(False)} of {len(right)} are others"


@torch.inference_mode()
def test_prompts_are_read_before_anybody_asks(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    weights = write_eagle(tmp_path / "head", target, drafted=150)
    config, decoder = read_config(tmp_path / "head"), load_model(target)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(target), draft_model=str(tmp_path / "head"), **OPTIONS) as llm, drafting(llm, 2, outputs=1) as found:
        llm.generate(PROMPTS, params)
    assert len(found) >= len(PROMPTS)
    assert all(drafts == eagle3_drafts(decoder, weights, config, text, len(drafts)) for text, drafts in found)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_every_parameter(kind: str, tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    if kind == "medusa":
        write_medusa(tmp_path / "head", target)
    else:
        write_eagle(tmp_path / "head", target, drafted=150 if kind == "eagle3" else None)
    prompts = [PROMPTS[index % 3] for index in range(len(EVERYTHING))]
    with LLM(str(target), **OPTIONS) as llm:
        expected = llm.generate(prompts, EVERYTHING)
    with LLM(str(target), draft_model=str(tmp_path / "head"), **OPTIONS) as llm:
        with drafting(llm, 3) as found:
            assert tokens_and_texts(llm.generate(prompts, EVERYTHING)) == tokens_and_texts(expected)
        check_integrity(llm)
    assert len(found) > 50


@pytest.mark.parametrize("family", [pytest.param("glm4_moe", marks=pytest.mark.nightly), "glm4_moe_lite"])
def test_the_models_own_layer(family: str, tmp_path: Path) -> None:
    folder = make_model_with_layer(family, tmp_path)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = llm.generate(PROMPTS, params)
    with LLM(str(folder), draft_model="mtp", **OPTIONS) as llm, drafting(llm, 2) as found:
        assert tokens_and_texts(llm.generate(PROMPTS, params)) == tokens_and_texts(expected)
    assert len(found) > 20
