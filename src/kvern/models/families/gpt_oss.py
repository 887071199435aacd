"""gpt-oss: attention sinks, every second layer local, and experts with biases, published in MXFP4."""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvern.errors import UnsupportedModel
from kvern.models.describe import describe, layers_by_type, read_attention, read_layer_types, read_moe, read_rope
from kvern.models.registry import Config
from kvern.spec.model import SWIGLU_LIMIT, SWIGLU_SLOPE, ModelSpec, Rename

if TYPE_CHECKING:
    from torch import Tensor


def _gate_first(rows: "Tensor", spec: ModelSpec) -> "Tensor":
    """Reorders `[experts, rows, ...]` of alternating gate and up rows to all gate rows, then all up rows."""
    return rows.view(len(rows), -1, 2, *rows.shape[2:]).transpose(1, 2).flatten(1, 2)


def _outputs_first(matrices: "Tensor", spec: ModelSpec) -> "Tensor":
    """`[experts, inputs, outputs]` -> `[experts, outputs, inputs]`."""
    return matrices.transpose(1, 2)


def _gate_and_up(matrices: "Tensor", spec: ModelSpec) -> "Tensor":
    return _gate_first(_outputs_first(matrices, spec), spec)


RENAMES = (
    Rename(r"\.mlp\.router\.", ".mlp.gate."),
    Rename(r"\.experts\.gate_up_proj$", ".experts.gate_up_proj", _gate_and_up, by_rows=True),
    Rename(r"\.experts\.down_proj$", ".experts.down_proj", _outputs_first, by_rows=True),
    Rename(r"\.experts\.gate_up_proj_(bias|blocks|scales)$", r".experts.gate_up_proj_\1", _gate_first, by_rows=True),
)


def gpt_oss(config: Config) -> ModelSpec:
    for key, known in (("swiglu_alpha", SWIGLU_SLOPE), ("swiglu_limit", SWIGLU_LIMIT)):
        if config.get(key, known) != known:
            raise UnsupportedModel(
                f"gpt_oss: {key} is {config[key]!r:.40}; kvern knows {known}, as published models have"
            )
    moe = read_moe(config, activation="clamped_swiglu", bias=True)
    kinds = read_layer_types(config, pattern=2)
    ropes = dict.fromkeys(kinds, read_rope(config))
    attention = replace(read_attention(config), sinks=True)
    bias = config["attention_bias"]
    return describe(
        config,
        layers_by_type(config, kinds, attention=attention, ropes=ropes, mlp=moe),
        qkv_bias=bias,
        output_bias=bias,
        renames=RENAMES,
    )
