"""Heads draft what their definition says, whatever steps the text was computed in, and change no token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.cpu import capture
from kvern.engine.draft_room import Wanted
from kvern.engine.drafting import Drafting
from kvern.models.decoder import Decoder
from kvern.models.loader import load_model, read_config
from kvern.worker.drafter import ComputedStep
from tests.draft_heads import (
    Weights,
    add_prediction,
    eagle3_enter,
    eagle3_logits,
    eagle3_states,
    write_eagle,
    write_medusa,
)
from tests.families import make_checkpoint
from tests.test_draft_heads import states_of
from tests.test_speculation import EVERYTHING, answers
from tests.tiny_model import make_tiny_model

PROMPTS = [[5, 9, 17, 33, 2, 81], [7, 9, 17, 33, 2, 80, *range(40, 90)], [100] * 10]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 128,
    "kv_cache_tokens": 512,
    "block_size": 4,
    "max_batch_tokens": 16,
}
Drafted = list[tuple[list[int], list[int]]]


class Always(Drafting):
    """Has the device guess so many tokens, whatever becomes of them; behind none of the first `outputs`."""

    def __init__(self, vocab_size: int, most: int, outputs: int = 0) -> None:
        super().__init__(None, vocab_size)
        self._most, self._outputs = most, outputs

    def wanted(self, running: int) -> Wanted | None:
        return lambda request: 0 if request.output_length < self._outputs else self._most


@contextmanager
def drafting(llm: LLM, most: int, outputs: int = 0) -> Iterator[Drafted]:
    """The head drafts as `Always` says, as far as there is room; texts, and what it drafted behind them."""
    core, found = llm._engine.core, Drafted()
    core.drafting = Always(llm._engine.inputs.vocab_size, most, outputs)
    guarded = core.executor._worker.runner._drafter
    drafter = guarded._drafter
    draft, rows = drafter.draft, drafter._rows

    def noted(step: ComputedStep) -> None:
        draft(step)
        for item in step.scheduled:
            if item.sampled and item.guesses:
                newest, row = int(rows.num_computed_tokens[item.slot]), rows.tokens[item.slot].tolist()
                found.append((row[: newest + 1], row[newest + 1 : newest + 1 + item.guesses]))

    drafter.draft = noted
    yield found
    assert guarded._drafter is drafter, "it failed"


def eagle3_drafts(decoder: Decoder, weights: Weights, config: dict[str, Any], text: list[int], count: int) -> list[int]:
    """What a head of EAGLE-3 drafts behind a text, all of it computed at once."""
    tokens = torch.tensor(text)
    inputs = states_of(decoder, (2, 1, 0), tokens)[:-1]
    states, drafts = eagle3_enter(weights, config, inputs), list[int]()
    for _ in range(count):
        last = eagle3_states(weights, config, decoder.embed_tokens(tokens[1:]), states)[-1:]
        drafts.append(int(eagle3_logits(weights, config, last).argmax()))
        tokens, states = torch.cat((tokens, torch.tensor(drafts[-1:]))), torch.cat((states, last))
    return drafts


@pytest.mark.parametrize(("cpu_kernels", "captures"), [(False, False), (True, True), (True, False)])
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
        assert answers(llm.generate(PROMPTS, params)) == answers(expected)
        captured = llm._engine.core.executor._worker.runner._drafter._drafter._captured  # type: ignore[attr-defined]
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
            assert answers(llm.generate(prompts, EVERYTHING)) == answers(expected)
        llm._engine.core.scheduler.check_integrity()
    assert len(found) > 50


def make_model_with_layer(family: str, folder: Path) -> Path:
    """A model of the tiny model's tokens that predicts several."""
    make_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    make_checkpoint(family, folder, vocab_size=288)
    changes = {"mlp_layer_types": ["sparse"]} if family == "glm4_moe_lite" else {"first_k_dense_replace": 0}
    add_prediction(folder, family, "deepseek", vocab_size=288, num_hidden_layers=1, **changes)
    return folder


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite"])
def test_the_models_own_layer(family: str, tmp_path: Path) -> None:
    folder = make_model_with_layer(family, tmp_path)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = llm.generate(PROMPTS, params)
    with LLM(str(folder), draft_model="mtp", **OPTIONS) as llm, drafting(llm, 2) as found:
        assert answers(llm.generate(PROMPTS, params)) == answers(expected)
    assert len(found) > 20
