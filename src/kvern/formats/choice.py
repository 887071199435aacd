"""The layers that a configuration lists: paths, parts of paths, wildcards, and regular expressions."""

import fnmatch
import re
from collections.abc import Iterable

from kvern.errors import UnsupportedModel
from kvern.layers.linear_format import LinearFormat, LinearMethods

ROUTERS = re.compile(r"\.((mlp|moe)\.(gate|shared_expert_gate)|altup\.\w+|indexer\.weights_proj)$")
"""Routers and gates, which are plain in all formats here: they are small and sensitive."""
EMBEDDINGS = re.compile(r"^model\.embed_tokens(_per_layer)?$")
HEAD = re.compile(r"^lm_head$")
NEVER = re.compile(r"(?!)")
MOST_REPEATS = 5


def paths_matching(entries: object, what: str) -> re.Pattern[str]:
    """An expression that matches the paths of the layers that `entries` list; NEVER for no entry.

    An entry is a path or a run of its parts ("lm_head", "mlp.gate", "model.layers.3"), has wildcards ("*.mlp.gate"), or
    is an expression for the beginning of the path ("re:.*gate$"). Raises UnsupportedModel if `what` is no such list.
    """
    if entries is None:
        return NEVER
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise UnsupportedModel(f"{what} is {str(entries)[:60]!r}: it must be a list of names of layers")
    return re.compile("|".join(map(expression_of, entries))) if entries else NEVER


def expression_of(entry: str) -> str:
    """The regular expression, to be searched for, of one entry."""
    if entry.startswith("re:"):
        return f"^(?:{checked(entry.removeprefix('re:'))})"
    if any(sign in entry for sign in "*?["):
        return f"^(?:{fnmatch.translate(entry)}|{fnmatch.translate(entry + '.*')})"
    return rf"(?:^|\.){re.escape(entry.strip('.'))}(?:\.|$)"


def checked(expression: str) -> str:
    """The expression, if its search is fast. Raises UnsupportedModel.

    A search may be exponential in the repeats and choices within a repeated group, and a power of the name's length for
    that many repeats.
    """
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "a", re.sub(r"\\.", "a", expression))
    within, repeats = [False], 0
    for place, sign in enumerate(bare):
        if sign == "(":
            within.append(False)
        elif sign == ")" and len(within) > 1:
            varies = within.pop()
            within[-1] |= varies
            if varies and bare[place + 1 : place + 2] in ("*", "+", "{"):
                repeats = MOST_REPEATS + 1
                break
        elif sign == "|":
            within[-1] = True
            repeats = 0 if len(within) == 1 else repeats
        elif sign in "*+{":
            within[-1] = True
            repeats += 1
            if repeats > MOST_REPEATS:
                break
    if repeats > MOST_REPEATS:
        raise UnsupportedModel(
            f"quantization_config: the expression {expression!r:.80} may take forever: it may have {MOST_REPEATS} "
            "repeats, and none, nor a choice, within another"
        )
    return expression


def all_but(ignored: Iterable[re.Pattern[str]], stored: LinearFormat, unquantized: LinearFormat) -> LinearMethods:
    """Methods that store all layers in `stored`, except `ignored` ones, embeddings, the head and routers."""
    return LinearMethods(stored, tuple((pattern, unquantized) for pattern in (*ignored, ROUTERS, EMBEDDINGS, HEAD)))
