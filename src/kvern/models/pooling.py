"""Pooling of a text's states to one vector, by the files of sentence-transformers in a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvern.errors import InvalidRequest, shown
from kvern.io.files import read_object, read_whole, reason

POOLING_FILE = "1_Pooling/config.json"
MODULES_FILE = "modules.json"
"""The file that lists the modules after the model; the result is normalized in any case."""
TEXTS_FILE = "sentence_bert_config.json"
"""The file of tokenization settings: `max_seq_length`, and `do_lower_case`, which a `Tokenizer` reads."""
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


class _Module(msgspec.Struct):
    """An entry of that file: `type` is the class, with the package that it is in."""

    type: str


def read_pooling(folder: Path, model: str, supported: Mapping[str, str]) -> str:
    """The pooling of the model in a folder: a value of `supported`, which has them by their names in the file.

    Raises InvalidRequest for any other, and for states that go through other modules.
    """
    try:
        modes = _modes(read_object(folder / POOLING_FILE))
    except FileNotFoundError:
        raise InvalidRequest(
            f"{model} gives no embeddings: it was not trained for that (its folder has no {POOLING_FILE}); use a model "
            "that was"
        ) from None
    if len(modes) != 1 or modes[0] not in supported:
        only = " or ".join(dict.fromkeys(supported.values()))
        raise InvalidRequest(f"{model} pools by {shown(', '.join(modes) or 'nothing')}: only {only} is supported")
    for kind in _module_types(folder):
        if kind.rpartition(".")[2] not in KNOWN_MODULES:
            raise InvalidRequest(
                f"{model} passes its states through {shown(kind)} ({MODULES_FILE}): only "
                f"{', '.join(KNOWN_MODULES)} are supported"
            )
    return supported[modes[0]]


def read_usual_len(folder: Path) -> int | None:
    """The most tokens of a text in sentence-transformers; None: no limit. Raises InvalidRequest."""
    try:
        most = read_object(folder / TEXTS_FILE).get("max_seq_length")
    except FileNotFoundError:
        return None
    if most is not None and (type(most) is not int or most < 1):
        raise InvalidRequest(f"max_seq_length of {TEXTS_FILE} is {shown(most)}: it must be 1 or more, or null")
    return most


def _modes(pooling: Mapping[str, Any]) -> list[str]:
    """The modes of pooling: newer files have `pooling_mode`, a name or a list, older ones a flag for each."""
    given = pooling.get("pooling_mode")
    if given is not None:
        return [str(mode) for mode in (given if isinstance(given, list) else [given])]
    flags = (name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True)
    return [name.removeprefix("pooling_mode_") for name in flags]


def _module_types(folder: Path) -> list[str]:
    try:
        modules = msgspec.json.decode(read_whole(folder / MODULES_FILE), type=list[_Module])
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{folder / MODULES_FILE} cannot be read: {reason(error)}") from None
    return [module.type for module in modules]
