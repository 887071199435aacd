"""MiniMax-M2: experts with sigmoid scores, queries and keys normalised as whole rows, a part of each head rotated."""

from kvern.errors import UnsupportedModel
from kvern.models.describe import (
    check_settings,
    describe,
    read_head_dim,
    read_moe,
    read_rms_norm,
    read_rope,
    uniform_layers,
)
from kvern.models.families.mistral import RENAMES
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec, QueryKeyNormSpec, Rename

_AS_PUBLISHED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""Settings of the files that all models have alike."""


def minimax_m2(config: Config) -> ModelSpec:
    check_settings(config, _AS_PUBLISHED)
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        raise UnsupportedModel("attn_type_list names layers of linear attention: kvern reads minimax_m2 without them")
    moe = read_moe(config, scoring="sigmoid")
    turned = config.get("rotary_dim")
    rope = read_rope(config if turned is None else {**config, "rotary_pct": turned / read_head_dim(config)})
    layers = config["num_hidden_layers"]
    drafts = "|".join(str(layers + index) for index in range(config.get("num_mtp_modules") or 0))
    return describe(
        config,
        uniform_layers(config, rope=rope, mlp=moe),
        query_key_norm=QueryKeyNormSpec(read_rms_norm(config), "row"),
        renames=(
            Rename(r"\.(block_sparse_moe|mlp)\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
            *RENAMES,
        ),
        ignored=(rf"^model\.layers\.({drafts})\.",) if drafts else (),
    )
