"""A draft head whose batch lives on the device drafts what its definition says; kernels are interpreted here."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.models.loader import load_model, read_config
from tests.draft_heads import write_eagle, write_medusa
from tests.kernels.test_device_engine import OPTIONS
from tests.test_head_drafting import drafting, eagle3_drafts
from tests.test_medusa import medusa_drafts
from tests.tiny_model import make_tiny_model

PROMPTS = [[5, 9, 17, 33, 2, 81], [7, 9, 17, 33, 2, 80, *range(40, 60)]]

pytestmark = pytest.mark.usefixtures("few_products")


@torch.inference_mode()
def test_eagle3_with_two_steps_in_flight(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    target = make_tiny_model(tmp_path / "target")
    weights = write_eagle(tmp_path / "head", target, drafted=150)
    config, decoder = read_config(tmp_path / "head"), load_model(target)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = LLM(str(target), device="cpu", **OPTIONS).generate(PROMPTS, params)
    llm = on_device(target, draft_model=str(tmp_path / "head"), **OPTIONS)
    with drafting(llm, 2) as found:
        outputs = llm.generate(PROMPTS, params)
    assert [item.outputs[0].token_ids for item in outputs] == [item.outputs[0].token_ids for item in expected]
    early = [(text, drafts) for text, drafts in found if len(drafts) == 2]  # later ones are not asked behind each step
    assert len(early) > 6
    assert all(drafts == eagle3_drafts(decoder, weights, config, text, 2) for text, drafts in early)


@pytest.mark.nightly
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@torch.inference_mode()
def test_medusa_with_two_steps_in_flight(acceptance: str, tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    target = make_tiny_model(tmp_path / "target")
    weights, decoder = write_medusa(tmp_path / "heads", target), load_model(target)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = LLM(str(target), device="cpu", **OPTIONS).generate(PROMPTS, params)
    llm = on_device(target, draft_model=str(tmp_path / "heads"), acceptance=acceptance, **OPTIONS)
    with drafting(llm, 3) as found:
        outputs = llm.generate(PROMPTS, params)
    assert [item.outputs[0].token_ids for item in outputs] == [item.outputs[0].token_ids for item in expected]
    assert len(found) > 6
    assert all(drafts == medusa_drafts(decoder, weights, text, len(drafts)) for text, drafts in found)
