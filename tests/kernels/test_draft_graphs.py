"""A draft model's steps: a model that drafts for itself guesses right."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.runner.prompt_graphs
from kvern import LLM, SamplingParams
from kvern.device.device_batch import DeviceRows
from kvern.drafting.device.device_draft_model import parts_of
from kvern.drafting.device.draft_graphs import DraftGraphs, DraftRun, DraftSteps, ModelSteps, draft_runs
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.prompt_graphs import PromptKind
from kvern.runner.step_graphs import GraphMemory, StepOutputs
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, engine_of, vocab_size_of
from tests.support.kernels.device_engines import OPTIONS
from tests.support.kernels.repeated_graphs import RecordedGraphs, RepeatedSteps
from tests.support.outputs import token_ids
from tests.support.speculation import AnyLength

pytestmark = pytest.mark.usefixtures("few_products")

PROMPTS = [[5, 9, 17, 33, 2, 81], [3, 1, 4, 1, 5] * 3, [7]]
DRAFTS = [3, 1, 2]


@pytest.mark.nightly
@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_model_that_drafts_for_itself_is_right(
    captured: bool, tmp_path: Path, device: torch.device, on_device: Callable[..., LLM]
) -> None:
    """Of each row, and again behind drafts that were accepted or not; the keys of the last one are not there."""
    make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=9, ignore_eos=True) for seed in range(3)]
    llm = on_device(tmp_path, **OPTIONS)
    found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    for index, (prompt, param) in enumerate(zip(PROMPTS, params, strict=True)):
        engine_of(llm).add(f"{index}", prompt, param)
    core: Any = core_of(llm)
    while len(core.scheduler.running) < 3 or any(request.output_length < 2 for request in core.scheduler.running):
        engine_of(llm).step()
    runner = core.executor._worker.runner
    assert isinstance(runner, DeviceRunner)
    rows, texts = runner._rows, [prompt + answer for prompt, answer in zip(PROMPTS, found, strict=True)]
    slots = [request.slot for request in sorted(core.scheduler.running, key=lambda request: request.queue.arrival)]
    for slot, text in zip(slots, texts, strict=True):
        rows.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    graphs = DraftGraphs(ModelSteps(runner.model), rows, GraphMemory(device) if captured else RepeatedSteps())

    def draft(newest: Sequence[int]) -> list[list[int]]:
        """The drafts behind the newest tokens, of which nothing is known before."""
        for slot, position in zip(slots, newest, strict=True):
            rows.num_computed_tokens[slot] = position
            rows.tokens[slot, position + 1 : position + 5] = 99
        graphs.draft(slots, DRAFTS)
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


@pytest.mark.nightly
def test_prompts_are_replayed_where_a_model_drafts(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the model, and what its draft model catches up with: drafts are right if the keys of prompts are."""
    make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=7, ignore_eos=True) for seed in range(3)]
    expected = token_ids(on_device(tmp_path, **OPTIONS).generate(PROMPTS, params))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "DECODES", (4,))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "TOKENS", (24,))
    llm = on_device(tmp_path, draft_model=str(tmp_path), prefix_cache=False, **OPTIONS)
    core: Any = core_of(llm)
    core.drafting = AnyLength(None, vocab_size_of(llm), 3)
    runner = core.executor._worker.runner
    drafter = runner._drafter._drafter
    of_model = RecordedGraphs(PromptKind(runner.model, 100))
    of_draft = RecordedGraphs(PromptKind(drafter._model, 100, samples=False))
    runner.graphs, drafter.prompts = [of_model], of_draft
    drafter.drafts = DraftGraphs(ModelSteps(drafter._model), runner.model.rows, RepeatedSteps())
    for _ in range(3):
        assert token_ids(llm.generate(PROMPTS, params)) == expected
    statistics = llm.statistics()
    assert statistics.accepted_tokens == statistics.draft_tokens > 20
    assert len(of_model.used) > 2 and len(of_draft.used) > 2
    core.scheduler.check_integrity()


def test_rows_that_are_behind_catch_up_together() -> None:
    """In as few steps as there are tokens for; single tokens come first, as in any batch."""
    parts = [*parts_of([(0, 3, 8), (1, 5, 5), (2, 6, 7), (3, 0, 13)], 8)]
    steps = [[(item.slot, item.start, item.count) for item in part] for part in parts]
    assert steps == [[(2, 6, 1), (0, 3, 5), (3, 0, 2)], [(3, 2, 8)], [(3, 10, 3)]]


class Noted:
    """A `DraftComputer` whose steps are noted, as are graphs of them; everything is one request's."""

    def __init__(self) -> None:
        self.launched: list[DraftRun] = []
        self.eager = 0

    def steps(self, size: int) -> DraftSteps:
        def step() -> None:
            self.eager += 1

        return DraftSteps(step, step, torch.zeros(2, size, dtype=torch.int32), ())

    def capture(self, step: "partial[StepOutputs]") -> tuple[Callable[[], None], StepOutputs]:
        """As `CaptureMemory`."""
        return lambda: self.launched.append(step.args[0]), StepOutputs()


@pytest.fixture
def noted() -> tuple[DraftGraphs, Noted]:
    """Graphs of an engine of 20 rows, none of them captured yet."""
    maker, rows = Noted(), DeviceRows(20, 64, 32, torch.device("cpu"), scratch_block=0)
    return DraftGraphs(maker, rows, maker), maker


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_drafts_of_few_rows_are_one_launch_or_two(noted: tuple[DraftGraphs, Noted], rows: int) -> None:
    """And no graph is launched while it still runs."""
    graphs, maker = noted
    while graphs.missing:
        graphs.capture_next()
    for count in range(1, 17):
        maker.launched.clear()
        graphs.draft([*range(rows)], [count] + [1] * (rows - 1))
        assert sum(run.steps for run in maker.launched) == count
        assert [run.begins for run in maker.launched] == [True] + [False] * (count > 8)
        assert len({*maker.launched}) == len(maker.launched)
    assert maker.eager == 0


def test_drafts_of_many_rows_are_a_launch_each(noted: tuple[DraftGraphs, Noted]) -> None:
    graphs, maker = noted
    while graphs.missing:
        graphs.capture_next()
    graphs.draft([*range(9)], [3] * 9)
    assert maker.launched == [DraftRun(16, 1, True), *[DraftRun(16, 1, False)] * 2]


def test_what_is_not_captured_runs_step_by_step(noted: tuple[DraftGraphs, Noted]) -> None:
    graphs, maker = noted
    while graphs.missing[0] != DraftRun(8, 8, True):
        graphs.capture_next()
    graphs.draft([*range(8)], [11] * 8)
    assert maker.eager == 3 and maker.launched == [DraftRun(8, 8, False)]


def test_graphs_are_few_and_the_largest_come_first() -> None:
    runs = draft_runs(100)
    assert len({*runs}) == len(runs) == 4 * 9 + 4 * 2
    assert [run.rows for run in runs] == sorted((run.rows for run in runs), reverse=True)
    assert runs[0] == DraftRun(128, 1, False) and runs[-1] == DraftRun(1, 1, True)
