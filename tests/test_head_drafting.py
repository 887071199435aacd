"""Heads draft what their definition says, whatever steps the text was computed in, and change no token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.attention.compiled import CompiledAttention
from kvern.attention.torch_sdpa import TorchAttention
from kvern.engine.draft_room import Wanted
from kvern.engine.drafting import Drafting
from kvern.models.draft_formats import load_draft_head
from kvern.models.loader import load_model, read_config
from kvern.worker.drafter import ComputedStep, GuardedDrafter
from kvern.worker.head_drafter import HeadDrafter
from tests.draft_heads import eagle3_enter, eagle3_logits, eagle3_states, write_eagle
from tests.test_draft_heads import states_of
from tests.tiny_model import make_tiny_model

PROMPTS = [[5, 9, 17, 33, 2, 81], [7, 9, 17, 33, 2, 80, *range(40, 90)], [100] * 10]
LENGTH: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


class Always(Drafting):
    """Has the device guess so many tokens, whatever becomes of them."""

    def __init__(self, vocab_size: int, most: int) -> None:
        super().__init__(None, vocab_size)
        self._most = most

    def wanted(self, running: int) -> Wanted | None:
        return lambda request: self._most


def guesses(drafter: HeadDrafter, found: list[tuple[list[int], list[int]]]) -> Any:
    """`draft` that notes texts and what was drafted behind them."""
    draft = drafter.draft

    def noted(step: ComputedStep) -> None:
        draft(step)
        rows = drafter._rows
        for item in step.scheduled:
            if item.sampled and item.guesses:
                newest = int(rows.num_computed_tokens[item.slot])
                row = rows.tokens[item.slot].tolist()
                found.append((row[: newest + 1], row[newest + 1 : newest + 1 + item.guesses]))

    return noted


def reference(
    decoder: Any, weights: dict[str, torch.Tensor], config: dict[str, Any], text: list[int], count: int
) -> list[int]:
    """What a head of EAGLE-3 drafts behind a text, all of it computed at once."""
    tokens = torch.tensor(text)
    inputs = states_of(decoder, (2, 1, 0), tokens)[:-1]
    states, drafts = eagle3_enter(weights, config, inputs), []
    for _ in range(count):
        embedded = decoder.embed_tokens(tokens[1:])
        last = eagle3_states(weights, config, embedded, states)[-1:]
        drafts.append(int(eagle3_logits(weights, config, last).argmax()))
        tokens, states = torch.cat((tokens, torch.tensor(drafts[-1:]))), torch.cat((states, last))
    return drafts


@contextmanager
def drafting(llm: LLM, folder: Path, target: Path, most: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """A head drafts as many as `most` tokens, as many as there is room for; what it drafted."""
    core, found = llm._engine.core, []
    runner = core.executor._worker.runner
    blocks, size = runner.caches[0].shape[1:3]
    head = load_draft_head(folder, runner._decoder)
    layers = head.spec.attentions
    if isinstance(runner._attention, CompiledAttention):
        attention = CompiledAttention(layers, blocks, size, torch.float32, torch.float32)
    else:
        attention = TorchAttention(layers, blocks, size, torch.float32, torch.device("cpu"))
    drafter = HeadDrafter(head, attention, runner._rows, size, runner._sampling)
    drafter.draft = guesses(drafter, found)  # type: ignore[method-assign]
    runner._drafter = GuardedDrafter(drafter)
    if runner._captured is not None:
        runner._captured._layer_inputs = drafter.inputs
        runner._captured._sizes.clear()
    core.drafting = Always(llm._engine.inputs.vocab_size, most)
    yield found
    assert runner._drafter._drafter is drafter, "it failed"
    runner._drafter, core.drafting = GuardedDrafter(None), None


@pytest.mark.parametrize("cpu_kernels", [False, True])
@torch.inference_mode()
def test_eagle3_drafts_what_its_definition_says(cpu_kernels: bool, tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    weights = write_eagle(tmp_path / "head", target, drafted=150)
    config, decoder = read_config(tmp_path / "head"), load_model(target)
    params = SamplingParams(temperature=0, **LENGTH)
    options: dict[str, Any] = {
        "max_model_len": 128,
        "kv_cache_tokens": 512,
        "block_size": 4,
        "max_batch_tokens": 16,
        "prefix_cache": False,
    }
    with LLM(str(target), dtype="float32", threads=1, cpu_kernels=cpu_kernels, **options) as llm:
        expected = llm.generate(PROMPTS, params)
        with drafting(llm, tmp_path / "head", target, 4) as found:
            outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    assert len(found) > 20
    right = [drafts == reference(decoder, weights, config, text, len(drafts)) for text, drafts in found]
    assert all(right), f"{right.count(False)} of {len(right)} are others"
