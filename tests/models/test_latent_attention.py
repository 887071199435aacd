"""Models that attend to latents: one vector a token, whatever becomes of the blocks that hold it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.attention.compiled import CompiledAttention
from kvern.attention.torch_sdpa import TorchAttention
from kvern.cli.model_report import report_of
from kvern.config import EngineConfig
from kvern.errors import ConfigError, InvalidAdapter, UnsupportedModel
from kvern.models.loader import LoadOptions, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.runner.device import check_latents
from kvern.runner.memory import bytes_of_token
from kvern.spec.mixers import LatentAttentionSpec
from kvern.spec.model import ModelSpec, MoeSpec
from tests.support.cache_folder import load_kernels
from tests.support.families import make_checkpoint, reference_greedy, reference_score
from tests.support.idle import is_idle
from tests.support.internals import core_of
from tests.support.latent_engine import GREEDY, OPTIONS, OUTPUT, PROMPTS, answers, check_steps, expected_answers
from tests.support.latent_families import STRETCHED
from tests.support.model_outputs import TOLERANCE, error
from tests.support.peft_adapters import make_adapter, merge
from tests.support.speculation import speculating
from tests.support.tiers import HOST, PAGE_TOKENS, check_hits, figures, forget, trust


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return expected_answers(folder)


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def cpu_kernels(request: pytest.FixtureRequest) -> bool:
    if request.param:
        load_kernels("cpu_attention", 1)
    return bool(request.param)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "deepseek_v2",
            {"q_lora_rank": None, "attention_bias": False, "topk_method": "greedy", "rope_parameters": STRETCHED},
        ),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False}),
    ],
    ids=["V2-Lite", "halves"],
)
def test_other_settings_agree_with_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    made = make_checkpoint(family, tmp_path, **changes)
    assert error(load_model(made), made) < TOLERANCE


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv_cache_tokens", [4 * 64, 64])
def test_chunks_preemptions_and_hits_change_no_answer(
    folder: Path, expected: list[list[int]], cpu_kernels: bool, kv_cache_tokens: int
) -> None:
    backend = CompiledAttention if cpu_kernels else TorchAttention
    check_steps(folder, expected, kv_cache_tokens, kernels=cpu_kernels, backend=backend)


def test_samples_and_beams_go_on_with_copies(folder: Path, cpu_kernels: bool) -> None:
    params = [
        SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True),
        SamplingParams(beam_width=3, n=2, max_tokens=5, ignore_eos=True),
    ]
    found = []
    for options in ({"kv_cache_tokens": 512}, {"kv_cache_tokens": 72, "max_batch_tokens": 5}):
        with LLM(str(folder), **(OPTIONS | options), cpu_kernels=cpu_kernels) as llm:
            outputs = llm.generate([PROMPTS[1], PROMPTS[1]], params)
            found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
            assert is_idle(llm)
    assert found[0] == found[1]
    worse = reference_score(folder, PROMPTS[1], reference_greedy(folder, PROMPTS[1], 5))
    assert reference_score(folder, PROMPTS[1], found[0][1][0]) >= worse - 1e-4, (
        "three beams find nothing worse than one"
    )


def test_steps_and_company_change_no_bit(folder: Path) -> None:
    load_kernels("cpu_attention", 1)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=OUTPUT, ignore_eos=True, logprobs=3)
    options = OPTIONS | {"dtype": "bfloat16", "deterministic": True}
    found = []
    for changes, order in (({"max_batch_requests": 1}, 1), ({"kv_cache_tokens": 64}, 1), ({"max_batch_tokens": 5}, -1)):
        with LLM(str(folder), **(options | {"kv_cache_tokens": 512} | changes)) as llm:
            outputs = llm.generate(PROMPTS[::order], params)[::order]
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert found[0] == found[1] == found[2]


def test_drafts_change_no_answer(folder: Path, expected: list[list[int]], cpu_kernels: bool) -> None:
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512, cpu_kernels=cpu_kernels) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        with speculating(llm, outputs) as oracle:
            assert answers(llm) == expected
        assert oracle.guessed


def test_latents_leave_for_a_tier_and_come_back(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=64, kv_tier=HOST) as llm:
        trust(llm)
        for _ in range(2):
            assert answers(llm) == expected
            forget(llm)
        assert figures(llm).hit_tokens and is_idle(llm)
        check_hits(llm, list(range(40, 70)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_reach_all_but_the_expansion(folder: Path, tmp_path: Path) -> None:
    modules = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapter = make_adapter(folder, tmp_path / "one", 1, target_modules=modules)
    merged = merge(folder, adapter, tmp_path / "merged")
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512, adapters={"one": str(adapter)}) as llm:
        outputs = llm.generate([PROMPTS[1], PROMPTS[1]], GREEDY, adapter=["one", None])
        expanding = make_adapter(folder, tmp_path / "two", 2, target_modules=["kv_b_proj"])
        with pytest.raises(InvalidAdapter, match="kv_b_proj"):
            llm.load_adapter("two", str(expanding))
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [reference_greedy(path, PROMPTS[1], OUTPUT) for path in (merged, folder)]
    assert found[0] != found[1]


def test_a_token_takes_one_vector_in_each_layer(folder: Path) -> None:
    spec = spec_from_config(read_config(folder))
    assert bytes_of_token(spec, torch.bfloat16) == 3 * (20 + 8) * 2
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=128) as llm:
        executor: Any = core_of(llm).executor
        assert [cache.shape for cache in executor._worker.runner.caches] == [(1, 32, 4, 1, 28)] * 3


def test_what_does_not_go_with_latents_is_not_offered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of("latent", folder)
    assert report.smaller()
    report.print()
    text = capsys.readouterr().out
    assert "attention keys, values" in text and "8 bits" not in text and "kvern quantize" in text


def test_bfloat16_stays_near_float32(folder: Path, cpu_kernels: bool) -> None:
    params = GREEDY.replace(max_tokens=1, prompt_logprobs=0)
    found = []
    for dtype in ("float32", "bfloat16"):
        with LLM(str(folder), **(OPTIONS | {"dtype": dtype}), kv_cache_tokens=512, cpu_kernels=cpu_kernels) as llm:
            tables = (llm.generate([PROMPTS[2]], params)[0].prompt_logprobs or [])[1:]
        found.append([next(iter(table.values())).logprob for table in tables if table])
    rough = torch.tensor(found[1]) - torch.tensor(found[0])
    assert 1e-4 < rough.abs().median() < 0.2


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_weights_are_quantized_while_they_are_loaded(folder: Path, quantization: str) -> None:
    assert 1e-3 < error(load_model(folder, LoadOptions(quantization=quantization)), folder) < 4.0


def test_layers_that_draft_are_passed_over(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    drafts = {
        name.replace("layers.2.", f"layers.{place}."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.2." in name
        for place in (3, 4)
    }
    save_file(tensors | drafts, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder) | {"num_nextn_predict_layers": 2, "model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert error(load_model(tmp_path), folder) < TOLERANCE


def test_the_language_model_of_a_checkpoint_that_sees_images(folder: Path, tmp_path: Path) -> None:
    """As Moonshot publishes Kimi K2.5, but for its format of weights, which is said within `text_config` there."""
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    towers = {"vision_tower.patch_embed.proj.weight": torch.zeros(2, 2), "mm_projector.proj.0.weight": torch.zeros(2)}
    save_file(tensors | towers, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = read_config(folder) | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert error(load_model(tmp_path), folder) < TOLERANCE
    text["quantization_config"] = {"quant_method": "fp8", "fmt": "e5m2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="fmt is 'e5m2'"):
        load_model(tmp_path)


def test_what_latents_do_not_go_with_yet_is_refused_by_name(folder: Path) -> None:
    spec, cpu = spec_from_config(read_config(folder)), torch.device("cpu")
    gpu = torch.device("cuda")
    layer = spec.layers[0]
    assert layer.rope is not None
    partly = replace(spec, layers=(replace(layer, rope=replace(layer.rope, dim=layer.rope.dim - 2)),))
    refused: list[tuple[dict[str, Any], ModelSpec, torch.device, str]] = [
        ({}, partly, gpu, "device cuda .*as a whole: use device cpu"),
        ({"deterministic": True}, spec, gpu, "deterministic .*depends on the batch"),
        ({"kv_cache_dtype": "fp8"}, spec, cpu, "kv_cache_dtype fp8 .*no scales"),
    ]
    for options, model, device, reason in refused:
        with pytest.raises(ConfigError, match=reason):
            check_latents(EngineConfig(model="model", **options), model, device)
    check_latents(EngineConfig(model="model"), spec, gpu)
    check_latents(EngineConfig(model="model", deterministic=True), partly, cpu)


V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""As DeepSeek publishes it."""
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
}


def test_files_as_they_are_published_are_read() -> None:
    spec = spec_from_config(V3)
    assert bytes_of_token(spec, torch.bfloat16) == 61 * 576 * 2
    [mixer] = {layer.mixer for layer in spec.layers}
    assert isinstance(mixer, LatentAttentionSpec)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert [isinstance(layer.mlp, MoeSpec) for layer in spec.layers] == [False] * 3 + [True] * 58
    for model_type in ("kimi_k2", "glm4_moe_lite"):
        assert spec_from_config(V3 | {"architectures": None, "model_type": model_type}).layers == spec.layers
    assert isinstance(moe := spec_from_config(V2).layers[3].mlp, MoeSpec)
    assert (moe.scoring, moe.groups, moe.top_groups, moe.renormalize) == ("softmax", 8, 4, False)


REFUSED: dict[str, dict[str, Any]] = {
    "scoring_func 'softmax' is unknown; known: sigmoid": V3 | {"scoring_func": "softmax"},
    "topk_method 'greedy' is unknown; known: noaux_tc": V3 | {"topk_method": "greedy"},
    "topk_method 'noaux_tc' is unknown; known: greedy": V2 | {"topk_method": "noaux_tc"},
    "scoring_func 'sigmoid' is unknown; known: softmax": V2 | {"scoring_func": "sigmoid"},
    "norm_topk_prob": V2 | {"norm_topk_prob": True},
    "use_mla": V2 | {"use_mla": False},
    "moe_layer_freq 2": V3 | {"moe_layer_freq": 2},
    "mlp_layer_types has 1 entries, and num_hidden_layers is 61": V3 | {"mlp_layer_types": ["dense"]},
    "layer type 'thin' is unknown; known: dense, sparse": V3 | {"mlp_layer_types": ["thin"] * 61},
    "attention_bias without q_lora_rank": V3 | {"q_lora_rank": None, "attention_bias": True},
    "kv_lora_rank is -1": V3 | {"kv_lora_rank": -1},
    "kv_lora_rank is 0: it must be above 0": V3 | {"kv_lora_rank": 0},
    "7 entries of a head of 7": V3 | {"qk_rope_head_dim": 7},
    "groups must be of the same size, of 1 or more": V2 | {"n_group": 7},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_settings_that_are_unknown_are_refused_by_name(reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        spec_from_config(REFUSED[reason])
    assert "\n" not in str(caught.value)
