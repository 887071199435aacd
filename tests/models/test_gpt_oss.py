"""gpt-oss through the engine, beside transformers: attention sinks, biased experts, and MXFP4 as it is published."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, EngineConfig, SamplingParams
from kvern.attention import selection
from kvern.device.measurements import Measurements
from kvern.errors import ConfigError, UnsupportedModel
from kvern.layers.ops import TORCH
from kvern.models.loader import load_model
from kvern.models.registry import spec_from_config
from kvern.quantize.checkpoint import Checkpoint
from kvern.spec.rope_stretching import Yarn
from tests.support.configs import GPT_OSS
from tests.support.families import make_checkpoint
from tests.support.model_outputs import error
from tests.support.packers import mxfp4_experts, store
from tests.support.parity_reference import CHUNK, OUTPUT, Reference, check_outputs

PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=100)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(make_checkpoint("gpt_oss", tmp_path_factory.mktemp("gpt_oss")))


def engine(folder: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "kv_cache_tokens": 512, "max_batch_tokens": CHUNK}
    return LLM(str(folder), **sizes | {"max_batch_requests": 5, "threads": 1, "dtype": "float32"} | options)


@pytest.mark.parametrize("cpu_kernels", [True, False])
def test_chunks_prefixes_and_preemptions_change_nothing(reference: Reference, cpu_kernels: bool) -> None:
    small: dict[str, Any] = {"kv_cache_tokens": 64, "max_batch_tokens": 48, "windowed_kv_cache": "off"}
    with engine(reference.folder, cpu_kernels=cpu_kernels, **small) as llm:
        for _ in range(2):
            check_outputs(llm.generate(reference.prompts, PARAMS), reference)
        found = llm.statistics()
    assert found.preemptions > 0 and found.cached_tokens > 0


def test_a_cache_of_integers_stays_near(reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for cpu_kernels in (True, False):
        with engine(reference.folder, cpu_kernels=cpu_kernels, kv_cache_dtype="int8") as llm:
            outputs = llm.generate(reference.prompts, params)
        entries = [(output.prompt_logprobs or [])[1:] for output in outputs]
        found.append(
            torch.tensor([value.logprob for prompt in entries for entry in prompt for value in (entry or {}).values()])
        )
    expected = torch.cat(
        [
            scores[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
            for prompt, scores in zip(reference.prompts, reference.logprobs, strict=True)
        ]
    )
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-2)
    assert 0 < (found[0] - expected).abs().mean() < 0.1


@pytest.mark.parametrize("options", [{}, {"cpu_kernels": False}], ids=str)
def test_published_experts(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs of an expert or two."""
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", 4500)
    model = make_checkpoint("gpt_oss", tmp_path / "model", hidden_size=64, intermediate_size=32)
    made = store(model, tmp_path, mxfp4_experts, r"experts\.\w+_proj$", GPT_OSS["quantization_config"])
    with engine(made.quantized, **options) as llm:
        check_outputs(llm.generate((expected := Reference(made.rounded)).prompts, PARAMS), expected)


def test_the_published_configuration() -> None:
    spec = spec_from_config(GPT_OSS)
    assert [layer.attention.window for layer in spec.layers[:3]] == [128, None, 128]
    assert all(attention.sinks for attention in spec.attentions)
    rope = spec.layers[0].rope
    assert rope is not None and rope.theta == 150000 and isinstance(rope.scaling, Yarn) and not rope.scaling.truncate
    assert spec.biases.qkv and spec.biases.output


def test_what_is_no_gpt_oss_of_these_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"swiglu_limit is 5\.0; kvern knows 7\.0"):
        spec_from_config(GPT_OSS | {"swiglu_limit": 5.0})


def test_libraries_without_sinks_are_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(selection, "_installed", lambda name: True)
    layers = spec_from_config(GPT_OSS).attentions[:2]
    shapes = selection.Shapes(layers, 16, torch.bfloat16, torch.bfloat16, CPU, 4, 64)
    config, measurements = EngineConfig("model"), Measurements(tmp_path, CPU)
    with pytest.raises(
        ConfigError, match="attention_backend flashinfer cannot be used here: kvern has no attention sinks"
    ):
        selection.choose("flashinfer", config, shapes, measurements, 1 << 30)


def test_models_with_sinks_are_not_quantized(reference: Reference) -> None:
    with pytest.raises(UnsupportedModel, match="gpt_oss has attention sinks, through which calibrations do not go"):
        Checkpoint(reference.folder, CPU)


def test_without_sinks_the_model_is_another(reference: Reference) -> None:
    decoder = load_model(reference.folder)
    assert len(decoder.sinks) == 3
    for logits in decoder.sinks.values():
        logits.fill_(-torch.inf)
    assert error(decoder, reference.folder) > 1e-2


def test_gate_and_up_are_clamped() -> None:
    x = torch.linspace(-12, 12, 24).view(2, 12)
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    found = TORCH.gated_activation("clamped_swiglu")(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
