"""OLMo 1 (norms without weights), 2 and 3 (norms after attention and MLP, queries and keys normalised), and OLMoE."""

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    describe,
    layers_by_type,
    read_layer_types,
    read_moe,
    read_rms_norm,
    read_rope,
    uniform_layers,
)
from kvern.models.registry import Config
from kvern.spec.model import POST_NORMS, ModelSpec, NormSpec, QueryKeyNormSpec


def _reject_clipping(config: Config) -> None:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModel(f"clip_qkv is {config['clip_qkv']}: kvern does not clip queries, keys and values")


def olmo(config: Config) -> ModelSpec:
    _reject_clipping(config)
    return describe(config, norm=NormSpec("layer", 1e-5, weight=False))


def olmo2(config: Config) -> ModelSpec:
    norm = QueryKeyNormSpec(read_rms_norm(config), "row")
    return describe(config, block_norms=POST_NORMS, query_key_norm=norm)


def olmo3(config: Config) -> ModelSpec:
    """OLMo 3: every fourth layer is global, and only those have stretched positions."""
    typed = "full_attention" in (config.get("rope_parameters") or {})
    local = config if typed else {**config, "rope_scaling": None}
    ropes = {
        "full_attention": read_rope(config, "full_attention"),
        "sliding_attention": read_rope(local, "sliding_attention"),
    }
    layers = layers_by_type(config, read_layer_types(config, pattern=4), ropes=ropes)
    norm = QueryKeyNormSpec(read_rms_norm(config), "row")
    return describe(config, layers, block_norms=POST_NORMS, query_key_norm=norm)


def olmoe(config: Config) -> ModelSpec:
    _reject_clipping(config)
    moe = read_moe(config, renormalize=config["norm_topk_prob"])
    norm = QueryKeyNormSpec(read_rms_norm(config), "row")
    return describe(config, uniform_layers(config, mlp=moe), query_key_norm=norm)
