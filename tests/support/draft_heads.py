"""Draft heads of random weights in the formats that others write, and what they compute, by its definition."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from kvern.models.loader import read_config
from tests.support.families import make_model

Weights = dict[str, Tensor]
PREDICTION = {
    "qwen": {
        "layer": "mtp.layers.0",
        "joined": "mtp.fc",
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
    },
    "deepseek": {
        "layer": "model.layers.{layers}",
        "joined": "model.layers.{layers}.eh_proj",
        "embedding_norm": "model.layers.{layers}.enorm",
        "hidden_norm": "model.layers.{layers}.hnorm",
        "norm": "model.layers.{layers}.shared_head.norm",
    },
}


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> Weights:
    """Matrices of small spread, vectors near one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_eagle(folder: Path, target: Path, *, drafted: int | None = None, **changes: Any) -> Weights:
    """Write a head for the model of `target` and return its tensors: EAGLE's, or of `drafted` tokens EAGLE-3's.

    `changes` to its configuration.
    """
    model = read_config(target)
    size, vocabulary = model["hidden_size"], model["vocab_size"]
    heads, kv_heads = 4, 2
    head_dim, width = size // heads, 2 * size
    config = {
        "architectures": ["LlamaForCausalLMEagle" + ("3" if drafted else "")],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-3,
        "rope_theta": 5000.0,
        **({"draft_vocab_size": drafted} if drafted else {"bias": True}),
        **changes,
    }
    layer, inputs = ("midlayer", 2 * size) if drafted else ("layers.0", size)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * size if drafted else 2 * size),
        f"{layer}.self_attn.q_proj.weight": (heads * head_dim, inputs),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, inputs),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, inputs),
        f"{layer}.self_attn.o_proj.weight": (size, heads * head_dim),
        f"{layer}.mlp.gate_proj.weight": (width, size),
        f"{layer}.mlp.up_proj.weight": (width, size),
        f"{layer}.mlp.down_proj.weight": (size, width),
        f"{layer}.post_attention_layernorm.weight": (size,),
    }
    if drafted:
        norms = ("norm", f"{layer}.input_layernorm", f"{layer}.hidden_norm")
        shapes |= {f"{name}.weight": (size,) for name in norms} | {"lm_head.weight": (drafted, size)}
        shapes |= {"input_norm.weight": (3 * size,)} if config.get("norm_before_fc") else {}
    else:
        shapes |= {"fc.bias": (size,), "embed_tokens.weight": (vocabulary, size)}
    weights = random_weights(shapes)
    if drafted:
        chosen = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(5))[:drafted].sort().values
        weights["d2t"] = chosen - torch.arange(drafted)
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def add_prediction(folder: Path, family: str, names: str, **changes: Any) -> Any:
    """Add a layer for multi-token prediction to a checkpoint; `changes` make of the family a model of that layer alone.

    Returns that model, as transformers has it, which makes of the joined rows what the layer and its norm do.
    """
    alone = make_model(family, **changes)
    config = read_config(folder)
    config = config.get("text_config", config)
    size, layers = config["hidden_size"], config["num_hidden_layers"]
    paths = {part: path.format(layers=layers) for part, path in PREDICTION[names].items()}
    added = random_weights(
        {
            f"{paths['joined']}.weight": (size, 2 * size),
            f"{paths['embedding_norm']}.weight": (size,),
            f"{paths['hidden_norm']}.weight": (size,),
        }
    )
    for name, tensor in alone.state_dict().items():
        name = name.replace("language_model.", "")
        if ".layers.0." in name:
            added[name.replace("model.layers.0", paths["layer"])] = tensor.clone()
        if name == "model.norm.weight":
            added[f"{paths['norm']}.weight"] = tensor.clone()
    file = folder / "model.safetensors"
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    alone.joined = {part: added[f"{paths[part]}.weight"] for part in ("joined", "embedding_norm", "hidden_norm")}
    return alone


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def attention(x: Tensor, weights: Weights, config: dict[str, Any]) -> Tensor:
    """Causal attention of Llama over `x [T, inputs]`, with the positions 0, 1, ..."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key, value = (linear(x, weights[f"self_attn.{part}_proj.weight"]) for part in "qkv")
    count, head_dim = len(x), query.shape[1] // heads
    frequencies = config["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(count), frequencies)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, -1)
        both = torch.complex(first, second) * turn
        return torch.cat((both.real, both.imag), -1)

    query = turned(query.view(count, heads, head_dim))
    key = turned(key.view(count, kv_heads, head_dim)).repeat_interleave(heads // kv_heads, 1)
    value = value.view(count, kv_heads, head_dim).repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    return linear(attended, weights["self_attn.o_proj.weight"])


def mlp(x: Tensor, weights: Weights) -> Tensor:
    activated = silu(linear(x, weights["mlp.gate_proj.weight"])) * linear(x, weights["mlp.up_proj.weight"])
    return linear(activated, weights["mlp.down_proj.weight"])


def layer_of(weights: Weights, path: str) -> Weights:
    return {name.removeprefix(f"{path}."): tensor for name, tensor in weights.items() if name.startswith(f"{path}.")}


def eagle_states(weights: Weights, config: dict[str, Any], token_ids: Tensor, states: Tensor) -> Tensor:
    """EAGLE's: `token_ids [T]`, each behind that of the state in its place, and `states [T, hidden]` -> the same."""
    layer, epsilon = layer_of(weights, "layers.0"), config["rms_norm_eps"]
    both = torch.cat((weights["embed_tokens.weight"][token_ids], states), -1)
    hidden = linear(both, weights["fc.weight"], weights["fc.bias"])
    hidden = hidden + attention(hidden, layer, config)
    return hidden + mlp(rms_norm(hidden, layer["post_attention_layernorm.weight"], epsilon), layer)


def eagle3_enter(weights: Weights, config: dict[str, Any], inputs: Tensor) -> Tensor:
    """Inputs of three layers, side by side -> states of the head's size."""
    if config.get("norm_before_fc"):
        inputs = rms_norm(inputs, weights["input_norm.weight"], config["rms_norm_eps"])
    return linear(inputs, weights["fc.weight"])


def eagle3_states(weights: Weights, config: dict[str, Any], embedded: Tensor, states: Tensor) -> Tensor:
    """EAGLE-3's: embeddings `[T, hidden]` of the tokens behind those of `states [T, hidden]` -> states."""
    layer, epsilon = layer_of(weights, "midlayer"), config["rms_norm_eps"]
    normal = rms_norm(states, layer["hidden_norm.weight"], epsilon)
    both = torch.cat((rms_norm(embedded, layer["input_layernorm.weight"], epsilon), normal), -1)
    hidden = (normal if config.get("norm_before_residual") else states) + attention(both, layer, config)
    return hidden + mlp(rms_norm(hidden, layer["post_attention_layernorm.weight"], epsilon), layer)


def eagle3_logits(weights: Weights, config: dict[str, Any], states: Tensor) -> Tensor:
    """Over the model's vocabulary; -inf for tokens that are never drafted."""
    normal = rms_norm(states, weights["norm.weight"], config["rms_norm_eps"])
    scores = linear(normal, weights["lm_head.weight"])
    places = torch.arange(len(weights["d2t"])) + weights["d2t"]
    all_scores = torch.full((len(states), config["vocab_size"]), float("-inf"))
    all_scores[:, places] = scores
    return all_scores


MEDUSA_NAMES = {
    "authors": ("{head}.{layer}.linear", "{head}.{layers}"),
    "vllm": ("blocks.{head}.layers.{layer}", "lm_heads.{head}"),
    "tensorrt": ("medusa_heads.{head}.medusa_layers.{layer}.linear", "medusa_heads.{head}.lm_head"),
}
"""Names of residual and output layers in files of Medusa heads."""


def write_medusa(
    folder: Path, target: Path, *, names: str = "authors", heads: int = 3, layers: int = 1, drafted: int | None = None
) -> Weights:
    """Write heads for the model of `target`; their tensors by the authors' names."""
    model = read_config(target)
    size, vocabulary = model["hidden_size"], model["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes |= {f"{head}.{layer}.linear.weight": (size, size), f"{head}.{layer}.linear.bias": (size,)}
        shapes[f"{head}.{layers}.weight"] = (drafted or vocabulary, size)
    weights = random_weights(shapes)
    residual, output = MEDUSA_NAMES[names]
    stored: Weights = {}
    for name, tensor in weights.items():
        head, layer, *_ = name.split(".")
        pattern = residual if "linear" in name else output
        stored[pattern.format(head=head, layer=layer, layers=layers) + "." + name.rpartition(".")[2]] = tensor
    if drafted:
        generator = torch.Generator().manual_seed(5)
        weights["token_map"] = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
        stored["token_map"] = weights["token_map"]
    config: dict[str, Any] = {"medusa_num_heads": min(heads, 2), "medusa_num_layers": layers}
    if names == "vllm":
        config = {"model_type": "medusa", "num_heads": heads, "num_hidden_layers": layers, "vocab_size": vocabulary}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "medusa_lm_head.safetensors")
    return weights


def medusa_logits(weights: Weights, states: Tensor, vocabulary: int) -> Tensor:
    """Logits `[T, heads, vocabulary]` float64 of Medusa heads, with the authors' names, for `states [T, hidden]`."""
    own = {name: tensor.double() for name, tensor in weights.items()}
    heads = 1 + max(int(name.split(".")[0]) for name in weights if name[0].isdigit())
    found = torch.full((len(states), heads, vocabulary), float("-inf"), dtype=torch.float64)
    for head in range(heads):
        hidden, layer = states.double(), 0
        while f"{head}.{layer}.linear.weight" in own:
            place = f"{head}.{layer}.linear"
            hidden = hidden + silu(linear(hidden, own[f"{place}.weight"], own[f"{place}.bias"]))
            layer += 1
        scores = linear(hidden, own[f"{head}.{layer}.weight"])
        found[:, head, weights.get("token_map", torch.arange(vocabulary))] = scores
    return found
