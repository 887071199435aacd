"""A draft model's steps: a model that drafts for itself guesses right."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.worker.device_runner import DeviceRunner
from kvern.worker.draft_graphs import DraftGraphs, ModelSteps
from tests.families import make_checkpoint
from tests.kernels.test_device_engine import OPTIONS

pytestmark = pytest.mark.usefixtures("few_products")

PROMPTS = [[5, 9, 17, 33, 2, 81], [3, 1, 4, 1, 5] * 3, [7]]
DRAFTS = [3, 1, 2]


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_model_that_drafts_for_itself_is_right(
    captured: bool, tmp_path: Path, device: torch.device, on_device: Callable[..., LLM]
) -> None:
    """Of each row, and again behind drafts that were accepted or not; the keys of the last one are not there."""
    make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=9, ignore_eos=True) for seed in range(3)]
    llm = on_device(tmp_path, **OPTIONS)
    answers = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    for index, (prompt, param) in enumerate(zip(PROMPTS, params, strict=True)):
        llm._engine.add(f"{index}", prompt, param)
    core: Any = llm._engine.core
    while len(core.scheduler.running) < 3 or any(request.output_length < 2 for request in core.scheduler.running):
        llm._engine.step()
    runner = core.executor._worker.runner
    assert isinstance(runner, DeviceRunner)
    rows, texts = runner._rows, [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    slots = [request.slot for request in sorted(core.scheduler.running, key=lambda request: request.arrival)]
    for slot, text in zip(slots, texts, strict=True):
        rows.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    graphs = DraftGraphs(ModelSteps(runner._decoder, runner._attention, rows, runner._block_size), rows)

    def draft(newest: Sequence[int]) -> list[list[int]]:
        """The drafts behind the newest tokens, of which nothing is known before."""
        for slot, position in zip(slots, newest, strict=True):
            rows.num_computed_tokens[slot] = position
            rows.tokens[slot, position + 1 : position + 5] = 99
        graphs.run(slots, DRAFTS)
        found = [rows.tokens[slot, at + 1 : at + 5].tolist() for slot, at in zip(slots, newest, strict=True)]
        for slot, text in zip(slots, texts, strict=True):
            rows.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        return found

    def expected(newest: Sequence[int]) -> list[list[int]]:
        return [
            (text[at + 1 : at + 1 + count] + [99] * 4)[:4]
            for text, at, count in zip(texts, newest, DRAFTS, strict=True)
        ]

    with torch.inference_mode():
        while captured and graphs.missing:
            graphs.capture_next()
        newest = [len(prompt) for prompt in PROMPTS]
        assert draft(newest) == expected(newest)
        newest = [newest[0] + 4, newest[1] + 1, newest[2] + 2]  # all accepted, none, one of two
        assert draft(newest) == expected(newest)
