"""Gemma 3n: its streams, tables and tensors, and what is refused of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.errors import ConfigError, CorruptCheckpoint, UnsupportedModel
from kvern.models.limits import check_spec
from kvern.models.loader import LoadOptions, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.quantize.checkpoint import Checkpoint
from kvern.runner.device import check_kernels
from kvern.spec.model import MlpSpec
from tests.support.families import make_checkpoint, reference_greedy, reference_logits
from tests.support.model_outputs import PROMPT, TOLERANCE, DenseAttend, error, logits
from tests.support.peft_adapters import make_adapter, merge


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, of which the last three attend to the keys and values of the second and third."""
    return make_checkpoint("gemma3n", tmp_path_factory.mktemp("gemma3n"))


def test_layers_have_widths_sparsities_and_caches_of_their_own(folder: Path) -> None:
    spec = spec_from_config(read_config(folder))
    mlps = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec)]
    assert [mlp.width for mlp in mlps] == [80, 64, 96, 80, 88, 72]
    assert [mlp.sparsity for mlp in mlps] == [0.7, 0.0, 0.9, 0.0, 0.6, 0.0]
    assert [layer.attention.cache_of for layer in spec.layers] == [None, None, None, 2, 1, 2]


def test_a_configuration_as_it_was_first_published_is_read(folder: Path) -> None:
    """One width, bases of rotation by their older names, and what the model class has where nothing is said."""
    saved = read_config(folder)
    left_out = ("rope_parameters", "layer_types", "activation_sparsity_pattern", "num_kv_shared_layers")
    old = {key: value for key, value in saved.items() if key not in left_out}
    old |= {"num_hidden_layers": 35, "intermediate_size": 72, "rope_theta": 2e6, "rope_local_base_freq": 5e3}
    spec = spec_from_config(old)
    assert [layer.attention.window for layer in spec.layers[:5]] == [9, 9, 9, 9, None]
    assert [layer.rope.theta for layer in spec.layers[3:5] if layer.rope] == [5e3, 2e6]
    assert [layer.mlp.sparsity for layer in spec.layers[8:12] if isinstance(layer.mlp, MlpSpec)] == [0.95, 0.95, 0, 0]
    assert [layer.attention.cache_of for layer in spec.layers[19:21]] == [None, 18]


STREAMS = ["router", "prediction", "correction", "output_scale", "left", "right", "entering", "leaving"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("part", [*STREAMS, "first-stream-alone"])
def test_every_part_of_streams_is_seen_in_the_logits(part: str, folder: Path) -> None:
    decoder = load_model(folder)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if f".{part}." in name:
                weight.copy_(weight.flip(0))
    if part == "first-stream-alone":
        assert decoder.streams is not None
        decoder.streams.__dict__["leave"] = lambda streams: streams[:, 0]
    assert error(decoder, folder) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx is 1"),
        ({"altup_correct_scale": False}, "altup_correct_scale is False"),
        ({"altup_num_inputs": 0}, "streams is 0: it must be above 0"),
        ({"hidden_size_per_layer_input": 0}, "width is 0: it must be above 0"),
        ({"laurel_rank": 0}, "laurel_rank is 0: it must be above 0"),
        ({"intermediate_size": [80, 64]}, "intermediate_size has 2 entries, and num_hidden_layers is 6"),
        ({"intermediate_size": [80, 64, 96, 80, 88, 1 << 30]}, "intermediate_size is .*: it must be a whole number of"),
        (
            {"activation_sparsity_pattern": [0.5]},
            "activation_sparsity_pattern has 1 entries, and num_hidden_layers is 6",
        ),
        ({"activation_sparsity_pattern": [1.0] * 6}, "the sparsity of an MLP is 1.0: it must be from 0 to less than 1"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: of 6 layers none of type 'full_attention'"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(changes: dict[str, Any], reason: str, folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        spec_from_config(read_config(folder) | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"per_layer": None}, {"scalars": True}])
def test_streams_go_with_layers_of_one_kind(changes: dict[str, Any], folder: Path) -> None:
    spec = spec_from_config(read_config(folder))
    with pytest.raises(ValueError, match="several residual streams go with layers that have"):
        check_spec(replace(spec, additions=replace(spec.additions, **changes)))


def test_gpus_and_calibrations_are_refused(folder: Path) -> None:
    spec = spec_from_config(read_config(folder))
    with pytest.raises(ConfigError, match=r"device cuda does not go with gemma3n_text.*several residual streams"):
        check_kernels(spec, torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match="inputs of each layer's own, through which calibrations do not go"):
        Checkpoint(folder, torch.device("cpu"))


def test_the_language_model_is_read_from_whole_checkpoints(folder: Path, tmp_path: Path) -> None:
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": read_config(folder)}))
    own = load_file(folder / "model.safetensors")
    towers = ("vision_tower.timm_model.conv_stem.conv", "embed_vision.embedding", "audio_tower.conformer.0.norm")
    others = {f"model.{name}.weight": torch.ones(3) for name in (*towers, "embed_audio.hard_embedding_norm")}
    borrowed = {f"layers.{layer}.self_attn.{name}_proj.weight": torch.ones(32, 48) for layer in (3, 5) for name in "kv"}
    for before in ("model.language_model.", "language_model.model.", "model."):
        named = {before + name.removeprefix("model."): tensor for name, tensor in own.items()}
        stored = {before + name: tensor for name, tensor in borrowed.items()}
        save_file(named | others | stored, tmp_path / "model.safetensors")
        assert error(load_model(tmp_path), folder) < TOLERANCE
    save_file(named | {"model.layers.0.altup.more.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"1 unexpected: .*layers\.0\.altup\.more\.weight"):
        load_model(tmp_path)


def test_tokens_behind_the_table_of_inputs_take_its_first_row(folder: Path) -> None:
    decoder = load_model(folder)
    assert decoder.per_layer is not None
    rows = decoder.per_layer.table(torch.tensor([119, 120, 130, 0]))
    assert torch.equal(rows[1], rows[3]) and torch.equal(rows[2], rows[3]) and not torch.equal(rows[0], rows[3])
    prompt = [*PROMPT[:9], 130, 120, 5]
    assert (logits(decoder, prompt) - reference_logits(folder, prompt)).abs().max() < TOLERANCE


def test_wanted_tokens_are_computed_alone_behind_the_last_cache(folder: Path) -> None:
    decoder, wanted = load_model(folder), torch.tensor([7, 40])
    with torch.inference_mode():
        whole = decoder(torch.tensor(PROMPT), torch.arange(41), DenseAttend(decoder))
        some = decoder(torch.tensor(PROMPT), torch.arange(41), DenseAttend(decoder), wanted)
    torch.testing.assert_close(some, whole[wanted], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_streams_stay_plain_beside_quantized_weights(quantization: str, folder: Path) -> None:
    decoder = load_model(folder, LoadOptions(quantization=quantization))
    first: Any = decoder.layers[0]
    plain = (first.altup.router, first.altup.prediction, first.altup.correction)
    assert {linear.method.name for linear in plain} == {"unquantized"}
    assert first.laurel.left.method.name != "unquantized"
    rows = torch.stack((logits(decoder, PROMPT).flatten(), reference_logits(folder, PROMPT).flatten()))
    assert 0.7 < torch.corrcoef(rows)[0, 1] < 1 - TOLERANCE


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_reach_streams(folder: Path, tmp_path: Path) -> None:
    modules = ["q_proj", "down_proj", "per_layer_projection", "linear_left", "modality_router", "prediction_coefs"]
    adapter = make_adapter(folder, tmp_path / "one", 1, target_modules=[*modules, "correction_coefs"])
    merged = merge(folder, adapter, tmp_path / "merged")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), threads=1, max_model_len=64, adapters={"one": str(adapter)}) as llm:
        outputs = llm.generate([PROMPT[:30]] * 2, params, adapter=["one", None])
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [reference_greedy(path, PROMPT[:30], 8) for path in (merged, folder)]
    assert found[0] != found[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("cpu_kernels", [False, True])
def test_preemptions_change_no_answer_with_kernels_and_without(cpu_kernels: bool, folder: Path) -> None:
    prompts = [PROMPT[:14], PROMPT[5:18], PROMPT[9:18], PROMPT[:3]]
    expected = [reference_greedy(folder, prompt, 12) for prompt in prompts]
    options: dict[str, Any] = {"block_size": 4, "max_batch_tokens": 7, "kv_cache_tokens": 64, "max_model_len": 64}
    options["windowed_kv_cache"] = "off"  # else there is room for all
    with LLM(str(folder), threads=1, cpu_kernels=cpu_kernels, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        assert llm.statistics().preemptions
    assert [output.outputs[0].token_ids for output in outputs] == expected
