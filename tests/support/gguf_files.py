"""GGUF files of tiny checkpoints, written by the `gguf` package, with the names and changes of llama.cpp's converter.

made = write_gguf(make_checkpoint("llama", tmp_path / "model"), tmp_path, "Q8_0")
made.file               # the GGUF file
made.plain              # a checkpoint with the numbers that its blocks stand for
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern.config import EngineConfig
from kvern.models.folder import model_folder
from tests.support.cache_folder import cache_folder

HALF_PLACES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Offsets of half-precision numbers in blocks that the package cannot make."""
LARGEST = {"Q2_K": 45, "Q3_K": 128, "Q4_K": 945, "Q5_K": 1953, "Q6_K": 4096, "IQ4_NL": 127, "IQ4_XS": 4064}
ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "mistral": "llama",
    "mixtral": "llama",
}
PAIRED = ("llama", "olmo", "granite", "granitemoe", "granitehybrid", "arcee", "smollm3")
WITHOUT_HEADS = ("conv", "linear_attention", "mamba")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")


@dataclass
class Written:
    file: Path
    plain: Path


def random_blocks(kind: str, rows: int, inputs: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Valid blocks `[rows, bytes]`, of random codes, that stand for numbers of up to 0.5 or so."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, inputs // numbers, size), dtype=np.uint8)
    for at in HALF_PLACES[kind]:
        scale = generator.uniform(0.2, 0.5, (rows, inputs // numbers, 1)) / LARGEST[kind]
        blocks[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def quantized(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """A matrix, or a stack of them, as blocks of the type: rounded, or random where only reading is defined."""
    if kind in HALF_PLACES:
        rows = weight.reshape(-1, weight.shape[-1])
        made = random_blocks(kind, *rows.shape, np.random.default_rng(rows.size))
        return made.reshape(*weight.shape[:-1], -1)
    return gguf.quantize(weight, gguf.GGMLQuantizationType[kind])


def paired(weight: Tensor, heads: int) -> Tensor:
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def unpaired(weight: Tensor, heads: int) -> Tensor:
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    model: Path,
    folder: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    split: int = 0,
    describe: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Written:
    """`kind` is the type of matrices, or of the matrix of a GGUF name; others are F32."""
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    folder.mkdir(exist_ok=True)
    made = Written(folder / "model.gguf", folder / "plain")
    shutil.copytree(model, made.plain, ignore=shutil.ignore_patterns("*.safetensors*"))
    files = sorted(model.glob("*.safetensors"))
    tensors = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    writer = gguf.GGUFWriter(made.file, architecture, split_max_tensors=split)
    add_values(writer, architecture, config, tensors)
    describe(writer)
    arch = next(item for item, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    changed: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if ".experts." in name and name.endswith(".weight"):
            continue
        write_tensor(writer, names, architecture, config, name, tensor, kind, changed)
    for name, tensor in stacks(tensors).items():
        write_tensor(writer, names, architecture, config, name, tensor, kind, changed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in [name for name in changed if changed[name].dim() == 3 and name.endswith(".weight")]:
        head, _, rest = name.partition(".experts.")
        changed |= {f"{head}.experts.{index}.{rest}": part.clone() for index, part in enumerate(changed.pop(name))}
    save_file(changed, made.plain / "model.safetensors")
    return made


def stacks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The experts of each layer, that checkpoints keep apart, in one tensor."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        head, within, rest = name.partition(".experts.")
        if within and rest[0].isdigit():
            expert, _, rest = rest.partition(".")
            found.setdefault(f"{head}.experts.{rest}", {})[int(expert)] = tensor
    return {name: torch.stack([parts[expert] for expert in range(len(parts))]) for name, parts in found.items()}


def write_tensor(
    writer: gguf.GGUFWriter,
    names: Any,
    architecture: str,
    config: Mapping[str, Any],
    name: str,
    tensor: Tensor,
    kind: str | Callable[[str], str],
    changed: dict[str, Tensor],
) -> None:
    """One tensor into the file, and what it stands for into `changed` under the checkpoint's name."""
    stem, _, ending = name.rpartition(".")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # stored without an ending
        stem, ending = name, "weight"
    if ".shared_mlp." in name or ".mamba." in name:
        put_granite_hybrid(writer, config, name, tensor, kind, changed)
        return
    if architecture == "gpt-oss" and name.endswith(("_proj", "_proj_bias", "sinks")) and "mlp.router" not in name:
        put_gpt_oss(writer, name, tensor, kind, changed)
        return
    if ("gate_up_proj" in name and "experts" in name) or name.endswith("input_linear.weight"):
        halves = tensor.chunk(2, 1)
        found = [
            put(writer, f"blk.{name.split('.')[2]}.ffn_{half}_exps.weight", part, kind)
            for half, part in zip(("gate", "up"), halves, strict=True)
        ]
        changed[name] = torch.cat(found, 1)
        return
    target = names.get_name(stem)
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        target, ending = f"blk.{name.split('.')[2]}.exp_probs_b", "bias"
    if architecture == "lfm2moe" and (match := re.search(r"experts\.w([123])$", stem)):
        target = f"blk.{name.split('.')[2]}.ffn_{('gate', 'down', 'up')[int(match[1]) - 1]}_exps"
    assert target is not None, name
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}.get(
        stem.rpartition(".")[2]
    )
    if architecture in PAIRED and heads:
        changed[name] = unpaired(put(writer, f"{target}.{ending}", paired(tensor, heads), kind), heads)
    elif architecture in PLUS_ONE and name.endswith("norm.weight"):
        changed[name] = put(writer, f"{target}.{ending}", tensor + 1, kind) - 1
    elif "query_key_value" in name:
        count = config["num_attention_heads"]
        turned = tensor.view(count, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
        back = put(writer, f"{target}.{ending}", turned, kind)
        changed[name] = back.view(3, count, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    elif name.endswith("conv.conv.weight"):
        changed[name] = put(writer, f"{target}.{ending}", tensor[:, 0], kind)[:, None]
    elif name.endswith("shared_expert_gate.weight"):
        changed[name] = put(writer, f"{target}.{ending}", tensor[0], kind)[None]
    else:
        changed[name] = put(writer, f"{target}.{ending}", tensor, kind)


def put_granite_hybrid(
    writer: gguf.GGUFWriter,
    config: Mapping[str, Any],
    name: str,
    tensor: Tensor,
    kind: str | Callable[[str], str],
    changed: dict[str, Tensor],
) -> None:
    """The MLP that every token takes, and Mamba-2."""
    layer, (stem, _, ending) = f"blk.{name.split('.')[2]}", name.rpartition(".")
    beside = "_shexp" if config["num_local_experts"] else ""
    if stem.endswith("shared_mlp.input_linear"):
        halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
        changed[name] = torch.cat(
            [put(writer, f"{layer}.ffn_{half}{beside}.weight", part, kind) for half, part in halves]
        )
    elif stem.endswith("shared_mlp.output_linear"):
        changed[name] = put(writer, f"{layer}.ffn_down{beside}.weight", tensor, kind)
    elif ending == "A_log":
        changed[name] = put(writer, f"{layer}.ssm_a", -tensor.exp()[:, None], "F32").neg().log()[:, 0]
    elif ending == "D":
        changed[name] = put(writer, f"{layer}.ssm_d", tensor[:, None], "F32")[:, 0]
    elif ending == "dt_bias":
        changed[name] = put(writer, f"{layer}.ssm_dt.bias", tensor, "F32")
    elif name.endswith("conv1d.weight"):
        changed[name] = put(writer, f"{layer}.ssm_conv1d.weight", tensor[:, 0], "F32")[:, None]
    elif name.endswith("norm.weight"):
        grouped = tensor.view(config["mamba_n_groups"], -1)
        changed[name] = put(writer, f"{layer}.ssm_norm.weight", grouped, "F32").flatten()
    else:
        part = {"in_proj": "ssm_in", "out_proj": "ssm_out", "conv1d": "ssm_conv1d"}[stem.rpartition(".")[2]]
        changed[name] = put(writer, f"{layer}.{part}.{ending}", tensor, kind)


def put_gpt_oss(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: Tensor,
    kind: str | Callable[[str], str],
    changed: dict[str, Tensor],
) -> None:
    """Experts' matrices, stored inputs first with gate and up in turns, their biases, and sinks."""
    layer, is_bias = f"blk.{name.split('.')[2]}", name.endswith("bias")
    if name.endswith("sinks"):
        changed[name] = put(writer, f"{layer}.attn_sinks.weight", tensor, kind)
        return
    rows = tensor if is_bias else tensor.transpose(1, 2)
    halves = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in name else {"down": rows}
    ending = "bias" if is_bias else "weight"
    found = [put(writer, f"{layer}.ffn_{half}_exps.{ending}", part, kind) for half, part in halves.items()]
    rows = torch.stack(found, 2).flatten(1, 2) if len(found) == 2 else found[0]
    changed[name] = (rows if is_bias else rows.transpose(1, 2)).contiguous()


def put(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str | Callable[[str], str]) -> Tensor:
    """Write it, and return what it stands for."""
    data = tensor.contiguous().numpy()
    wanted = kind if isinstance(kind, str) else kind(name)
    if (
        tensor.dim() < 2
        or wanted == "F32"
        or name.endswith("bias")
        or re.search("ffn_gate_inp|_norm|shortconv.conv", name)
    ):
        writer.add_tensor(name, data)
        return tensor.contiguous()
    blocks = quantized(data, wanted)
    quantization = gguf.GGMLQuantizationType[wanted]
    writer.add_tensor(name, blocks, raw_dtype=quantization)
    return torch.from_numpy(gguf.dequantize(blocks, quantization).reshape(data.shape).copy())


def add_values(
    writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes the values that llama.cpp's converter takes from a configuration."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    adjusted = tensors.get("model.layers.0.feed_forward.w1.weight")
    writer.add_feed_forward_length(config["intermediate_size"] if adjusted is None else len(adjusted))
    writer.add_head_count(heads)
    kv_heads = config.get("num_key_value_heads") or heads
    kinds = config.get("layer_types") or []
    each = [0 if kind in WITHOUT_HEADS else kv_heads for kind in kinds]
    writer.add_head_count_kv(each if 0 in each else kv_heads)
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
    partial = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or config.get("rotary_pct") or 1
    writer.add_rope_dimension_count(config.get("rotary_dim") or int(head_dim * partial))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for name, add in {
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps,
        "norm_eps": writer.add_layer_norm_rms_eps if "lfm2" in architecture else writer.add_layer_norm_eps,
        "logit_scale": writer.add_logit_scale,
        "logits_scaling": writer.add_logit_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_routed_experts": writer.add_expert_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "conv_L_cache": writer.add_shortconv_l_cache,
    }.items():
        if config.get(name) is not None:
            add(config[name])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    add_own_values(writer, architecture, config, rope)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    for name in ("bos", "eos"):
        getattr(writer, f"add_{name}_token_id")(config[f"{name}_token_id"])


def add_own_values(
    writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any], rope: Mapping[str, Any]
) -> None:
    """Writes the values of one or two architectures."""
    if architecture == "granitehybrid":
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if architecture in ("glm4moe", "dots1"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if architecture == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture in ("gemma3", "cohere2", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if "query_pre_attn_scalar" in config:
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])


def llama3_factors(rope: Mapping[str, Any], dim: int) -> np.ndarray[Any, Any]:
    """The divisor of each plane's frequency."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    wave, length = 2 * np.pi / frequencies, rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    kept = np.clip((length / wave - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / factor)).astype(np.float32)


def add_tokenizer(folder: Path, pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """A byte-level tokenizer and the chat template of a folder, for `write_gguf`."""

    def describe(writer: gguf.GGUFWriter) -> None:
        stored = json.loads((folder / "tokenizer.json").read_text())
        config = json.loads((folder / "tokenizer_config.json").read_text())
        vocabulary = stored["model"]["vocab"] | {token["content"]: token["id"] for token in stored["added_tokens"]}
        kinds = dict.fromkeys(vocabulary.values(), gguf.TokenType.NORMAL)
        for token in stored["added_tokens"]:
            kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
        writer.add_token_types([kinds[index] for index in range(len(vocabulary))])
        writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
        writer.add_add_bos_token(stored["post_processor"] is not None)
        for name, add in {
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "pad": writer.add_pad_token_id,
        }.items():
            add(vocabulary[config[f"{name}_token"]])
        writer.add_chat_template((folder / "chat_template.jinja").read_text())

    return describe


WITHOUT_TOKENIZER = "kvern-1m"


def folder_of(file: Path, tmp_path: Path, **options: Any) -> Path:
    config = EngineConfig(str(file), cache_dir=cache_folder(tmp_path / "cache"), tokenizer=WITHOUT_TOKENIZER, **options)
    return model_folder(config)


MIXES: dict[str, dict[str, str]] = {
    "q4_k_m": {"attn_v|ffn_down|output": "Q6_K", "": "Q4_K"},
    "q3_k_m": {"attn_v|ffn_down": "Q5_K", "token_embd": "Q2_K", "": "Q3_K"},
    "iq4_xs": {"attn_v": "IQ4_NL", "": "IQ4_XS"},
    "older": {"exps": "Q5_1", "attn_q": "Q5_0", "attn_v": "Q5_1", "ffn_gate": "Q4_1", "ffn_up": "Q8_0", "": "Q4_0"},
    "gpt_oss": {"_exps": "MXFP4", "": "Q8_0"},
    "plain": {"_exps": "F16", "attn_q|ffn_down": "F16", "attn_v": "BF16", "ffn_gate": "MXFP4", "": "F32"},
}
