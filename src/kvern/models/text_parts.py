"""The language model in a checkpoint that sees images, too: its settings, its tensors' names, and what is left out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvern.models.defaults import completed
from kvern.models.registry import Config
from kvern.spec.model import (
    ModelSpec,
    Rename,
)

_OF_THE_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")
_RENAMES = (
    Rename(r"^(model\.)?language_model\.(model\.)?(?=(embed_tokens|layers|norm)\.)", "model."),
    Rename(r"^language_model\.(?=lm_head\.)", ""),
)
_ANYWHERE = r"^(model\.)?(language_model\.)?(model\.)?"
_TIED_HEAD = r"^language_model\.lm_head\.weight$"


def text_config(config: Config, text_type: str) -> dict[str, Any]:
    """The settings of the language model: those of the whole model, then those in `text_config`.

    `text_type` is the model type of a `text_config` that names none; its defaults complete both. Files without
    `text_config` have all settings in one place.
    """
    whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    text: Mapping[str, Any] = config.get("text_config") or {**config, "model_type": text_type}
    return {"model_type": text_type} | completed(text, text.get("model_type"), text_type) | whole


def text_part(config: Config, spec: ModelSpec, *towers: str) -> ModelSpec:
    """The model that `spec` describes, within the checkpoint of `config`.

    Tensors of `towers`, top-level modules such as "vision_tower", are passed over. All others are the language model's,
    below `model.language_model.`, `language_model.model.`, or plainly `model.`.
    """
    passed_over = rf"^(model\.)?({'|'.join(towers)})\."
    ignored = (pattern.replace(r"^model\.", _ANYWHERE) for pattern in spec.ignored)
    return replace(
        spec,
        model_type=config.get("model_type", spec.model_type),
        renames=(*_RENAMES, *spec.renames),
        ignored=(passed_over, *((_TIED_HEAD,) if spec.tie_word_embeddings else ()), *ignored),
    )
