"""Tiny random models of every family, made by transformers: the reference that kvern is compared with.

    folder = make_checkpoint("qwen3", tmp_path)           # config.json and model.safetensors, float32
    expected = reference_logits(folder, token_ids)        # float32 [tokens, vocab]
    tokens = reference_greedy(folder, token_ids, 12)      # the 12 most likely tokens, one after another

Sizes are odd on purpose, queries outnumber keys, windows are shorter than the prompts, and every norm weight and bias
is random, so that a part that is left out or misplaced changes the logits.
"""

import functools
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.fallback_families import FALLBACKS, MIXED_TYPES
from tests.support.gemma3n_family import GEMMA3N
from tests.support.gemma4_families import GEMMA4, WINDOW
from tests.support.gpt_oss_family import GPT_OSS
from tests.support.latent_families import INDEXED, LATENT
from tests.support.state_families import GRANITE, STATE_FAMILIES

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_OLMO3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
_QWEN_EYES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
_QWEN3_EYES = {**_QWEN_EYES, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN3_5_EYES = {**_QWEN_EYES, "num_position_embeddings": 4}
_QWEN3_5_ROPE = {**_QWEN3_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_GLM_EYES = {**_QWEN_EYES, "image_size": 28}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "head_dim": 8,
}
_SIGLIP = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_DELTA_NETS = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 20}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "ministral": ("ministral", {"head_dim": 12, "sliding_window": WINDOW, "layer_types": MIXED_TYPES}),
    "cwm": ("cwm", {"head_dim": 16, "sliding_window": WINDOW}),
    "internlm3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {"head_dim": 12}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": MIXED_TYPES, "rope_parameters": _OLMO3_ROPES}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "granite": ("granite", GRANITE),
    "granitemoe": (
        "granitemoe",
        {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True}),
    "cohere2": (
        "cohere2",
        {"sliding_window": WINDOW, "layer_types": MIXED_TYPES, "logit_scale": 0.25, "tie_word_embeddings": True},
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "hidden_size": 64}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True, "hidden_size": 64}),
    "nemotron": ("nemotron", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": MIXED_TYPES}),
    "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "gpt_neox": ("gpt_neox", {"hidden_size": 64, "num_key_value_heads": 4}),
    "gpt_neox_sequential": ("gpt_neox", {"hidden_size": 64, "num_key_value_heads": 4, "use_parallel_residual": False}),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "dots1": (
        "dots1",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
        },
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    **STATE_FAMILIES,
    **GPT_OSS,
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA_NETS,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe_groups": (
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
        },
    ),
    **LATENT,
    **INDEXED,
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "ministral3": ("ministral3", {"head_dim": 20, "rope_parameters": _MINISTRAL3_ROPE}),
    "qwen2_vl": (
        "qwen2_vl",
        {
            "text_config": {"rope_parameters": _QWEN3_ROPE | {"mrope_section": [2, 2, 2]}},
            "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 48},
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"text_config": {"rope_parameters": _QWEN3_ROPE | {"mrope_section": [2, 2, 2]}}, "vision_config": _QWEN_EYES},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": {"head_dim": 16, "rope_parameters": _QWEN3_ROPE},
            "vision_config": _QWEN3_EYES,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "text_config": {
                "head_dim": 16,
                "rope_parameters": _QWEN3_ROPE,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 20,
            },
            "vision_config": _QWEN3_EYES,
        },
    ),
    "glm4v": ("glm4v", {"text_config": {"rope_parameters": _GLM_ROPE}, "vision_config": _GLM_EYES}),
    "glm4v_moe": (
        "glm4v_moe",
        {
            "text_config": {
                "head_dim": 16,
                "rope_parameters": _GLM_ROPE | {"mrope_section": [2, 1, 1]},
                "n_routed_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "n_shared_experts": 1,
            },
            "vision_config": _GLM_EYES,
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 20, "sliding_window": None},
            "vision_config": _PIXTRAL,
        },
    ),
    "gemma3_vision": (
        "gemma3",
        {
            "text_config": {"head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
            "vision_config": _SIGLIP,
        },
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            "text_config": _DELTA_NETS | {"rope_parameters": _QWEN3_5_ROPE},
            "vision_config": _QWEN3_5_EYES,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": {
                **_DELTA_NETS,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 40,
            },
            "vision_config": _QWEN3_5_EYES,
        },
    ),
    **GEMMA4,
    **GEMMA3N,
}
"""Fields of a checkpoint that sees images are those around its `text_config`, which has the common ones."""
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", *STATE_FAMILIES)
"""Families with recurrent layers."""
CPU_ALONE = (*GEMMA3N, *INDEXED)
"""Families that are refused on a GPU."""


def make_config(family: str, **changes: Any) -> Any:
    """The transformers configuration of a family, with `changes` to its (text) part."""
    from transformers import AutoConfig

    model_type, fields = (FAMILIES | FALLBACKS)[family]
    if "text_config" in fields:
        tie = {"tie_word_embeddings": fields.get("tie_word_embeddings", False)}
        fields = fields | tie | {"text_config": _COMMON | fields["text_config"] | tie | changes}
    else:
        fields = _COMMON | fields | changes
    return AutoConfig.for_model(model_type, **fields)


def make_model(family: str, **changes: Any) -> Any:
    """The transformers model of a family with `changes` to its (text) configuration, float32, seeded."""
    config = make_config(family, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model


def model_class(config: Any) -> Any:
    """The class of the whole checkpoint, which may have an image encoder too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM


def make_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """Save a tiny random model of `family` into `folder`, which is returned."""
    make_model(family, **changes).save_pretrained(folder)
    return folder


@functools.lru_cache(maxsize=4)
def _reference(folder: Path) -> Any:
    from transformers import AutoConfig

    make = model_class(AutoConfig.from_pretrained(folder))
    return make.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The logits `[tokens, vocab]` that transformers computes for one prompt."""
    with torch.inference_mode():
        logits: torch.Tensor = _reference(folder)(torch.tensor([token_ids])).logits[0]
    return logits


def reference_state(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The state `[hidden]` behind the last token, before the output layer."""
    with torch.inference_mode():
        state: torch.Tensor = _reference(folder).base_model(torch.tensor([token_ids])).last_hidden_state[0, -1]
    return state


def reference_greedy(folder: Path, token_ids: list[int], count: int) -> list[int]:
    """The `count` tokens with which transformers continues one prompt, each the most likely; no token ends it."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(int(reference_logits(folder, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def similar_prompts(most: int) -> list[list[int]]:
    """Prompts of tokens below `most` that share beginnings: at a block's end, within a block, and one whole prompt."""
    dice = random.Random(3)
    head = [dice.randrange(3, most) for _ in range(18)]
    tails = [[dice.randrange(3, most) for _ in range(length)] for length in (1, 9, 20, 14)]
    return [*(head + tail for tail in tails), head[:16], head[:5]]


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def reference_score(folder: Path, prompt: list[int], tokens: list[int]) -> float:
    """The log-probability of an answer by transformers."""
    rows = reference_logits(folder, prompt + tokens).log_softmax(-1)[len(prompt) - 1 : -1]
    return float(rows.gather(1, torch.tensor(tokens)[:, None]).sum())


def prompts_with_windows() -> list[list[int]]:
    """Prompts with common beginnings and without, most of them longer than a window and a step."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 90, (60,), generator=generator).tolist()
    found = []
    for length, common in ((3, 0), (40, 0), (70, 60), (75, 60), (50, 40), (64, 60), (4, 0), (6, 0), (5, 3), (7, 0)):
        found.append(shared[:common] + torch.randint(3, 90, (length - common,), generator=generator).tolist())
    return found
