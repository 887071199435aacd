"""Names of tensors in GGUF files and in Llama's checkpoints. No torch is imported.

blk.3.attn_q.weight          model.layers.3.self_attn.q_proj.weight
blk.3.attn_qkv.weight        its rows are those of q_proj, k_proj and v_proj
blk.3.ffn_gate_exps.weight   [experts, width, hidden]: model.layers.3.mlp.experts.0.gate_proj.weight, ...
blk.3.ffn_gate_exps.bias     [experts, width]: model.layers.3.mlp.experts.gate_proj_bias
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvern.errors import CorruptCheckpoint, UnsupportedModel, shown
from kvern.formats.gguf.header import TensorInfo

WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
}
"""`token_embd_norm` is LFM2's name."""
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH_NORMS = POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
LFM2_NAMES = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
ALONE = {
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "attn_sinks": "self_attn.sinks",
}
"""Vectors, which checkpoints name without an ending."""
CONVOLUTIONS = ("shortconv.conv", "ssm_conv1d")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become settings of config.json."""
_LAYER_NAME = re.compile(r"blk\.(\d{1,4})\.((?:shortconv\.|nextn\.)?\w+?)(?:\.(\d{1,4}))?(?:\.(weight|bias))?")
_EXPERTS = re.compile(r"ffn_(gate|up|down)(?:_exps)?")


class StoredPart(NamedTuple):
    """Rows of a tensor with Llama's name: `begin` is the first byte, `shape` counts numbers.

    head_rows  rows of a head in which adjacent rows form a plane of the rotation; 0: none
    plus_one   the file adds 1 to the values
    rates      the file stores negative rates in place of their logarithms
    """

    name: str
    tensor: TensorInfo
    shape: tuple[int, ...]
    begin: int
    head_rows: int = 0
    plus_one: bool = False
    rates: bool = False


@dataclass(frozen=True)
class Layout:
    """Differences of an architecture's tensors from Llama's.

    `names` take precedence over the common ones. `paired`: adjacent rows of a head's queries and keys form planes of
    the rotation. `norm_plus_one`: norms that models store as w - 1 are stored as w. Tensors of layers beyond `layers`
    are ignored.
    """

    heads: int
    kv_heads: int
    head_dim: int
    names: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    norm_plus_one: bool = False
    fused_gate_up: bool = False
    layers: int = 0


def stored_parts(tensors: tuple[TensorInfo, ...], layout: Layout) -> list[StoredPart]:
    """All tensors with Llama's names. Raises UnsupportedModel for unknown ones."""
    found: dict[str, StoredPart] = {}
    for tensor in tensors:
        for part in _parts(tensor, layout):
            if found.setdefault(part.name, part) is not part:
                raise CorruptCheckpoint(f"{tensor.file}: {part.name} is there twice, as {shown(tensor.name)}, too")
    return list(found.values())


def _parts(tensor: TensorInfo, layout: Layout) -> Iterator[StoredPart]:
    if tensor.name in ROPE_TENSORS:
        return
    stem, _, kind = tensor.name.rpartition(".")
    match = _LAYER_NAME.fullmatch(tensor.name)
    if stem in WHOLE and kind in ("weight", "bias"):
        yield _part(tensor, f"{WHOLE[stem]}.{kind}", layout)
        return
    if match is None or (match[4] is None and match[2] not in ALONE):
        raise _unknown(tensor)
    prefix = f"model.layers.{int(match[1])}."
    base, expert, kind = match.group(2, 3, 4)
    if base == "attn_rot_embd" or int(match[1]) >= layout.layers:
        return
    if expert is not None or base.endswith("_exps"):
        yield from _experts(tensor, prefix, base, expert)
    elif base in ALONE:
        part = _part(tensor, f"{prefix}{ALONE[base]}", layout)
        yield part._replace(shape=(math.prod(tensor.shape),), rates=base == "ssm_a")
    elif base == "attn_qkv":
        rows = [layout.heads * layout.head_dim, *[layout.kv_heads * layout.head_dim] * 2]
        yield from _split(tensor, [f"{prefix}self_attn.{name}_proj.{kind}" for name in "qkv"], rows, layout)
    elif base == "ffn_up" and layout.fused_gate_up:
        rows = [tensor.shape[0] // 2] * 2
        yield from _split(tensor, [f"{prefix}mlp.{name}_proj.{kind}" for name in ("gate", "up")], rows, layout)
    else:
        name = layout.names.get(base) or LAYER.get(base)
        if name is None:
            raise _unknown(tensor)
        shape = tensor.shape
        if base == "ffn_gate_inp_shexp":
            shape = (1, *shape)
        elif base in CONVOLUTIONS and kind == "weight":
            shape = (shape[0], 1, *shape[1:])
        elif base == "ssm_norm":
            shape = (math.prod(shape),)
        yield _part(tensor, f"{prefix}{name}.{kind}", layout)._replace(shape=shape)


def _unknown(tensor: TensorInfo) -> UnsupportedModel:
    return UnsupportedModel(f"{tensor.file}: kvern has no place for the tensor {shown(tensor.name)}")


def _part(tensor: TensorInfo, name: str, layout: Layout) -> StoredPart:
    paired = layout.paired and re.search(r"self_attn\.[qk]_proj\.", name) is not None
    plus_one = layout.norm_plus_one and name.endswith("norm.weight")
    return StoredPart(name, tensor, tensor.shape, tensor.begin, layout.head_dim if paired else 0, plus_one)


def _experts(tensor: TensorInfo, prefix: str, base: str, expert: str | None) -> Iterator[StoredPart]:
    """The parts of a stack of experts, or of one expert where files hold them separately."""
    match = _EXPERTS.fullmatch(base)
    if match is not None and tensor.name.endswith("_exps.bias"):
        yield StoredPart(f"{prefix}mlp.experts.{match[1]}_proj_bias", tensor, tensor.shape, tensor.begin)
        return
    if match is None or len(tensor.shape) != (3 if expert is None else 2) or not tensor.name.endswith(".weight"):
        raise _unknown(tensor)
    shape = tensor.shape[-2:]
    count = tensor.shape[0] if expert is None else 1
    for index in range(count):
        name = f"{prefix}mlp.experts.{index if expert is None else int(expert)}.{match[1]}_proj.weight"
        yield StoredPart(name, tensor, shape, tensor.begin + tensor.nbytes // count * index)


def _split(tensor: TensorInfo, names: list[str], rows: list[int], layout: Layout) -> Iterator[StoredPart]:
    if sum(rows) != tensor.shape[0]:
        raise CorruptCheckpoint(
            f"{tensor.file}: the tensor {shown(tensor.name)} has {tensor.shape[0]} rows, and its parts have "
            f"{', '.join(map(str, rows))}"
        )
    first = 0
    for name, count in zip(names, rows, strict=True):
        begin = tensor.begin + tensor.nbytes // tensor.shape[0] * first
        yield _part(tensor, name, layout)._replace(shape=(count, *tensor.shape[1:]), begin=begin)
        first += count
