"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Their rotary embedding takes three positions, of time, height and width, each for some of the planes ("mrope"). For text
the three are equal.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvern.errors import UnsupportedModel
from kvern.models.families.qwen import qwen2, qwen3, qwen3_moe
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import ModelSpec, MoeSpec, Rename

if TYPE_CHECKING:
    from torch import Tensor


def qwen2_5_vl(config: Config) -> ModelSpec:
    text = text_config(config, f"{config['model_type']}_text")
    inner = (config.get("text_config") or {}).get("tie_word_embeddings", False)  # the outer one is only a default
    text["tie_word_embeddings"] = text.get("tie_word_embeddings", False) or inner
    return text_part(config, qwen2(text), "visual")


def qwen3_vl(config: Config) -> ModelSpec:
    return text_part(config, qwen3(text_config(config, "qwen3_vl_text")), "visual")


def _outputs_first(stacked: "Tensor", spec: ModelSpec) -> "Tensor":
    """Matrices of all experts: published as `[experts, inputs, outputs]`, saved by some the other way round.

    Raises UnsupportedModel for square ones, which do not tell.
    """
    if stacked.shape[1] == stacked.shape[2]:
        raise UnsupportedModel(
            f"qwen3_vl_moe: stacked experts are square, {list(stacked.shape)}, so whether inputs or outputs come first "
            "cannot be told: store each expert's matrices apart"
        )
    widths = {layer.mlp.width for layer in spec.layers if isinstance(layer.mlp, MoeSpec)}
    shapes = [shape for width in widths for shape in ((2 * width, spec.hidden_size), (spec.hidden_size, width))]
    return stacked if tuple(stacked.shape[1:]) in shapes else stacked.transpose(1, 2)


def qwen3_vl_moe(config: Config) -> ModelSpec:
    spec = qwen3_moe({**text_config(config, "qwen3_vl_moe_text"), "norm_topk_prob": True})
    stacks = Rename(r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj", _outputs_first)
    return text_part(config, replace(spec, renames=(stacks,)), "visual")
