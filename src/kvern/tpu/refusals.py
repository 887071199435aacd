"""The parts of a `ModelSpec` that are computed here; all else that differs from its usual value is refused by name."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from kvern.errors import UnsupportedModel
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BiasSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, QueryKeyNormSpec, RopeSpec

COMPUTED: Mapping[type, set[str]] = {
    AttentionSpec: {"window"},
    BiasSpec: {"qkv", "output", "head"},
    LayerSpec: set(),
    MlpSpec: {"bias"},
    ModelSpec: {"bos_token_id", "draft_head", "dtype", "ignored", "renames", "tie_word_embeddings"},
    NormSpec: {"epsilon"},
    QueryKeyNormSpec: set(),
    RopeSpec: {"scaling", "interleaved"},
}
"""The parts that the function computes, and their fields that may have any value, beside those without a default."""
SHOWN = 3


def check(spec: ModelSpec) -> None:
    """Raises UnsupportedModel with the fields of a model that the function does not compute."""
    found = list(dict.fromkeys(_refused(spec, "")))
    if spec.tie_word_embeddings and spec.biases.head:
        found.append("biases.head is True, and the head tied")
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise UnsupportedModel(
            f"{spec.model_type} cannot become a JAX function: {', '.join(found[:SHOWN])}{more}; models built "
            "like Llama or Qwen3 can (docs/hardware.md)"
        )


def _refused(part: Any, path: str) -> Iterator[str]:
    for field in fields(part):
        value, name = getattr(part, field.name), f"{path}{field.name}"
        parts = value if isinstance(value, tuple) else (value,)
        if parts and all(type(item) in COMPUTED for item in parts):
            for item in parts:
                yield from _refused(item, f"{name}.")
        elif not (field.name in COMPUTED[type(part)] or _is_usual(field, value)):
            yield f"{name} is {type(value).__name__ if is_dataclass(value) else repr(value)[:60]}"


def _is_usual(field: "Field[Any]", value: Any) -> bool:
    """A field has its default; one without a default is no part, and is missing only where layers see no positions."""
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    if field.default is not MISSING:
        return bool(value == field.default)
    return field.name == "rope" if value is None else not is_dataclass(value)
