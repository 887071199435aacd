"""Checkpoints for embeddings: how they are recognized, and which parts they may lack."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kvern.errors import InvalidRequest, KvernError, UnsupportedModel
from kvern.io.files import open_regular, read_object
from kvern.models.checkpoint import is_equal, read_headers
from kvern.models.header import read_entries
from kvern.models.registry import Config, spec_from_config
from kvern.spec.model import ModelSpec, Pooling, Rename

logger = logging.getLogger("kvern")

POOLINGS: Mapping[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "lasttoken",
}
"""Pooling modes of encoders by their names in that file."""


def spec_of_folder(folder: Path, config: Config) -> ModelSpec:
    """The model that `config` describes, with the weights in `folder`.

    A model for embeddings may lack an output layer: it then generates nothing, and its logits are those of tied
    embeddings. A model that `config` calls tied but that has an output layer uses it. Pooling and the usual length of
    texts are read from the folder. Raises UnsupportedModel.
    """
    spec = spec_from_config(config)
    if spec.encoder is None and spec.tie_word_embeddings:
        return _with_stored_head(folder, spec)
    from kvern.models.pooling import POOLING_FILE, read_pooling, read_usual_len

    if spec.encoder is not None:
        try:
            encoder = replace(spec.encoder, usual_len=read_usual_len(folder))
            if not spec.is_classifier and (folder / POOLING_FILE).is_file():
                encoder = replace(encoder, pooling=POOLINGS[read_pooling(folder, spec.model_type, POOLINGS)])
        except InvalidRequest as error:
            raise UnsupportedModel(str(error)) from None
        return replace(spec, encoder=encoder)
    if not (folder / POOLING_FILE).is_file() or _has_head(folder, spec):
        return spec
    return replace(spec, tie_word_embeddings=True, generates=False)


def _with_stored_head(folder: Path, spec: ModelSpec) -> ModelSpec:
    """A model that is to be tied, untied if its files hold an output layer that is not equal to the embeddings.

    Files that hold the output layer alone have the embeddings in it.
    """
    try:
        named = {_llama_name(tensor.name, spec): tensor for tensor in read_headers(folder)}
    except KvernError:  # the loader reports that
        return spec
    head = named.get("lm_head.weight")
    embeddings = named.get("model.embed_tokens.weight", named.get("embed_tokens.weight"))
    if head is None:
        if any(name.startswith("lm_head.") and name != "lm_head.bias" for name in named):
            logger.warning("%s holds a quantized output layer, and ties it: the embeddings are used instead", folder)
        return spec
    if embeddings is None:
        renamed = Rename(r"^lm_head\.weight$", "model.embed_tokens.weight")
        return replace(spec, renames=(*spec.renames, renamed))
    if is_equal(head, embeddings):
        return spec
    logger.warning(
        "tie_word_embeddings is true in %s, and lm_head.weight is not equal to the embeddings: it is used. Write "
        "tie_word_embeddings false into config.json, or remove that tensor",
        folder / "config.json",
    )
    return replace(spec, tie_word_embeddings=False)


def _llama_name(name: str, spec: ModelSpec) -> str:
    for rule in spec.renames:
        name = re.sub(rule.pattern, rule.replacement, name)
    return name


def _has_head(folder: Path, spec: ModelSpec) -> bool:
    """True if the checkpoint has an output layer, or cannot be read: the loader reports that."""
    try:
        names = list(_names(folder))
    except (OSError, ValueError, LookupError, TypeError, KvernError):
        return True
    return not names or any("lm_head." in _llama_name(name, spec) for name in names)


def _names(folder: Path) -> Iterable[str]:
    for index in folder.glob("*.safetensors.index.json"):
        yield from map(str, read_object(index)["weight_map"])
        return
    for file in folder.glob("*.safetensors"):
        with open_regular(file) as stream:
            yield from read_entries(stream)[1]
