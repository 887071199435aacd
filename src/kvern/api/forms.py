"""The form that an answer must have, under all names that clients use for it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvern.errors import InvalidParameter, shown
from kvern.io.json_lines import is_too_much
from kvern.structured.tags import StructuralTag, structural_tags

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "format": "json",
}
"""Names in earlier vLLM, llama.cpp, SGLang and ollama for the fields of `structured`."""
WITHOUT_CHOICE = {"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "json_object"}
"""Switches of vLLM's `structured_outputs` that change nothing if they are false."""
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
STRUCTURED = {"response_format", "structured_outputs", *GUIDED}


def structured_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the form that a body demands, as the fields of `structured`. Raises InvalidParameter."""
    asked: dict[str, dict[str, Any]] = {}
    shape = body.get("response_format")
    if shape is not None:
        found = response_format(shape)
        if found is not None:
            asked["response_format"] = found
    for name, ours in GUIDED.items():
        if name == "format" and body.get(name) == "json":
            asked[name] = {"json": True}
        elif body.get(name) is not None and not (name in ("grammar", "format") and body[name] == ""):
            asked[name] = {ours: _schema(name, body[name]) if ours == "json" else body[name]}
    for name in ("structured_outputs", "structured"):
        if body.get(name) is not None:
            if not isinstance(body[name], dict):
                raise InvalidParameter(f"{name} is {shown(body[name])}: it must be an object")
            if found := _structured(body[name]):
                asked[name] = found
    if len(asked) > 1:
        raise InvalidParameter(f"{' and '.join(asked)} are set: give one of them")
    return next(iter(asked.values()), None)


def _structured(held: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `structured` or of vLLM's `structured_outputs`."""
    found = {key: value for key, value in held.items() if value is not None}
    found = {key: value for key, value in found.items() if not (key in WITHOUT_CHOICE and value is False)}
    if "json" in found:
        found["json"] = _schema("json", found["json"])
    if found.get("json_object") is True:
        del found["json_object"]
        found.setdefault("json", True)
    if found.keys() == {"structural_tag"}:
        tags = _schema("structural_tag", found["structural_tag"])
        return response_format({"type": "structural_tag", **(tags if isinstance(tags, dict) else {})}) or {}
    return found


def _schema(name: str, value: object) -> object:
    """Returns a schema that may be given as JSON text."""
    if not isinstance(value, str):
        return value
    if is_too_much(value.encode(errors="replace")):
        raise InvalidParameter(f"{name} holds more values than fit in one request: send a smaller schema")
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(f"{name} is not valid JSON: {error}") from error


def response_format(value: object) -> dict[str, Any] | None:
    """Reads OpenAI's `response_format`; the schema is under `json_schema`, or beside the type as in /v1/responses."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in RESPONSE_FORMATS:
        raise InvalidParameter(
            f"response_format is {shown(value)}: its type must be one of {', '.join(RESPONSE_FORMATS)}"
        )
    if kind == "text":
        return None
    if kind == "structural_tag":
        try:
            tags = msgspec.convert(value.get("structures"), list[StructuralTag])
            triggers = msgspec.convert(value.get("triggers"), list[str])
        except msgspec.ValidationError as error:
            raise InvalidParameter(
                "response_format of type structural_tag needs structures, each with begin, schema and end, and "
                f"triggers: {error}"
            ) from error
        return msgspec.to_builtins(structural_tags(tags, triggers))  # type: ignore[no-any-return]
    if kind == "json_object" and value.get("schema") is None:
        return {"json": True}
    held = value.get("json_schema", value)
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(f"response_format of type {kind} needs a schema: an object under json_schema.schema")
    return {"json": schema}
