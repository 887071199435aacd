"""The config.json of a GGUF file: the common settings under the names that checkpoints use.

No torch is imported.
"""

import math
import re
from typing import Any

from kvern.errors import CorruptCheckpoint, UnsupportedModel, shown
from kvern.formats.gguf.architectures import ARCHITECTURES, Architecture, kv_heads
from kvern.formats.gguf.model import GgufModel
from kvern.formats.gguf.names import Layout, StoredPart, stored_parts

MOST_LAYERS = 4096


def config_of(model: GgufModel) -> dict[str, Any]:
    """Raises UnsupportedModel or CorruptCheckpoint."""
    architecture = _architecture(model)
    config = _common(model, architecture.model_type)
    config |= architecture.values(model, config)
    parts = stored_parts(model.tensors, layout_of(model))
    config["quantization_config"] = {"quant_method": "gguf", "types": _types(parts)}
    config["dtype"] = _dtype(parts)
    # a window that is left out is the type's own
    return {name: value for name, value in config.items() if value is not None or name == "sliding_window"}


def layout_of(model: GgufModel) -> Layout:
    """The names and storage of the tensors."""
    architecture, common = _architecture(model), _common(model, "")
    return Layout(
        common["num_attention_heads"],
        common["num_key_value_heads"],
        common["head_dim"],
        architecture.names,
        architecture.paired,
        architecture.norm_plus_one,
        architecture.fused_gate_up and not model.has("ffn_gate.weight"),
        common["num_hidden_layers"],
    )


def _architecture(model: GgufModel) -> Architecture:
    found = ARCHITECTURES.get(model.architecture)
    if found is None:
        raise UnsupportedModel(
            f"{model.header.file}: the GGUF architecture {shown(model.architecture)} is unknown; kvern runs "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def _types(parts: list[StoredPart]) -> dict[str, str]:
    """The type of each quantized matrix by its path; of the gates of all experts of a layer, of their ups and downs."""
    types: dict[str, str] = {}
    for part in parts:
        path, name = part.name.rpartition(".")[0], part.tensor.type.name
        within = re.sub(r"(\.experts)\.\d+\.", r"\1.", path)
        if part.tensor.type.numbers > 1 and len(part.shape) != 2:
            raise UnsupportedModel(
                f"{part.tensor.file}: {shown(part.tensor.name)} is stored as {name.upper()}; kvern reads only "
                "matrices of that type"
            )
        if within != path and types.setdefault(within, name) != name:
            raise UnsupportedModel(
                f"{part.tensor.file}: {shown(part.tensor.name)} is stored as {name.upper()}, and other experts of "
                f"the layer as {types[within].upper()}; kvern reads them of one type"
            )
        if part.tensor.type.numbers > 1:
            types[within] = name
    return types


def _dtype(parts: list[StoredPart]) -> str:
    """The dtype of computations: the type of the matrices if all have one; quantized ones do not name theirs."""
    names = {
        part.tensor.type.name for part in parts if len(part.shape) == 2 and not part.name.endswith("mlp.gate.weight")
    }
    return {"f32": "float32", "f16": "float16"}.get(next(iter(names)), "bfloat16") if len(names) == 1 else "bfloat16"


def _common(model: GgufModel, model_type: str) -> dict[str, Any]:
    heads, hidden = model.needed("attention.head_count", int), model.needed("embedding_length", int)
    layers = model.layers
    embedding = model.tensor("token_embd.weight")
    if not (1 <= layers <= MOST_LAYERS and heads >= 1) or embedding is None or len(embedding.shape) != 2:
        raise CorruptCheckpoint(f"{model.header.file}: it has {layers} layers and {heads} heads, or no token_embd")
    head_dim = model.value("attention.key_length", int, hidden // heads)
    if model.value("attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedModel(f"{model.header.file}: keys and values differ in length; kvern runs no such model")
    epsilon = model.value("attention.layer_norm_epsilon", float, 1e-5)
    rotated = model.value("rope.dimension_count", int, head_dim)
    width = model.value("feed_forward_length", (int, list), 0)
    if isinstance(width, list):
        if len(set(width)) != 1:
            raise UnsupportedModel(f"{model.header.file}: feed_forward_length differs among layers")
        width = width[0]
    return {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads(model)) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": model.needed("context_length", int),
        "rms_norm_eps": model.value("attention.layer_norm_rms_epsilon", float, 1e-6),
        "layer_norm_eps": epsilon,
        "norm_epsilon": epsilon,
        "norm_eps": epsilon,
        "rope_theta": model.value("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(model),
        "partial_rotary_factor": rotated / head_dim if 0 < rotated < head_dim else None,
        "hidden_act": "silu",
        "sliding_window": model.value("attention.sliding_window", int) or None,
        "tie_word_embeddings": model.tensor("output.weight") is None,
        "attention_bias": model.has("attn_q.bias"),
        "mlp_bias": model.has("ffn_up.bias"),
        "bos_token_id": model.header.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": model.header.get("tokenizer.ggml.eos_token_id", int),
    }


def _rope_scaling(model: GgufModel) -> dict[str, Any] | None:
    length = model.value("rope.scaling.original_context_length", int, model.value("context_length", int))
    kind, factor = model.value("rope.scaling.type", str, "none"), model.value("rope.scaling.factor", float, 1.0)
    magnitude = model.value("rope.scaling.attn_factor", float, 1.0)
    same = model.floats("rope_freqs.weight")
    short, long = same or model.floats("rope_factors_short.weight"), same or model.floats("rope_factors_long.weight")
    if short and long:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": length,
            "attention_factor": magnitude,
        }
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            "attention_factor": magnitude * (1.0 + 0.1 * math.log(max(factor, 1.0))),
            "beta_fast": model.value("rope.scaling.yarn_beta_fast", float),
            "beta_slow": model.value("rope.scaling.yarn_beta_slow", float),
        }
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind not in ("none", "longrope"):
        raise UnsupportedModel(f"{model.header.file}: rope.scaling.type is {shown(kind)}; kvern knows linear and yarn")
    return None
