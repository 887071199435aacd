"""EXAONE 4: norms after attention and MLP; where layers slide, the global ones know no positions."""

from kvern.models.describe import describe, layers_by_type, read_layer_types, read_rms_norm, read_rope
from kvern.models.registry import Config
from kvern.spec.model import POST_NORMS, ModelSpec, QueryKeyNormSpec


def exaone4(config: Config) -> ModelSpec:
    slides = config.get("sliding_window") is not None
    pattern = config.get("sliding_window_pattern") or 4
    pattern = len(pattern) if isinstance(pattern, str) else pattern
    kinds = read_layer_types(config, pattern=pattern if slides else 1)
    rope = read_rope(config)
    ropes = {"sliding_attention": rope, "full_attention": None if slides else rope}
    return describe(
        config,
        layers_by_type(config, kinds, ropes=ropes),
        block_norms=POST_NORMS,
        query_key_norm=QueryKeyNormSpec(read_rms_norm(config)),
    )
