"""What guesses behind the last of several stages: its drafts are known to the first; kernels are interpreted here."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.drafting.verification
import kvern.runner.result
from kvern import LLM, SamplingParams
from kvern.device.device_batch import DeviceRows
from kvern.drafting.device.device_draft_model import DeviceDraftModel
from kvern.drafting.device.draft_graphs import DraftGraphs, ModelSteps
from kvern.drafting.device.drafter import ComputedStep, GuardedDrafter
from kvern.drafting.device.head_drafter import HeadDrafter
from kvern.drafting.device.head_graphs import HeadGraphs
from kvern.ranks.stages import Stage
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.device_runner import DeviceRunner, draft_behind
from kvern.runner.result import PendingStep
from tests.support.draft_heads import add_prediction, write_eagle, write_medusa
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, vocab_size_of
from tests.support.kernels.device_engines import OPTIONS
from tests.support.kernels.repeated_graphs import RepeatedSteps
from tests.support.outputs import token_ids
from tests.support.speculation import AnyLength
from tests.support.stages_here import capture_here

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="no graphs"),
]
PROMPTS = [[5, 9, 7, 3, 2, 8], [3, 1, 4, 1, 5] * 3, [7], [2, 6]]
FEW_TOKENS = 12
"""Of which a head without sense guesses some."""


def make(kind: str, folder: Path) -> tuple[Path, str]:
    """A model of two layers that cache, and what is to guess."""
    target, draft = folder / "target", folder / "draft"
    family = "glm4_moe" if kind == "mtp" else "llama"
    make_checkpoint(family, target, vocab_size=FEW_TOKENS, num_hidden_layers=2)
    if kind == "mtp":
        add_prediction(target, family, "deepseek", vocab_size=FEW_TOKENS, num_hidden_layers=1, first_k_dense_replace=0)
        return target, "mtp"
    if kind == "model":
        return target, str(target)
    if kind == "medusa":
        write_medusa(draft, target)
    else:
        write_eagle(draft, target, drafted=9 if kind == "eagle3" else None)
    return target, str(draft)


def in_graphs(drafter: DeviceDraftModel | HeadDrafter[Any], runner: DeviceRunner) -> None:
    """Let it draft as its graphs do."""
    if isinstance(drafter, HeadDrafter):
        head: Any = replace(runner.model, decoder=drafter._head, attention=drafter._attention)
        drafter.in_graphs = HeadGraphs(head, RepeatedSteps())
    else:
        drafter.drafts = DraftGraphs(ModelSteps(drafter._model), runner.model.rows, RepeatedSteps())


@pytest.mark.parametrize(
    ("kind", "captured"),
    [
        ("eagle3", True),
        *(
            pytest.param(kind, captured, marks=pytest.mark.nightly)
            for kind in ("model", "eagle", "eagle3", "mtp", "medusa")
            for captured in (True, False)
            if (kind, captured) not in {("eagle3", True), ("medusa", True)}
        ),
    ],
)
def test_stages_verify_what_is_guessed_behind_the_last(
    kind: str, captured: bool, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make(kind, tmp_path)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    expected = token_ids(LLM(str(target), device="cpu", **OPTIONS).generate(PROMPTS, params))
    replayed = capture_here(monkeypatch, 2)
    llm = on_device(target, draft_model=draft, pipeline_parallel_size=2, **OPTIONS)
    core: Any = core_of(llm)
    runner = core.executor._worker.runner
    assert isinstance(runner, DeviceRunner)
    if captured:
        in_graphs(runner._drafter._drafter, runner)
    core.drafting = AnyLength(None, vocab_size_of(llm), 3)
    assert token_ids(llm.generate(PROMPTS, params)) == expected
    statistics = llm.statistics()
    assert statistics.accepted_tokens > 0 and statistics.draft_tokens > 20
    assert kind != "model" or statistics.accepted_tokens == statistics.draft_tokens
    assert all(replayed), "steps without drafts are graphs"
    core.scheduler.check_integrity()


class LateDevice:
    """Copies to the host are made when somebody waits for an event that came behind them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._copies: list[Callable[[], Any]] = []
        self.waited = 0
        device = self

        class Event:
            def record(self) -> None:
                self._asked = len(device._copies)

            def synchronize(self) -> None:
                device.waited = self._asked
                for copy in device._copies[: self._asked]:
                    copy()

        patch.setattr(torch.cuda, "Event", Event)
        for module in (kvern.runner.result, kvern.drafting.verification):
            patch.setattr(module, "fetch", self._fetch)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(tensor, -1)
        self._copies.append(partial(target.copy_, tensor))
        return target


@pytest.mark.parametrize(
    ("stage", "sampled", "guessed", "waited"),
    [(Stage(1, 2), 1, {2: [7, 8], 0: [3]}, 2), (Stage(1, 2), 0, {}, 1), (Stage(0, 1), 1, {}, 1)],
    ids=["several stages", "parts of prompts", "one stage"],
)
def test_a_result_waits_for_the_drafts_that_it_has_and_no_others(
    stage: Stage, sampled: int, guessed: dict[int, list[int]], waited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, rows = LateDevice(monkeypatch), DeviceRows(3, 16, 4, torch.device("cpu"), scratch_block=0)
    scheduled = [
        ScheduledTokens(2, 5, 1, sampled, guesses=2),
        ScheduledTokens(1, 5, 1, sampled),
        ScheduledTokens(0, 13, 1, sampled, guesses=1),
    ]

    class Known:
        reads_hidden, inputs = False, None
        caches = ()
        graphs = ()

        def prepare(self, output: SchedulerOutput) -> None:
            pass

        def draft(self, step: ComputedStep) -> None:
            rows.tokens[2, 7:9], rows.tokens[0, 15] = torch.tensor([7, 8]), 3

    step = PendingStep(scheduled, torch.tensor([4, 5, 6][: 3 * sampled]), on_gpu=True)
    starts = rows.starts(scheduled)
    rows.advance(scheduled, starts)
    draft_behind(step, ComputedStep(scheduled, starts, None, None), GuardedDrafter(Known()), rows, stage)
    result = step.result()
    assert result.token_ids == ([[4], [5], [6]] if sampled else [[], [], []])
    assert result.guessed == guessed
    assert device.waited == waited
