"""A new kind of step is a class and an entry in `STEP_KINDS`: it is captured, chosen and measured as the others are."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import kvern.runner.kernel_backend
from kvern import LLM, SamplingParams
from kvern.device.device_batch import decodes_on_device
from kvern.kernels.batch import write_sampled
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.device_sampling import sample_plain
from kvern.runner.kernel_backend import STEP_KINDS, GraphOptions, step_kinds
from kvern.runner.step_graphs import (
    DeviceModel,
    GraphInputs,
    PlannedStep,
    Priority,
    StepGraph,
    StepKind,
    StepOutputs,
    StepSize,
)
from tests.support.families import make_checkpoint
from tests.support.internals import runner_of
from tests.support.kernels.device_engines import OPTIONS
from tests.support.kernels.repeated_graphs import RecordedGraphs
from tests.support.outputs import token_ids

pytestmark = pytest.mark.usefixtures("few_products")


class LonelyKind(StepKind[str, GraphInputs]):
    """Decodes of one request that asks for no more than a temperature."""

    def __init__(self, model: DeviceModel) -> None:
        self._model, self.shapes = model, ["alone"]

    def priority(self, shape: str) -> Priority:
        return Priority.MOST_STEPS

    def inputs(self, shape: str) -> GraphInputs:
        numbers = [self._model.rows.scratch, 0, 0, 0, 1]
        return GraphInputs(torch.tensor(numbers, dtype=torch.int32, device=self._model.rows.device))

    def compute(self, shape: str, inputs: GraphInputs) -> StepOutputs:
        model, rows = self._model, self._model.rows
        slots, starts, *indices = inputs.numbers.split(1)
        batch = decodes_on_device(rows, slots, starts, (indices[0], indices[1], indices[2]), model.block_size)
        hidden = model.decoder(batch.token_ids, batch.positions, model.attention.plan(batch))
        logits, sampled = sample_plain(model.decoder, hidden, slots, batch.sample_positions, rows)
        write_sampled(rows.tokens, slots, batch.sample_positions, sampled)
        return StepOutputs(hidden, slots, batch.sample_positions, logits, sampled)

    def run(self, step: PlannedStep, captured: Mapping[str, StepGraph[str, GraphInputs]]) -> StepOutputs | None:
        graph = captured.get("alone")
        if graph is None or step.size != StepSize(1, 0) or step.needs or step.uncertain:
            return None
        (item,) = step.scheduled
        graph.inputs.write([item.slot, item.start])
        graph.replay()
        return StepOutputs(sampled=graph.outputs.sampled)


def test_a_new_kind_of_step_is_one_class_and_one_entry(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=4, ignore_eos=True)
    llm = on_device(tmp_path, **OPTIONS)
    prompts = [[5, 9, 17, 33, 2, 81], [7, 8]]
    expected = token_ids(llm.generate(prompts, params))
    monkeypatch.setattr(
        kvern.runner.kernel_backend, "STEP_KINDS", [lambda model, options: LonelyKind(model), *STEP_KINDS]
    )
    runner = runner_of(llm)
    assert isinstance(runner, DeviceRunner)
    graphs = [RecordedGraphs(kind) for kind in step_kinds(runner.model, GraphOptions(8)) if kind.shapes == ["alone"]]
    runner.graphs = graphs
    found = [token_ids(llm.generate([prompt], params)) for prompt in prompts]
    assert found == [[answer] for answer in expected]
    count = len(graphs[0].used)
    assert count >= 6, "all tokens but the first of each answer"
    llm.generate([prompts[0]], params.replace(top_p=0.5))
    assert len(graphs[0].used) == count, "what it does not fit is computed otherwise"
