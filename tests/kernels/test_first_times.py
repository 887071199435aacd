"""What serving launches is on the list of kernels, in the same specialisation: nothing compiles in a user's step.

Kernels are not run here, so that answers are zeros; which of them are launched, and on what, does not depend on those.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import kvern.runner.decode_graphs
import kvern.runner.fallback_check
from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.drafting.device.device_draft_model import DeviceDraftModel
from kvern.drafting.device.draft_graphs import DraftGraphs, ModelSteps
from kvern.drafting.device.head_graphs import HeadGraphs
from kvern.drafting.proposer import takes_drafts
from kvern.engine.factory import use_idle_time
from kvern.kernels import activation, linear, norm
from kvern.layers.linear_format import LinearMethods
from kvern.layers.tuned_linear import TunedLinear
from kvern.models.fallback import description
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.request.sampling_params import StructuredOutput
from kvern.runner.kernel_backend import GraphOptions, step_kinds
from kvern.runner.kernel_choice import of_draft
from kvern.runner.loaded_model import Stored
from kvern.runner.prompt_graphs import PromptKind
from kvern.runner.startup import Startup
from kvern.runner.step_graphs import StepGraphs, StepOutputs
from kvern.runner.verify_graphs import VerifyKind
from kvern.runner.worker import Worker
from tests.kernels.recorded import recorded, recorded_at_start, zeroed
from tests.support.draft_heads import add_prediction, write_eagle, write_medusa
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, runner_of
from tests.support.latent_families import LATENT
from tests.support.peft_adapters import make_adapter
from tests.support.tiny_model import make_tiny_model

PLACES = {"max_adapters": 3, "max_adapter_rank": 16}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "kv_cache_tokens": 40000,
    "max_batch_requests": 90,
    "block_size": 2,
    "max_batch_tokens": 256,
}

ALIGNED_LATENTS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 0, "linear_num_value_heads": 8},
    "qwen3_5": {"linear_num_value_heads": 8},
    "gemma4": {"global_head_dim": 32},
    **{name: {"mamba_n_heads": 8, "mamba_d_head": 12} for name in ("granitemoehybrid", "falcon_h1")},
    "nemotron_h": {"mamba_num_heads": 8},
    **dict.fromkeys(LATENT, ALIGNED_LATENTS),
}
"""Rows of projections that are aligned, as they are in large models."""
UNALIGNED: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_num_value_heads": 4},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 24},
}
"""Rows that are multiples of 8 and of 4 numbers alone, as those of one of several ranks."""

BY_DAY = ("qwen3_moe", "qwen3_5")
BY_NIGHT = (
    "tiny",
    "gemma2",
    "llama_bias",
    "qwen2_moe",
    "qwen3_next",
    "gemma4",
    "gemma4_experts",
    "gemma4_vision",
    "glm4_moe_lite",
    "deepseek_v2",
    "lfm2",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
)
FAMILIES = (
    *(pytest.param(name, CHANGES.get(name, {}), id=name) for name in BY_DAY),
    *(
        pytest.param(name, changes, id=f"{name}-unaligned", marks=[] if name in BY_DAY else [pytest.mark.nightly])
        for name, changes in UNALIGNED.items()
    ),
    *(pytest.param(name, CHANGES.get(name, {}), id=name, marks=pytest.mark.nightly) for name in BY_NIGHT),
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded by Triton's interpreter")

ALIGNED_HEADS = {"gpt2": {"n_embd": 64}, "mimo_v2_flash": {}, "vaultgemma": {}}
UNQUANTIZED = TunedLinear(torch.device("meta"), "auto")


class Nothing:
    """Stands for streams and graphs."""

    def __init__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Launched:
    """In the place of a `GraphMemory`: what is captured is launched once, and replays compute nothing."""

    def capture(self, step: Callable[[], StepOutputs]) -> tuple[Callable[[], None], StepOutputs]:
        return lambda: None, step()


def take_graphs(llm: LLM) -> None:
    """Have the engine capture its steps, which it does on GPUs alone."""
    runner: Any = runner_of(llm)
    drafter, tokens = runner._drafter._drafter, OPTIONS["max_batch_tokens"]
    kinds = step_kinds(runner.model, GraphOptions(tokens, drafts=drafter is not None))
    if runner.model.states is not None:
        kinds = [kind for kind in kinds if not isinstance(kind, PromptKind)]
    for kind in kinds:
        if isinstance(kind, VerifyKind):
            kind._kept.fill_(1)  # which no kernel does here
    runner.graphs = [StepGraphs(kind, Launched()) for kind in kinds]
    if drafter is not None:
        drafter.drafts = DraftGraphs(ModelSteps(drafter._model), runner.model.rows, Launched())
        drafter.prompts = StepGraphs(PromptKind(drafter._model, tokens, samples=False), Launched())
    use_idle_time(core_of(llm).executor, math.inf)


def use_everything(llm: LLM, adapter: str | None) -> None:
    """Prompts and decodes, few and many rows, alike and not, with all that may be asked of sampling."""
    plain = SamplingParams(temperature=0.7, max_tokens=3, ignore_eos=True)
    asked = [
        plain.replace(top_p=0.9, top_k=5, min_p=0.1),
        plain.replace(typical_p=0.5),
        plain.replace(presence_penalty=0.5, repetition_penalty=1.1, logprobs=2),
        plain.replace(logit_bias={7: 1.0}, min_tokens=2),
        plain.replace(prompt_logprobs=1),
        SamplingParams(beam_width=2, max_tokens=3),
    ]
    if adapter is not None:  # the model that has a tokenizer
        asked.append(SamplingParams(max_tokens=3, structured=StructuredOutput(regex="a*")))
    prompt = [5, 6, 7, 8, 9, 10]
    for params in (plain, *asked):
        llm.generate([prompt], params, on_error="return")  # zeros are no answers of a form
    llm.generate([prompt] * len(asked), asked, on_error="return")
    for rows in (2, 5, 11, 20, 40, 70, 90):
        llm.generate([[row + 3, *prompt] for row in range(rows)], plain)
    for rows in (2, 4, 40, 90):
        llm.generate([[*(7 + place % 9 for place in range(250)), row + 3] for row in range(rows)], plain)
    if adapter is not None:
        for rows in (1, 3, 17, 33, 70):
            llm.generate([prompt] * rows, plain, adapter=[adapter, None] * (rows // 2) + [adapter] * (rows % 2))


@pytest.fixture
def few_products() -> None:
    """Engines launch what they launch on a device: the list knows nothing else."""


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_what_is_launched_was_launched_at_start(
    family: str,
    changes: dict[str, Any],
    tmp_path: Path,
    on_device: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, options, adapter = tmp_path / "model", OPTIONS, None
    if family == "tiny":
        make_tiny_model(folder)
        adapter = "one"
        path = make_adapter(folder, tmp_path / "adapter", 1, r=3)
        options = options | PLACES | {"adapters": {adapter: str(path)}}
    else:
        make_checkpoint(family, folder, **changes)
    monkeypatch.setattr(torch, "empty", zeroed(torch.empty))
    monkeypatch.setattr(torch, "empty_like", zeroed(torch.empty_like))
    monkeypatch.setattr(kvern.runner.decode_graphs, "LEAST_KEYS", 64)
    with recorded(monkeypatch) as launched:
        llm = on_device(folder, **options)
        use_everything(llm, adapter)
        take_graphs(llm)
        use_everything(llm, adapter)
    model = Stored(spec_from_config(read_config(folder)), LinearMethods(UNQUANTIZED))
    start = EngineConfig(str(folder), **options), torch.bfloat16, model, False
    known = recorded_at_start([start], monkeypatch)  # after the engine, which the interpreter gives shorter chunks
    names = {name for name, _ in launched}
    attention = {"_prefill_attention_kernel", "_prefix_attention_kernel"}
    assert names >= {"_sample_chunk_kernel"} | ({"_join_latents_kernel"} if family in LATENT else attention)
    missing = [f"{name} {form}" for name, form in launched if (name, form) not in known]
    assert not missing, "\n".join(missing)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["apertus", "gpt2", "mimo_v2_flash", "vaultgemma"])
def test_attention_and_sampling_of_models_of_transformers_are_compiled_at_start(
    family: str, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their other parts run in the start's check, which compiles what they launch."""
    folder = make_checkpoint(family, tmp_path / "model", **ALIGNED_HEADS.get(family, {"hidden_size": 64}))
    options = OPTIONS | {"model_implementation": "transformers"}
    monkeypatch.setattr(kvern.runner.decode_graphs, "LEAST_KEYS", 64)
    monkeypatch.setattr(kvern.runner.fallback_check, "check_fallback", lambda *_: None)  # nothing is computed here
    with recorded(monkeypatch) as launched:
        llm = on_device(folder, **options)
        monkeypatch.setattr(torch, "empty", zeroed(torch.empty))
        monkeypatch.setattr(torch, "empty_like", zeroed(torch.empty_like))
        use_everything(llm, None)
        take_graphs(llm)
    model = Stored(description.describe(folder), LinearMethods(UNQUANTIZED))
    known = recorded_at_start([(EngineConfig(str(folder), **options), torch.bfloat16, model, False)], monkeypatch)
    names = {name for name, _ in launched}
    assert names >= {"_sample_chunk_kernel", "_prefill_attention_kernel", "_prefix_attention_kernel"}
    parts = {name for module in (activation, linear, norm) for name in vars(module) if name.endswith("_kernel")}
    missing = [f"{name} {form}" for name, form in launched.keys() - known.keys() if name not in parts]
    assert not missing, "\n".join(missing)


def starts_of(llm: LLM) -> list[tuple[EngineConfig, torch.dtype, Stored, bool]]:
    """What a start compiles kernels for: the model, and the draft model or head beside it."""
    core: Any = core_of(llm)
    worker = core.executor._worker
    config, draft = worker._config, worker._stored_draft(worker._draft)
    has_head = not isinstance(worker.runner._drafter._drafter, DeviceDraftModel)
    model = Stored(worker._spec, LinearMethods(UNQUANTIZED), has_head=has_head)
    starts = [(config, torch.bfloat16, model, True)]
    return starts if draft is None else [*starts, (of_draft(config), torch.bfloat16, draft, True)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama", None), ("llama", "int4"), ("llama", "int8"), ("llama", "fp8"), *((name, None) for name in UNALIGNED)],
)
def test_what_a_draft_model_launches_was_launched_at_start(
    family: str,
    quantization: Literal["int4", "int8", "fp8"] | None,
    tmp_path: Path,
    on_device: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sizes are others than the model's."""
    make_checkpoint(family, tmp_path / "model", **UNALIGNED.get(family, {}))
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
    make_checkpoint("qwen3", tmp_path / "draft", **sizes, head_dim=32, num_hidden_layers=2)
    monkeypatch.setattr(torch, "empty", zeroed(torch.empty))
    monkeypatch.setattr(torch, "empty_like", zeroed(torch.empty_like))
    monkeypatch.setattr(kvern.runner.decode_graphs, "LEAST_KEYS", 64)
    options = OPTIONS | {"draft_model": str(tmp_path / "draft"), "draft_quantization": quantization}
    options |= {"head_quantization": "none"}  # as on a GPU
    with recorded(monkeypatch) as launched:
        llm = on_device(tmp_path / "model", **options)
        core: Any = core_of(llm)
        core.drafting.wanted = lambda _: lambda request: 3 * takes_drafts(request)
        use_everything(llm, None)
        take_graphs(llm)
        use_everything(llm, None)
    assert llm.statistics().draft_tokens > 0
    known = recorded_at_start(starts_of(llm), monkeypatch)
    assert "_begin_drafts_kernel" in {name for name, _ in launched}
    missing = [f"{name} {form}" for name, form in launched if (name, form) not in known]
    assert not missing, "\n".join(missing)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_what_a_draft_head_launches_was_launched_at_start(
    kind: str, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = make_checkpoint("llama", tmp_path / "model", hidden_size=96), tmp_path / "head"
    if kind == "medusa":
        write_medusa(head, target)
    else:
        write_eagle(head, target, drafted=60 if kind == "eagle3" else None)
    monkeypatch.setattr(torch, "empty", zeroed(torch.empty))
    monkeypatch.setattr(torch, "empty_like", zeroed(torch.empty_like))
    with recorded(monkeypatch) as launched:
        llm = on_device(target, draft_model=str(head), **OPTIONS)
        core: Any = core_of(llm)
        core.drafting.wanted = lambda _: lambda request: 3 * takes_drafts(request)
        use_everything(llm, None)
        runner = core.executor._worker.runner
        if kind != "medusa":
            drafter = runner._drafter._drafter
            head = replace(runner.model, decoder=drafter._head, attention=drafter._attention)
            drafter.in_graphs = HeadGraphs(head, Launched())
            use_everything(llm, None)
    known = recorded_at_start(starts_of(llm), monkeypatch)
    missing = [f"{name} {form}" for name, form in launched if (name, form) not in known]
    assert not missing, "\n".join(missing)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "names", "changes"),
    [
        ("qwen3_next", "qwen", {"layer_types": ["full_attention"], "num_experts": 0}),
        ("glm4_moe_lite", "deepseek", {"mlp_layer_types": ["sparse"]}),
    ],
)
def test_a_models_own_layer_is_recorded(
    family: str, names: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That for multi-token prediction, which is a head, beside layers of states and of latents."""
    make_checkpoint(family, tmp_path, vocab_size=288)
    add_prediction(tmp_path, family, names, vocab_size=288, num_hidden_layers=1, **changes)
    config = EngineConfig(str(tmp_path), draft_model="mtp")
    spec = spec_from_config(read_config(tmp_path))
    worker = Worker(config, tmp_path, spec, torch.device("cpu"), Startup(), tmp_path)
    draft = worker._stored_draft(tmp_path)
    assert draft is not None
    known = recorded_at_start([(of_draft(config), torch.bfloat16, draft, True)], monkeypatch)
    assert {"_rms_norm_kernel", "_sample_chunk_kernel"} < {name for name, _ in known}
