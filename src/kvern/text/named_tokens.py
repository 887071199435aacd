"""Added tokens that ``tokenizer.json`` lacks and that other files of a checkpoint name.

Fine-tuned checkpoints often name new tokens, or make tokens of the vocabulary special, only in
``tokenizer_config.json``, ``special_tokens_map.json`` or ``added_tokens.json``. kvern adds them in the order of
transformers: a text that contains one is encoded as that token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvern.errors import CorruptCheckpoint, shown

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

Named = tuple[tokenizers.AddedToken, int | None]
"""A token, and the id that a file gives it."""


def add_named_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], added: Mapping[str, Any]
) -> None:
    """Adds the tokens that ``config`` names, and those of ``added_tokens.json`` with their ids if ``config`` has no
    ``added_tokens_decoder``.

    Raises CorruptCheckpoint for malformed files, and for a token that cannot have the id that they give it.
    """
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, Named] = {}
    try:
        for token, place in _named(config, added):
            if token.content not in present:
                missing.setdefault(token.content, (token, place))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"the added tokens that files in {folder} name cannot be read: {error!r:.200}"
        ) from None
    backend.add_tokens([token for token, _ in missing.values()])
    for token, place in missing.values():
        if place is not None and (found := backend.token_to_id(token.content)) != place:
            raise CorruptCheckpoint(
                f"{folder}: token {shown(token.content)} is to have id {place}, and its place in tokenizer.json is "
                f"{found}: download tokenizer.json again"
            )


def all_special(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``tokenizer_config.json`` with the model's own special tokens among its special tokens.

    If it has no ``added_tokens_decoder``, those of ``special_tokens_map.json`` are included, which old versions of
    transformers wrote.
    """
    if "added_tokens_decoder" not in config:
        config = {**config, **special_map, **{name: config[name] for name in EXTRA if config.get(name)}}
    return {**_own_names(config), **config}


def _own_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns special tokens with names that only this model has, such as image_token."""
    tables = (config.get(name) for name in ("model_specific_special_tokens", "extra_special_tokens"))
    found = {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    found |= {name: value for table in tables if isinstance(table, dict) for name, value in table.items()}
    return {name: value for name, value in found.items() if name not in NAMES}


def _named(config: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[Named]:
    """Yields all named tokens, first those with ids."""
    decoder = config.get("added_tokens_decoder")
    special = list(_special(config))
    contents = {token.content for token in special}
    if decoder is not None:
        for place, value in sorted((int(place), value) for place, value in decoder.items()):
            yield _token(value, value.get("special") is True or value["content"] in contents), place
    else:
        for content, place in sorted(added.items(), key=lambda entry: int(entry[1])):
            yield _token(content, content in contents), int(place)
    yield from ((token, None) for token in special)


def _special(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    more: Any = next((config[name] for name in EXTRA if config.get(name) and not isinstance(config[name], dict)), [])
    for value in (*(config.get(name) for name in NAMES), *_own_names(config).values(), *more):
        if value is not None:
            yield _token(value, special=True)


def _token(value: Any, special: bool) -> tokenizers.AddedToken:
    """Returns a token from its text, or from an object with its flags."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=special)
    flags = {name: value[name] for name in FLAGS if name in value}
    return tokenizers.AddedToken(value["content"], special=special, **flags)
