"""Which layers a configuration leaves plain, or names: lists of paths, of their parts, of wildcards, of expressions."""

import fnmatch
import re
from collections.abc import Iterable

from kvern.errors import UnsupportedModel
from kvern.layers.linear_format import LinearFormat, LinearMethods

ROUTERS = re.compile(r"\.mlp\.(gate|shared_expert_gate)$")
"""Small, and what they say decides much: they are plain in all formats here."""
ENDS = re.compile(r"^(model\.embed_tokens|lm_head)$")
NEVER = re.compile(r"(?!)")


def paths_matching(entries: object, what: str) -> re.Pattern[str]:
    """An expression that is found in the paths of the layers that `entries` name, None for no entry.

    An entry is a path or a run of its parts ("lm_head", "mlp.gate", "model.layers.3"), has wildcards ("*.mlp.gate"),
    or is an expression from the path's beginning on ("re:.*gate$"). Raises UnsupportedModel: `what` is no such list.
    """
    if entries is None:
        return NEVER
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise UnsupportedModel(f"{what} is {str(entries)[:60]!r}: it must be a list of names of layers")
    return re.compile("|".join(map(expression_of, entries))) if entries else NEVER


def expression_of(entry: str) -> str:
    """The regular expression, to be searched for, of one entry."""
    if entry.startswith("re:"):
        return f"^(?:{entry.removeprefix('re:')})"
    if any(sign in entry for sign in "*?["):
        return f"^(?:{fnmatch.translate(entry)})"
    return rf"(?:^|\.){re.escape(entry)}(?:\.|$)"


def all_but(ignored: Iterable[re.Pattern[str]], stored: LinearFormat, unquantized: LinearFormat) -> LinearMethods:
    """All layers are `stored` so but for those that are `ignored`, embeddings, the head and routers."""
    return LinearMethods(stored, tuple((pattern, unquantized) for pattern in (*ignored, ROUTERS, ENDS)))
