"""A draft head whose batch lives on the device drafts what its definition says; kernels are interpreted here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.runner.verify_graphs
import kvern.runner.worker
from kvern import LLM, EngineConfig, SamplingParams
from kvern.attention.torch_sdpa import TorchAttention
from kvern.drafting.device.head_drafter import HeadDrafter
from kvern.drafting.device.head_graphs import HeadGraphs
from kvern.layers.norm import Norm
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.plan import agree, lay_out
from kvern.runner.startup import Startup
from kvern.runner.verify_graphs import VerifyKind
from kvern.runner.worker import Worker
from tests.support.draft_heads import add_prediction, write_eagle, write_medusa
from tests.support.families import make_checkpoint
from tests.support.head_drafting import drafting, eagle3_drafts, medusa_drafts
from tests.support.internals import runner_of
from tests.support.kernel_list import KERNELS
from tests.support.kernels.device_engines import OPTIONS, WITH_STATES
from tests.support.kernels.repeated_graphs import RecordedGraphs, RepeatedSteps
from tests.support.tiny_model import make_tiny_model

PROMPTS = [[5, 9, 17, 33, 2, 81], [7, 9, 17, 33, 2, 80, *range(40, 60)]]

pytestmark = pytest.mark.usefixtures("few_products")


def record(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    """Let an engine read steps within what stands for graphs, and draft as those do."""
    monkeypatch.setattr(kvern.runner.verify_graphs, "ROWS", (2,))
    monkeypatch.setattr(kvern.runner.verify_graphs, "TOKENS", (8,))
    runner: Any = runner_of(llm)
    assert isinstance(runner, DeviceRunner)
    drafter = runner._drafter._drafter
    assert isinstance(drafter, HeadDrafter)
    memory = RepeatedSteps()
    drafter.in_graphs = HeadGraphs(replace(runner.model, decoder=drafter._head, attention=drafter._attention), memory)
    kind = VerifyKind(runner.model, 100, drafter.reader)
    graphs = RecordedGraphs(kind, memory, lambda shape: not shape.options)
    runner.graphs = [graphs]
    return graphs


@pytest.mark.nightly
@pytest.mark.parametrize("captured", [pytest.param(False, marks=pytest.mark.nightly), True])
@torch.inference_mode()
def test_eagle3_with_two_steps_in_flight(
    captured: bool, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_tiny_model(tmp_path / "target")
    weights = write_eagle(tmp_path / "head", target, drafted=150)
    config, decoder = read_config(tmp_path / "head"), load_model(target)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = LLM(str(target), device="cpu", **OPTIONS).generate(PROMPTS, params)
    llm = on_device(target, draft_model=str(tmp_path / "head"), cuda_graphs=captured, **OPTIONS)
    graphs = record(llm, monkeypatch) if captured and not torch.cuda.is_available() else None
    with drafting(llm, 2) as found:
        outputs = llm.generate(PROMPTS, params)
    assert [item.outputs[0].token_ids for item in outputs] == [item.outputs[0].token_ids for item in expected]
    early = [(text, drafts) for text, drafts in found if len(drafts) == 2]  # later ones are not asked behind each step
    assert len(early) > 6
    assert all(drafts == eagle3_drafts(decoder, weights, config, text, 2) for text, drafts in early)
    if graphs is not None:
        assert any(item.uncertain for step in graphs.used for item in step.scheduled)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "names", "changes"),
    [
        ("qwen3_next", "qwen", {"layer_types": ["full_attention"], "num_experts": 0}),
        ("glm4_moe_lite", "deepseek", {"mlp_layer_types": ["sparse"]}),
    ],
)
def test_graphs_of_the_models_own_layer_draft_as_a_cpu_does(
    family: str,
    names: str,
    changes: dict[str, Any],
    tmp_path: Path,
    on_device: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside layers with states, and of latent attention."""
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    make_checkpoint(family, folder, vocab_size=288, **WITH_STATES.get(family, {}))
    add_prediction(folder, family, names, vocab_size=288, num_hidden_layers=1, **changes)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers, drafts = [], []
    for make in (LLM, on_device):
        llm = make(str(folder), draft_model="mtp", **OPTIONS, **({"device": "cpu"} if make is LLM else {}))
        if make is not LLM and not torch.cuda.is_available():
            record(llm, monkeypatch)
        with drafting(llm, 2) as found:
            answers.append([output.outputs[0].token_ids for output in llm.generate([[5, 9, 17, 33, 2, 81]], params)])
        drafts.append({tuple(text): guessed for text, guessed in found if len(guessed) == 2})
    assert answers[0] == answers[1]
    both = drafts[0].keys() & drafts[1].keys()
    assert len(both) > 2
    assert [drafts[0][text] for text in both] == [drafts[1][text] for text in both]


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


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_uses_no_kernels_that_do_not_work_with_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layer and who attends; the model goes on with all."""
    target, folder = make_checkpoint("llama", tmp_path / "model"), tmp_path / "head"
    write_eagle(folder, target, drafted=60 if kind == "eagle3" else None)
    groups = frozenset(kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper"))
    working = groups, groups - {"norm", "attention"}
    monkeypatch.setattr(kvern.runner.worker, "usable_kernels", lambda *_: working)
    config = EngineConfig(str(target), draft_model=str(folder), **OPTIONS | {"device": "cpu"})
    spec = spec_from_config(read_config(target))
    worker = Worker(config, target, spec, torch.device("cpu"), Startup(), folder)
    plan = agree([worker.probe()], config, spec)
    worker.build(lay_out([worker.load(plan)], plan, config))
    runner: Any = worker.runner
    drafter = runner._drafter._drafter
    assert isinstance(drafter, HeadDrafter)
    models = runner.model.decoder, drafter._head
    assert ["norm" in model.build.kernels for model in models] == [True, False]
    norms = [[part for part in model.modules() if isinstance(part, Norm)] for model in models]
    assert [any(norm.is_fused for norm in each) for each in norms] == [True, False]
    backends = runner.model.attention, drafter._attention
    assert [isinstance(backend, TorchAttention) for backend in backends] == [False, True]
