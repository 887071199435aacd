"""The scalings of rotary position embeddings, by the name that a `config.json` gives them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from kvern.errors import UnsupportedModel
from kvern.models.registry import Config
from kvern.spec.rope_scaling import LinearScaling, RopeScaling
from kvern.spec.rope_stretching import Dynamic, Llama3, LongRope, Proportional, Yarn


def read_scaling(kind: str, rope: Mapping[str, Any], config: Config) -> RopeScaling:
    """The scaling of a kind, with its parameters in `rope`. Raises UnsupportedModel."""
    if kind not in _SCALINGS:
        known = ", ".join(["default", "mrope", *_SCALINGS])
        raise UnsupportedModel(f"rope scaling {kind!r:.60} is unknown; known: {known}")
    return _SCALINGS[kind](rope, config)


def _trained_len(rope: Mapping[str, Any], config: Config) -> int:
    """The context before stretching; a value outside the rope parameters (Phi-3) takes precedence."""
    own = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return int(config.get("original_max_position_embeddings") or own)


def _stretch(rope: Mapping[str, Any], config: Config) -> float:
    return float(rope.get("factor") or config["max_position_embeddings"] / _trained_len(rope, config))


def _yarn(rope: Mapping[str, Any], config: Config) -> RopeScaling:
    factor = _stretch(rope, config)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        attention_factor = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"]) if both else magnitude(1.0)
    return Yarn(
        factor=factor,
        trained_len=_trained_len(rope, config),
        attention_factor=attention_factor,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
    )


def _longrope(rope: Mapping[str, Any], config: Config) -> RopeScaling:
    trained_len, factor = _trained_len(rope, config), _stretch(rope, config)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained_len))
    return LongRope(tuple(rope["short_factor"]), tuple(rope["long_factor"]), trained_len, attention_factor)


_SCALINGS: dict[str, Callable[[Mapping[str, Any], Config], RopeScaling]] = {
    "linear": lambda rope, config: LinearScaling(rope["factor"]),
    "proportional": lambda rope, _: Proportional(rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)),
    "dynamic": lambda rope, config: Dynamic(rope["factor"], config["max_position_embeddings"]),
    "yarn": _yarn,
    "llama3": lambda rope, config: Llama3(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], _trained_len(rope, config)
    ),
    "longrope": _longrope,
    "su": _longrope,
}
