"""Configurations find their family; old and new spellings describe the same model; strangers can register."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvern.errors import ConfigError, UnsupportedModel
from kvern.models.describe import describe
from kvern.models.registry import FAMILIES, register_family, spec_from_config
from tests.support.configs import LLAMA

MINIMAX = {"architectures": None, "num_local_experts": 8, "num_experts_per_tok": 2}
GROUPS = MINIMAX | {"moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
LFM2 = MINIMAX | {"conv_L_cache": 3, "moe_intermediate_size": 16, "layer_types": ["conv", "full_attention"] * 3}
GRANITE4 = {
    "architectures": None,
    "layer_types": ["mamba", "attention"] * 3,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "shared_intermediate_size": 32,
}
NEMOTRON = MINIMAX | {
    "hybrid_override_pattern": "M*-E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}


def config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return LLAMA | {"model_type": model_type, "architectures": [architecture]} | fields


@pytest.fixture
def _registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES, "_registered", dict(FAMILIES._registered))


def test_an_unknown_architecture_is_named_with_what_is_known_and_how_to_register() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config(config("fancy", "FancyForCausalLM"))
    message = str(caught.value)
    assert "FancyForCausalLM" in message and "llama" in message and "qwen3_moe" in message
    assert "register_family" in message and "kvern.model_families" in message
    assert "\n" not in message


def test_the_model_type_is_enough() -> None:
    assert spec_from_config(LLAMA | {"architectures": None}) == spec_from_config(LLAMA)


def test_a_configuration_that_names_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="names no architecture"):
        spec_from_config({})


@pytest.mark.usefixtures("_registrations")
def test_a_missing_setting_is_named() -> None:
    """Of a type that has no defaults."""
    register_family("fancy")(describe)
    incomplete = {key: value for key, value in LLAMA.items() if key != "num_attention_heads"}
    with pytest.raises(UnsupportedModel, match="lacks 'num_attention_heads'"):
        spec_from_config(incomplete | {"model_type": "fancy", "architectures": None})


def test_a_default_that_does_not_go_with_the_rest_is_named() -> None:
    incomplete = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    with pytest.raises(UnsupportedModel, match=r"num_key_value_heads is 8, as config\.json leaves it out: 4 attention"):
        spec_from_config(incomplete | {"model_type": "mistral", "architectures": None})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope scaling 'spiral' is unknown"),
        ({"hidden_act": "snake"}, "activation 'snake' is unknown"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"hidden_size": "wide"}, "cannot be read"),
        ({"model_type": "minimax_m2", **MINIMAX, "qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ({"model_type": "minimax_m2", **MINIMAX, "attn_type_list": [1, 0] * 3}, "linear attention"),
        ({"model_type": "minimax_m2", **MINIMAX, "num_mtp_modules": 10**9}, "num_mtp_modules is 1000000000"),
        ({"model_type": "lfm2", **LFM2, "layer_types": ["conv", "dense"] * 3}, "layer type 'dense' is unknown"),
        ({"model_type": "dots1", "architectures": None, "n_routed_experts": None}, "lacks 'n_routed_experts'"),
        ({"model_type": "deepseek_v2", "architectures": None, "norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"model_type": "granitemoehybrid", **GRANITE4, "time_step_limit": [0.01, 1.0]}, r"time_step_limit is \[0.01"),
        ({"model_type": "granitemoehybrid", **GRANITE4, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "granitemoehybrid", **GRANITE4, "mamba_n_groups": 3}, "8 heads of Mamba cannot share 3 groups"),
        (
            {"model_type": "granitemoehybrid", **GRANITE4, "layer_types": ["mamba"] * 6},
            "none of 6 layers attends, by layer_t",
        ),
        ({"model_type": "nemotron_h", **NEMOTRON, "hybrid_override_pattern": "MX"}, "layer type 'X' is unknown"),
        ({"model_type": "nemotron_h", **NEMOTRON, "hybrid_override_pattern": "-*"}, "no layer is Mamba-2"),
        ({"model_type": "nemotron_h", **NEMOTRON, "mlp_hidden_act": "snake"}, "activation 'snake' is unknown"),
        ({"model_type": "nemotron_h", **NEMOTRON, "mlp_bias": True}, "mlp_bias is true"),
        ({"model_type": "granitemoehybrid", **GRANITE4, "mamba_d_head": 10**9}, "head_dim is 1000000000"),
        ({"model_type": "falcon_h1", **GRANITE4, "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "dots1", **GROUPS, "topk_group": 0}, "top_groups is 0"),
        ({"model_type": "dots1", **GROUPS, "topk_group": 3}, "2 experts from 3 of 2 groups of 8 experts"),
        ({"model_type": "dots1", **GROUPS, "n_group": 3}, "2 experts from 1 of 3 groups of 8 experts"),
        ({"model_type": "dots1", **GROUPS, "num_experts_per_tok": 5}, "5 experts from 1 of 2 groups of 8 experts"),
    ],
)
def test_settings_that_nothing_describes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec_from_config(LLAMA | fields)


def test_a_width_without_a_multiplier_is_not_rounded() -> None:
    fields = LLAMA | {"model_type": "lfm2", **LFM2, "intermediate_size": 100}
    given = [spec_from_config(fields | {"block_ffn_dim_multiplier": value}) for value in (None, 1.0)]
    assert [spec.layers[0].mlp.width for spec in (*given, spec_from_config(fields))] == [66, 256, 256]


@pytest.mark.usefixtures("_registrations")
def test_a_decorated_function_is_a_family() -> None:
    @register_family("fancy", "FancyForCausalLM")
    def fancy(config: Mapping[str, Any]) -> Any:
        return describe(config, embedding_scale=3.0)

    assert "fancy" in FAMILIES.names
    assert spec_from_config(config("fancy", "FancyForCausalLM")).scales.embedding == 3.0


@pytest.mark.usefixtures("_registrations")
def test_a_name_belongs_to_one_family() -> None:
    with pytest.raises(ConfigError, match="'llama' is registered already"):
        register_family("llama")(describe)


@pytest.mark.usefixtures("_registrations")
def test_an_entry_point_is_a_family_and_is_imported_only_when_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fancy_models.py").write_text(
        "from kvern.models.describe import describe\ndef fancy(config): return describe(config, residual_scale=0.5)\n"
    )
    metadata = tmp_path / "fancy_models-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy-models\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvern.model_families]\nFancyForCausalLM = fancy_models:fancy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "FancyForCausalLM" in FAMILIES.names
    spec_from_config(LLAMA)
    assert "fancy_models" not in sys.modules
    assert spec_from_config(config("fancy", "FancyForCausalLM")).block.scale == 0.5
    monkeypatch.delitem(sys.modules, "fancy_models")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (
        LLAMA | {"rope_theta": 5e5},
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "default": (LLAMA, LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "no scaling": (LLAMA | {"rope_scaling": None}, LLAMA),
    "llama3": (
        LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ),
    "type for rope_type": (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "rotary_pct": (
        config("gpt_neox", "GPTNeoXForCausalLM", rotary_pct=0.5, rotary_emb_base=5000),
        config(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            rope_parameters={"rope_type": "default", "rope_theta": 5000, "partial_rotary_factor": 0.5},
        ),
    ),
    "gemma3": (
        config(
            "gemma3_text",
            "Gemma3ForCausalLM",
            sliding_window=32,
            sliding_window_pattern=3,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        config(
            "gemma3_text",
            "Gemma3ForCausalLM",
            sliding_window=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "lfm2": (
        LLAMA | LFM2 | {"model_type": "lfm2", "layer_types": None, "full_attn_idxs": [1, 3, 5], "block_ff_dim": 96},
        LLAMA | LFM2 | {"model_type": "lfm2", "tie_word_embeddings": True},
    ),
    "granite 4": (
        LLAMA | GRANITE4 | {"model_type": "granitemoehybrid", "time_step_limit": [0.0, float("inf")]},
        LLAMA
        | GRANITE4
        | {
            "model_type": "granitemoehybrid",
            "layer_types": ["linear_attention", "full_attention"] * 3,
            "mamba_d_head": 16,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
        },
    ),
    "nemotron_h": (
        LLAMA | NEMOTRON | {"model_type": "nemotron_h", "attention_head_dim": 32},
        LLAMA
        | NEMOTRON
        | {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": None,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
            "head_dim": 32,
        },
    ),
    "exaone 4": (
        config("exaone4", "Exaone4ForCausalLM", sliding_window=32, sliding_window_pattern="LLG"),
        config("exaone4", "Exaone4ForCausalLM", sliding_window=32, sliding_window_pattern=3),
    ),
    "dtype": (LLAMA | {"torch_dtype": "bfloat16"}, LLAMA | {"dtype": "bfloat16"}),
    "one end or several": (LLAMA | {"eos_token_id": 2}, LLAMA | {"eos_token_id": [2]}),
    "experts": (
        config("mixtral", "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2),
        config("mixtral", "MixtralForCausalLM", num_experts=8, num_experts_per_tok=2),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_old_and_new_spellings_describe_the_same_model(name: str) -> None:
    old, new = SPELLINGS[name]
    assert spec_from_config(old) == spec_from_config(new)


def test_phi3_long_context_takes_its_lengths_from_beside_the_rope_parameters() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    old = config("phi3", "Phi3ForCausalLM", rope_scaling=rope, original_max_position_embeddings=128)
    scaling = spec_from_config(old).layers[0].rope
    assert scaling is not None
    short, factor = scaling.scaling.frequencies(10000.0, 16, 128)
    long, _ = scaling.scaling.frequencies(10000.0, 16, 129)
    assert short[0] == 1.0 and long[0] == 0.5
    assert factor == pytest.approx((1 + 2 / 7) ** 0.5)  # stretched 4 times from 128 tokens: log 4 / log 128


def test_describing_a_model_does_not_import_torch() -> None:
    code = (
        "import sys; from kvern.models.registry import FAMILIES; [FAMILIES.find(name) for name in FAMILIES.names]; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_the_documentation_lists_every_model_type() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    missing = [name for name in FAMILIES.names if name.islower() and f"`{name}`" not in text]
    assert not missing


@pytest.mark.nightly
def test_sizing_a_model_does_not_import_pytorchs_compiler() -> None:
    """It takes seconds, at every start."""
    code = (
        "import sys, torch\n"
        "from kvern.layers.linear_format import LinearMethods\n"
        "from kvern.layers.unquantized import Unquantized\n"
        "from kvern.runner.gpu_checks import weight_bytes\n"
        "from kvern.models.loader import read_config\n"
        "from kvern.models.hub import resolve_model\n"
        "from kvern.models.registry import spec_from_config\n"
        "spec = spec_from_config(read_config(resolve_model('kvern-12m')))\n"
        "size = weight_bytes(spec, torch.float32, LinearMethods(Unquantized()))\n"
        "print(10e6 < size < 100e6, {'sympy', 'torch._dynamo'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True set()\n"
