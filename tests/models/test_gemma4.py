"""Gemma 4: what its layers borrow, add and store, and what is refused of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.models.limits import check_spec
from kvern.models.loader import LoadOptions, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.quantize.checkpoint import Checkpoint
from kvern.runner.memory import bytes_of_token
from tests.support.families import make_checkpoint, reference_greedy, reference_logits
from tests.support.model_outputs import PROMPT, TOLERANCE, DenseAttend, error, logits
from tests.support.peft_adapters import make_adapter, merge
from tests.support.speculation import speculating


@pytest.fixture(scope="module")
def borrowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, of which the last three attend to the keys and values of the second and third."""
    return make_checkpoint("gemma4_vision", tmp_path_factory.mktemp("borrowing"))


def text_settings(folder: Path) -> dict[str, Any]:
    """As of a checkpoint of the language model alone."""
    config = read_config(folder)
    return {**config["text_config"], "architectures": ["Gemma4ForCausalLM"]}


def test_caches_are_those_of_layers_with_keys_of_their_own(borrowing: Path) -> None:
    spec = spec_from_config(read_config(borrowing))
    assert [layer.attention.cache_of for layer in spec.layers] == [None, None, None, 1, 2, 1]
    assert spec.caching_layers == (0, 1, 2)
    assert [layer.mlp.width for layer in spec.layers] == [80, 80, 80, 160, 160, 160]  # type: ignore[union-attr]
    assert bytes_of_token(spec, torch.bfloat16) == 2 * 2 * (2 * 16 + 2 * 32 + 2 * 16)


def test_keys_and_values_that_borrowing_layers_store_are_passed_over(borrowing: Path, tmp_path: Path) -> None:
    tensors = load_file(borrowing / "model.safetensors")
    prefix = "model.language_model.layers"
    more = {f"{prefix}.{layer}.self_attn.k_proj.weight": torch.ones(32, 48) for layer in (4, 5)}
    more |= {f"{prefix}.4.self_attn.{name}_norm.weight": torch.ones(16) for name in "kv"}
    (tmp_path / "config.json").write_text((borrowing / "config.json").read_text())
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert error(load_model(tmp_path), borrowing) < TOLERANCE
    save_file(tensors | {f"{prefix}.2.self_attn.x_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"1 unexpected: .*layers\.2\.self_attn\.x_proj\.weight"):
        load_model(tmp_path)


def test_full_layers_are_described_as_published_and_as_saved(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma4", tmp_path)
    saved = read_config(folder)
    published = {key: value for key, value in saved.items() if key != "per_layer_config"}
    published |= {"global_head_dim": 24, "num_global_key_value_heads": 1}
    spec = spec_from_config(saved)
    assert spec_from_config(published) == spec
    assert [(item.head_dim, item.kv_heads) for item in spec.attentions] == [(12, 4), (24, 1), (24, 1)]
    without_pattern = {key: value for key, value in published.items() if key not in ("layer_types", "rope_parameters")}
    windows = [item.window for item in spec_from_config(without_pattern | {"num_hidden_layers": 8}).attentions]
    assert windows == [9, 9, 9, 9, 9, None, 9, None], "every sixth layer, and the last"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is all"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: of 6 layers none of type 'full_attention'"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9: of 6 layers none of type"),
        ({"vocab_size_per_layer_input": 130}, "vocab_size_per_layer_input is 130, below vocab_size 131"),
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config has 'intermediate_size'"),
        ({"per_layer_config": {"5": {"head_dim": 20}}}, "layer 5 attends to the cache of layer 1, whose attention is"),
        ({"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 8}, "top_k is None"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "config.json lacks 'full_attention'"),
        ({"hidden_activation": "tanh"}, "activation 'tanh' is unknown"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(changes: dict[str, Any], reason: str, borrowing: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        spec_from_config(text_settings(borrowing) | changes)
    assert "\n" not in str(caught.value)


def test_a_cache_is_borrowed_from_an_earlier_layer_that_has_one(borrowing: Path) -> None:
    spec = spec_from_config(read_config(borrowing))
    for owner in (3, 4, 5, 9):
        last = replace(spec.layers[-1], mixer=replace(spec.layers[-1].attention, cache_of=owner))
        with pytest.raises(ValueError, match=f"layer 5 attends to the cache of layer {owner}, which has none by then"):
            check_spec(replace(spec, layers=(*spec.layers[:-1], last)))


def test_calibrations_are_refused_where_layers_have_inputs_of_their_own(borrowing: Path) -> None:
    with pytest.raises(UnsupportedModel, match="inputs of each layer's own, through which calibrations do not go"):
        Checkpoint(borrowing, torch.device("cpu"))


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_weights_are_quantized_while_they_are_loaded(quantization: str, borrowing: Path) -> None:
    """Tables, of which rows are looked up, stay plain; layers move the logits a little."""
    decoder = load_model(borrowing, LoadOptions(quantization=quantization))
    assert decoder.per_layer is not None and decoder.per_layer.table.method.name == "unquantized"
    assert decoder.layers[5].self_attn.qkv_proj.method.name != "unquantized"  # type: ignore[union-attr]
    rows = torch.stack((logits(decoder, PROMPT).flatten(), reference_logits(borrowing, PROMPT).flatten()))
    assert 0.7 < torch.corrcoef(rows)[0, 1] < 1 - TOLERANCE


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_reach_borrowing_layers_and_their_inputs(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 131,
        "attention_k_eq_v": False,
    }
    folder = make_checkpoint("gemma4", tmp_path / "model", **sizes)
    modules = ["q_proj", "k_proj", "down_proj", "per_layer_input_gate", "per_layer_projection"]
    adapter = make_adapter(folder, tmp_path / "one", 1, target_modules=modules)
    merged = merge(folder, adapter, tmp_path / "merged")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), threads=1, max_model_len=64, adapters={"one": str(adapter)}) as llm:
        outputs = llm.generate([PROMPT[:30]] * 2, params, adapter=["one", None])
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [reference_greedy(path, PROMPT[:30], 8) for path in (merged, folder)]
    assert found[0] != found[1]


def test_borrowing_layers_compute_the_tokens_that_are_sampled_from_alone(borrowing: Path) -> None:
    decoder, ids, wanted = load_model(borrowing), torch.tensor(PROMPT), torch.tensor([7, 40])
    rows: list[int] = []

    def watched(mlp: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(x: torch.Tensor, *adapters: Any) -> torch.Tensor:
            rows.append(len(x))
            return mlp(x, *adapters)

        return counted

    for layer in decoder.layers:
        layer.__dict__["mlp"] = watched(layer.mlp)  # type: ignore[arg-type]
    with torch.inference_mode():
        whole = decoder(ids, torch.arange(41), DenseAttend(decoder))
        some = decoder(ids, torch.arange(41), DenseAttend(decoder), wanted)
    assert rows == [41] * 6 + [41, 41, 2, 2, 2, 2]
    torch.testing.assert_close(some, whole[wanted], atol=1e-5, rtol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "cpu_kernels"),
    [
        ("gemma4", False),
        pytest.param("gemma4_experts", False, marks=pytest.mark.nightly),
        pytest.param("gemma4_vision", False, marks=pytest.mark.nightly),
        ("gemma4_vision", True),
    ],
)
def test_preemptions_change_no_answer_with_kernels_and_without(family: str, cpu_kernels: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    prompts = [PROMPT[:3], PROMPT[5:9], PROMPT[9:12], PROMPT[2:7]]
    expected = [reference_greedy(folder, prompt, 40) for prompt in prompts]
    options: dict[str, Any] = {"block_size": 4, "max_batch_tokens": 7, "kv_cache_tokens": 64, "max_model_len": 64}
    with LLM(str(folder), threads=1, cpu_kernels=cpu_kernels, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        assert llm.statistics().preemptions
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_drafts_go_with_borrowed_caches(borrowing: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [PROMPT[:30], PROMPT[5:20], PROMPT[:3]]
    expected = [reference_greedy(borrowing, prompt, 12) for prompt in prompts]
    with LLM(str(borrowing), threads=1, max_model_len=64) as llm:
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        with speculating(llm, outputs) as oracle:
            outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert oracle.guessed


def test_a_saved_configuration_may_be_of_the_text_alone(borrowing: Path, tmp_path: Path) -> None:
    tensors = load_file(borrowing / "model.safetensors")
    prefix = "model.language_model."
    own = {name.removeprefix(prefix): item for name, item in tensors.items() if name.startswith(prefix)}
    (tmp_path / "config.json").write_text(json.dumps(text_settings(borrowing)))
    for before in ("", "model."):
        save_file({before + name: item for name, item in own.items()}, tmp_path / "model.safetensors")
        assert error(load_model(tmp_path), borrowing) < TOLERANCE
