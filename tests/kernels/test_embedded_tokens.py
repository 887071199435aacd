"""Tokens that are given by rows of embeddings are computed as those of the ids whose rows these are."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.runner.prompt_graphs
from kvern import LLM, SamplingParams
from kvern.cache.messages import ImageMessage
from kvern.request.step import Fork, NewRequest, ScheduledTokens
from kvern.runner.cached_model import StepEmbeddings
from kvern.runner.prompt_graphs import PromptKind
from kvern.runner.step_graphs import GraphMemory
from tests.support.families import make_checkpoint
from tests.support.internals import runner_of
from tests.support.kernels.device_engines import OPTIONS
from tests.support.kernels.repeated_graphs import RecordedGraphs, RepeatedSteps
from tests.support.outputs import token_ids

pytestmark = pytest.mark.usefixtures("few_products")

PROMPTS = [[5, 9, 17, 33, 2, 81], [3, 1, 4, 1, 5] * 5, [7, 8]]
ANY = 11
"""The id in the place of tokens that have rows."""
GIVEN = [[*prompt] for prompt in PROMPTS]
GIVEN[0][1:4] = [ANY] * 3
GIVEN[1][2:18] = [ANY] * 16
PARAMS = SamplingParams(temperature=0.7, seed=4, max_tokens=4, ignore_eos=True)


class TableRows:
    """Has the rows of the table of embeddings for each `ANY`, which stands for the token of the true prompt."""

    def __init__(self, runner: Any) -> None:
        self._rows, self._embed = runner.model.rows, runner.model.decoder.embed_tokens
        self.steps = 0

    def rehearse(self) -> None:
        """Nothing is encoded."""

    def fork(self, forked: Sequence[Fork]) -> None:
        """The rows of the batch know their tokens."""

    def join(self, joined: Sequence[NewRequest]) -> None:
        """The rows of the batch know their tokens."""

    def prepare(self, message: ImageMessage) -> list[tuple[int, str]]:
        """Nothing is encoded."""
        return []

    def abandon(self) -> None:
        """Nothing is encoded."""

    def rows(self, scheduled: Sequence[ScheduledTokens]) -> StepEmbeddings | None:
        true, source = list[int](), list[int]()
        for item in scheduled:
            given = self._rows.request(item.slot).token_ids
            prompt = next((each for each in PROMPTS if len(each) == len(given)), given)
            for position in range(item.start, item.start + item.count):
                has_row = position < len(given) and given[position] == ANY
                source.append(len(true) if has_row else -1)
                true += [prompt[position]] if has_row else []
        if not true:
            return None
        self.steps += 1
        return StepEmbeddings(source, self._embed(torch.tensor(true, device=self._rows.device)))


def embed(llm: LLM) -> Any:
    """The runner of an engine that is told of these rows."""
    runner: Any = runner_of(llm)
    runner.model = dataclasses.replace(runner.model, embeddings=TableRows(runner))
    return runner


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.nightly)])
def test_rows_of_the_table_are_as_ids_on_a_cpu(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    options = {"device": "cpu", "prefix_cache": False, **OPTIONS}
    expected = token_ids(LLM(str(tmp_path), **options).generate(PROMPTS, PARAMS))
    llm = LLM(str(tmp_path), **options)
    assert token_ids(llm.generate(GIVEN, PARAMS)) != expected, "the rows were to be needed"
    runner = embed(llm)
    assert token_ids(llm.generate(GIVEN, PARAMS)) == expected
    assert runner.model.embeddings.steps


@pytest.mark.nightly
@pytest.mark.parametrize("captured", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.nightly)])
def test_rows_of_the_table_are_as_ids_in_graphs_too(
    family: str, captured: bool, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path)
    options = {"prefix_cache": False, **OPTIONS, "max_batch_tokens": 24}
    llm = on_device(tmp_path, **options)
    expected = token_ids(llm.generate(PROMPTS, PARAMS))
    runner = embed(llm)
    graphs = None
    if captured:
        monkeypatch.setattr(kvern.runner.prompt_graphs, "DECODES", (4,))
        monkeypatch.setattr(kvern.runner.prompt_graphs, "TOKENS", (24,))
        device = runner.model.rows.device
        memory = GraphMemory(device) if device.type == "cuda" else RepeatedSteps()
        graphs = RecordedGraphs(PromptKind(runner.model, 100), memory)
        runner.graphs = [graphs]
    assert token_ids(llm.generate(GIVEN, PARAMS)) == expected
    assert runner.model.embeddings.steps
    if graphs is not None:
        assert {step.embeddings is None for step in graphs.used} == {True, False}
