"""Configurations in the shapes of published models: their encoders have transformers' tensors, and images their tokens.

What a file leaves out as the default of its class is left out here, too.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from kvern.images.file import ImageFile
from kvern.images.settings import settings_of
from kvern.models.checkpoint import StoredTensor
from kvern.models.image_models import vision_of
from kvern.models.loader import LoadOptions, check_fits
from kvern.models.registry import spec_from_config
from kvern.models.vision import VisionTower, vision_build

LLAMA3 = {
    "model_type": "llama",
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128259,
}
CLIP_L = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "model_type": "clip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32000,
}
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
INTERN_VIT = {
    "attention_bias": True,
    "hidden_size": 1024,
    "image_size": [448, 448],
    "intermediate_size": 4096,
    "model_type": "internvl_vision",
    "norm_type": "layer_norm",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": [14, 14],
    "use_mean_pooling": True,
    "use_qk_norm": False,
}
INTERN_VIT_6B = INTERN_VIT | {
    "attention_bias": False,
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "norm_type": "rms_norm",
    "num_attention_heads": 25,
    "num_hidden_layers": 45,
    "use_qk_norm": True,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "vocab_size": 151674,
}
K2 = {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
SQUARE = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
GLM_ROPE = {"rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5, "rope_theta": 500000}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "llava-1.5-7b": (
        {
            "model_type": "llava",
            "image_token_index": 32000,
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
            "vision_config": CLIP_L,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        SQUARE,
        576,
    ),
    "llava-v1.6-mistral-7b": (
        {
            "model_type": "llava_next",
            "image_grid_pinpoints": PINPOINTS,
            "image_token_index": 32000,
            "text_config": {
                "model_type": "mistral",
                "intermediate_size": 14336,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 8,
                "rope_theta": 1000000.0,
                "sliding_window": None,
                "vocab_size": 32064,
            },
            "vision_config": CLIP_L,
        },
        SQUARE | {"image_grid_pinpoints": PINPOINTS},
        576 + 36 * (48 + 1),  # of 48 x 48 tokens those that the picture covers, and the ends of their lines
    ),
    "llava-interleave-qwen-0.5b": (
        {
            "model_type": "llava",
            "image_token_index": 151646,
            "text_config": {
                "model_type": "qwen2",
                "hidden_size": 1024,
                "intermediate_size": 2816,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "num_key_value_heads": 16,
                "vocab_size": 152000,
            },
            "vision_config": SO400M
            | {"image_size": 384, "model_type": "siglip_vision_model", "vision_use_head": False},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"size": {"height": 384, "width": 384}},
        729,
    ),
    "Mistral-Small-3.1-24B": (
        {
            "model_type": "mistral3",
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                "model_type": "mistral",
                "head_dim": 128,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "vocab_size": 131072,
            },
            "vision_config": {
                "head_dim": 64,
                "hidden_act": "silu",
                "hidden_size": 1024,
                "image_size": 1540,
                "intermediate_size": 4096,
                "model_type": "pixtral",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "rope_theta": 10000.0,
            },
            "vision_feature_layer": -1,
        },
        {"size": {"longest_edge": 1540}, "patch_size": 14},
        37 * 28,
    ),
    "Idefics3-8B-Llama3": (
        {
            "model_type": "idefics3",
            "image_token_id": 128257,
            "scale_factor": 2,
            "text_config": LLAMA3,
            "tie_word_embeddings": False,
            "vision_config": SO400M | {"image_size": 364, "model_type": "idefics3"},
        },
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}, "do_image_splitting": True},
        13 * 169,
    ),
    "SmolVLM2-2.2B": (
        {
            "model_type": "smolvlm",
            "image_token_id": 49190,
            "scale_factor": 3,
            "text_config": {
                "model_type": "llama",
                "head_dim": 64,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "max_position_embeddings": 8192,
                "num_hidden_layers": 24,
                "rope_theta": 130000,
                "vocab_size": 49280,
            },
            "tie_word_embeddings": False,
            "vision_config": SO400M | {"image_size": 384, "model_type": "smolvlm_vision"},
        },
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}, "do_image_splitting": True},
        13 * 81,
    ),
    "InternVL3-8B-hf": (
        {
            "model_type": "internvl",
            "downsample_ratio": 0.5,
            "image_token_id": 151667,
            "text_config": QWEN2_7B,
            "vision_config": INTERN_VIT,
            "vision_feature_layer": -1,
        },
        {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12},
        13 * 256,
    ),
    "InternVL3-38B-hf": (
        {
            "model_type": "internvl",
            "image_token_id": 151667,
            "text_config": QWEN2_7B | {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8},
            "vision_config": INTERN_VIT_6B,
        },
        {"size": {"height": 448, "width": 448}},
        13 * 256,
    ),
    "GLM-4.6V-Flash": (
        {
            "model_type": "glm46v",
            "image_token_id": 151363,
            "text_config": {
                "model_type": "glm4v_text",
                "hidden_size": 4096,
                "intermediate_size": 13696,
                "max_position_embeddings": 131072,
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "rope_parameters": GLM_ROPE,
                "vocab_size": 151552,
            },
            "vision_config": {
                "depth": 24,
                "hidden_size": 1536,
                "image_size": 336,
                "intermediate_size": 13696,
                "model_type": "glm4v_vision",
                "num_heads": 12,
                "out_hidden_size": 4096,
                "patch_size": 14,
            },
        },
        {"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
        37 * 27,
    ),
    "Kimi-K2.5": (
        {
            "model_type": "kimi_k25",
            "media_placeholder_token_id": 163605,
            "text_config": K2,
            "vision_config": {
                "init_pos_emb_height": 64,
                "init_pos_emb_width": 64,
                "merge_kernel_size": [2, 2],
                "merge_type": "sd2_tpool",
                "mm_projector_type": "patchmerger",
                "patch_size": 14,
                "projector_ln_eps": 1e-05,
                "vt_hidden_size": 1152,
                "vt_intermediate_size": 4304,
                "vt_num_attention_heads": 16,
                "vt_num_hidden_layers": 27,
            },
        },
        {"media_proc_cfg": {"in_patch_limit": 16384, "patch_limit_on_one_side": 512, "fixed_output_tokens": None}},
        37 * 28,
    ),
}
"""By names of models: the configuration, settings of the image processor, and tokens of 1024 x 768 pixels."""


def of_transformers(config: dict[str, Any]) -> list[StoredTensor]:
    """The tensors of transformers' model, but of one layer of the language model."""
    given = copy.deepcopy(config)
    given["text_config"] |= {"num_hidden_layers": 1}
    if given["model_type"] == "kimi_k25":
        given["text_config"]["model_type"] = "deepseek_v3"
        vision = given["vision_config"]
        for name in [name for name in vision if name.startswith(("vt_", "init_"))]:
            vision[name.removeprefix("vt_").removeprefix("init_")] = vision.pop(name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(given.pop("model_type"), **given))
    return [
        StoredTensor(name, Path("model.safetensors"), tensor.dtype, tuple(tensor.shape), 0)
        for name, tensor in model.state_dict().items()
    ]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_described(name: str, tmp_path: Path) -> None:
    config, processor, tokens = PUBLISHED[name]
    assert spec_from_config(config).hidden_size == config["text_config"].get("hidden_size", 4096)
    spec = vision_of(config)
    assert spec is not None
    tower = VisionTower(spec, vision_build(spec, torch.float32, LoadOptions(device="meta")))
    check_fits(tower, tmp_path, of_transformers(config))
    given = processor if "media_proc_cfg" in processor else COLOURS | processor
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    assert settings_of(tmp_path, spec).count(ImageFile(b"", 1024, 768)) == tokens
