"""The implementation of a model: kvern's decoder, or transformers for models without a description."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern.errors import ConfigError, UnsupportedModel
from kvern.models.embedder import spec_of_folder
from kvern.models.registry import KEY, is_described, spec_from_config
from kvern.models.spec_file import FILE
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

INSTALL = "pip install 'kvern[transformers]'"


def describe_model(folder: Path, config: Mapping[str, Any], implementation: str) -> ModelSpec:
    """The model in `folder`, whose `config.json` is `config`: a TransformersSpec if transformers is to compute it.

    `implementation` is the option `model_implementation`. Raises UnsupportedModel, or ConfigError where transformers is
    asked for and not installed.
    """
    if implementation == "kvern" or (implementation == "auto" and is_described(config)):
        if KEY in config:
            logger.warning("kvern computes %s by the description in %s", config.get("model_type"), folder / FILE)
        return spec_of_folder(folder, config)
    try:
        import transformers
    except ImportError as error:
        if implementation == "transformers":
            raise ConfigError(
                f"model_implementation is transformers, which cannot be loaded ({error}): install it with {INSTALL}, "
                "or leave model_implementation at auto"
            ) from error
        try:
            return spec_from_config(config)
        except UnsupportedModel as unknown:
            raise UnsupportedModel(f"{unknown}; transformers may be able to run it: {INSTALL}") from error
    from kvern.models.fallback.description import describe

    try:
        spec = describe(folder)
    except UnsupportedModel as error:
        if is_described(config):
            raise
        raise UnsupportedModel(f"kvern has no description of this model (docs/models.md), and {error}") from error
    logger.warning(
        "transformers %s computes %s%s: slower, without adapters; see docs/models.md",
        transformers.__version__,
        spec.model_type,
        "" if is_described(config) else ", which kvern has no description of (kvern describe may find one)",
    )
    return spec
