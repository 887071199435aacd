"""Structural tags: free text in which certain spans follow a schema, as function calls in running text do."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvern.errors import InvalidParameter, shown
from kvern.request.sampling_params import StructuredOutput

MOST_TAGS = 256


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`begin`, then JSON that `schema` describes, then `end`."""

    begin: str
    schema: dict[str, Any] | bool
    end: str = ""


def tagged_form(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the form that a `response_format` of type structural_tag demands. Raises InvalidParameter."""
    try:
        tags = msgspec.convert(value.get("structures"), list[StructuralTag])
        triggers = msgspec.convert(value.get("triggers"), list[str])
    except msgspec.ValidationError as error:
        raise InvalidParameter(
            "response_format of type structural_tag needs structures, each with begin, schema and end, and "
            f"triggers: {error}"
        ) from error
    return msgspec.to_builtins(structural_tags(tags, triggers))  # type: ignore[no-any-return]


def structural_tags(tags: Sequence[StructuralTag], triggers: Sequence[str]) -> StructuredOutput:
    """Any text, but wherever one of `triggers` occurs, a tag that begins with it follows.

    Raises InvalidParameter unless each tag begins with exactly one trigger and each trigger begins a tag.
    """
    if not 0 < len(tags) <= MOST_TAGS or not triggers:
        raise InvalidParameter(
            f"structural_tag has {len(tags)} structures and {len(triggers)} triggers: give 1 to {MOST_TAGS} structures "
            "and the texts that they begin with as triggers"
        )
    rules, parts = [], {}
    for number, trigger in enumerate(triggers):
        if not trigger or any(trigger in other for other in (*triggers[:number], *triggers[number + 1 :])):
            raise InvalidParameter(f"structural_tag: trigger {shown(trigger)} is empty or a part of another trigger")
        choices = []
        for index, tag in enumerate(tags):
            if tag.begin.startswith(trigger):
                parts[f"tag_{index}"] = StructuredOutput(json=tag.schema)
                rest, end = _quoted(tag.begin[len(trigger) :]), _quoted(tag.end)
                choices.append(f"{rest} @tag_{index} {end}")
        if not choices:
            raise InvalidParameter(f"structural_tag: no structure begins with the trigger {shown(trigger)}")
        rules.append(f"trigger_{number}[lazy]: TEXT {_quoted(trigger)}")
        rules.append(f"tagged_{number}: trigger_{number} ({' | '.join(choices)})")
    for index, tag in enumerate(tags):
        if f"tag_{index}" not in parts:
            raise InvalidParameter(f"structural_tag: {shown(tag.begin)} begins with none of the triggers")
    spans = " | ".join(f"tagged_{number}" for number in range(len(triggers)))
    grammar = "\n".join([f"start: ({spans})* TEXT", *rules, "TEXT: /(?s:.*)/"])
    return StructuredOutput(grammar=grammar, parts=parts)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""
