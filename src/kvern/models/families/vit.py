"""Vision transformers that read pictures of one size: CLIP's, SigLIP's, those of SmolVLM and Idefics 3, and InternViT.

`tower_of` describes their layers, as the settings in a `vision_config` and the names in a checkpoint are theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvern.errors import UnsupportedModel
from kvern.models.describe import read_activation
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import (
    Activation,
    BiasSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    Rename,
)

if TYPE_CHECKING:
    from torch import Tensor

CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
SIGLIP = CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
IDEFICS = SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
INTERN = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
DEFAULTS = {
    "clip_vision_model": CLIP,
    "siglip_vision_model": SIGLIP,
    "siglip2_vision_model": SIGLIP | {"num_patches": 256},
    "idefics3_vision": IDEFICS,
    "smolvlm_vision": IDEFICS,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "internvl_vision": INTERN,
}
"""Settings that a `vision_config` may leave out, by its model type."""
OF_TEXT = (r"^(model\.)?(language_model|text_model)\.", r"^lm_head\.", r"^model\.(layers|embed_tokens|norm)\.")
"""The language model's tensors."""


@dataclass(frozen=True)
class Vit:
    """The settings of a vision transformer of a model type, read from a `vision_config`."""

    kind: str
    given: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any], *kinds: str) -> "Vit":
        """Returns the settings with defaults. Raises UnsupportedModel for another model type than `kinds`."""
        kind = given.get("model_type") or kinds[0]
        if kind not in kinds:
            raise UnsupportedModel(f"vision_config's model_type is {kind!r:.60}: {', '.join(kinds)} are supported")
        return cls(kind, DEFAULTS[kind] | {name: value for name, value in given.items() if value is not None})

    def side(self, name: str) -> int:
        """Returns the side of a square in pixels. Raises UnsupportedModel."""
        value = self.given[name]
        sides = set(value) if isinstance(value, list | tuple) else {value}
        if len(sides) != 1:
            raise UnsupportedModel(f"vision_config's {name} is {value}: squares are supported")
        return int(sides.pop())

    @property
    def patch(self) -> int:
        """The pixels on a side of a patch."""
        return self.side("patch_size")

    @property
    def patches(self) -> int:
        """The patches on a side of a picture."""
        return self.side("image_size") // self.patch

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.given["num_hidden_layers"])

    @property
    def norm(self) -> NormSpec:
        """The norms of the layers."""
        rms = self.given.get("norm_type") == "rms_norm"
        return NormSpec("rms" if rms else "layer", float(self.given["layer_norm_eps"]), bias=not rms)

    def tower(self, layers: int, renames: tuple[Rename, ...], dtype: str | None, **fields: Any) -> ModelSpec:
        """Returns the description of the first `layers` layers; `fields` are others of `ModelSpec`."""
        given = self.given
        heads = int(given["num_attention_heads"])
        head_dim = int(given["hidden_size"]) // heads
        attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False)
        activation: Activation = read_activation(given)
        mlp = MlpSpec(int(given["intermediate_size"]), activation, gated=False, bias=True)
        defaults: dict[str, Any] = {"biases": BiasSpec(qkv=True, output=True), "ignored": (*OF_TEXT, *later(layers))}
        return ModelSpec(
            model_type="vit",
            vocab_size=1,
            hidden_size=int(given["hidden_size"]),
            layers=(LayerSpec(attention, None, mlp),) * layers,
            max_position_embeddings=1,
            norm=self.norm,
            dtype=dtype,
            renames=renames,
            **defaults | fields,
        )


def later(layers: int) -> tuple[str, ...]:
    """The tensors of layers after the first ones, and of what follows them, which are not needed."""
    return (rf"encoder\.layers?\.(?!({'|'.join(map(str, range(layers)))})\.)",)


def chosen_layers(config: Mapping[str, Any], layers: int) -> int:
    """Returns after how many layers of a tower the states are read. Raises UnsupportedModel."""
    chosen = config.get("vision_feature_layer", -1)
    count = chosen if not isinstance(chosen, int) or chosen >= 0 else layers + 1 + chosen
    if not isinstance(count, int) or not 1 <= count <= layers:
        raise UnsupportedModel(
            f"vision_feature_layer is {chosen!r:.60}: one of the tower's {layers} layers is supported"
        )
    return count


def flat(weight: "Tensor", spec: ModelSpec) -> "Tensor":
    """The kernel of a convolution without overlap as the matrix of a patch's pixels."""
    return weight.flatten(1)


def layer_renames(tower: str) -> tuple[Rename, ...]:
    """The names of the layers of CLIP, SigLIP and Idefics; `tower` is the path of their module."""
    layer = rf"^(model\.)?{tower}\.encoder\.layers\.(\d+)\."
    return (
        Rename(layer + r"layer_norm1\.", r"model.layers.\2.input_layernorm."),
        Rename(layer + r"layer_norm2\.", r"model.layers.\2.post_attention_layernorm."),
        Rename(layer + r"self_attn\.out_proj\.", r"model.layers.\2.self_attn.o_proj."),
        Rename(layer + r"self_attn\.", r"model.layers.\2.self_attn."),
        Rename(layer + r"mlp\.fc1\.", r"model.layers.\2.mlp.up_proj."),
        Rename(layer + r"mlp\.fc2\.", r"model.layers.\2.mlp.down_proj."),
    )


def clip_renames(tower: str) -> tuple[Rename, ...]:
    """The names of a tower in the form of CLIP, SigLIP and Idefics; `tower` is the path of its module."""
    rest = rf"^(model\.)?{tower}\."
    return (
        *layer_renames(tower),
        Rename(rest + r"embeddings\.patch_embedding\.weight$", "model.patches.patch_proj.weight", flat),
        Rename(rest + r"embeddings\.patch_embedding\.bias$", "model.patches.patch_proj.bias"),
        Rename(rest + r"embeddings\.position_embedding\.", "model.pos_embed."),
        Rename(rest + r"embeddings\.class_embedding$", "model.lead.weight"),
        Rename(rest + r"pre_layrnorm\.", "model.ln_pre."),
        Rename(rest + r"post_layernorm\.", "model.last_norm."),
    )
