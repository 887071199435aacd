"""The common part of the configurations of encoders."""

from kvern.errors import UnsupportedModel
from kvern.models.registry import Config

TASKS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""Ends of the names of supported architectures."""


def check_encoder(config: Config) -> None:
    """Refuses architectures other than embeddings and rerankers. Raises UnsupportedModel."""
    for name in _architectures(config):
        if not name.endswith(TASKS):
            raise UnsupportedModel(f"{name} is not supported: of encoders those for embeddings and rerankers are")
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise UnsupportedModel(f"{name} is true: {config.get('model_type')} is supported as an encoder alone")


def is_classifier(config: Config) -> bool:
    """True if the model is a classifier with one label. Raises UnsupportedModel for several labels."""
    if not any(name.endswith("ForSequenceClassification") for name in _architectures(config)):
        return False
    if (labels := len(config.get("id2label") or "01")) != 1:  # transformers writes no id2label where there are two
        raise UnsupportedModel(f"id2label names {labels} labels: classifiers of one label, rerankers, are supported")
    return True


def _architectures(config: Config) -> list[str]:
    given = config.get("architectures") or []
    return given if isinstance(given, list) else [given]
