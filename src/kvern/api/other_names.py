"""Fields that other engines name differently from kvern; `unknown_fields` reads them, if a body has any."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvern.plugins import imported
from kvern.request.other_names import RENAMED

WINDOWS = {"repeat_last_n": 0, "penalty_last_n": 0, "repetition_penalty_range": None, "rep_pen_range": None}
"""Names for the number of last tokens that penalties look at, with the value that disables penalties. kvern's penalties
always look at all tokens."""


def in_own_words(body: Mapping[str, Any], known: Collection[str], place: str = "") -> Mapping[str, Any]:
    """Returns a body in which the fields of other engines have kvern's names.

    `place` is put before names in messages. Raises HttpError for unsupported fields that would change the answer.
    """
    unknown = [name for name, value in body.items() if value is not None and name not in known]
    if not unknown:
        return body
    found: Mapping[str, Any] = imported("kvern.api.unknown_fields:translated")(body, unknown, known, place)
    return found


def ignored(body: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Returns the names of ignored fields, if they can be shown."""
    unknown = body.keys() - set(known)
    return list(imported("kvern.api.unknown_fields:without_meaning")(unknown)) if unknown else []


def sent_names(body: Mapping[str, Any]) -> dict[str, str]:
    """Returns a client's names of fields in a body, its `options` or a row's `body`, by kvern's names."""
    parts = (body, body.get("options"), body.get("body"))
    return {
        ours: name
        for values in parts
        if isinstance(values, dict) and not values.keys().isdisjoint(RENAMED)
        for name, ours in RENAMED.items()
        if values.get(name) is not None and values.get(ours) is None
    }
