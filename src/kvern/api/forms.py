"""The form that an answer must have, under all names that clients use for it."""

from collections.abc import Mapping
from typing import Any

from kvern.errors import InvalidParameter, shown
from kvern.plugins import imported
from kvern.request.other_names import schema_of, structured_fields

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
            asked[name] = {ours: schema_of(name, body[name]) if ours == "json" else body[name]}
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
    found = structured_fields(held)
    if found.keys() == {"structural_tag"}:
        tags = schema_of("structural_tag", found["structural_tag"])
        return response_format({"type": "structural_tag", **(tags if isinstance(tags, dict) else {})}) or {}
    return found


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
        tagged: dict[str, Any] = imported("kvern.structured.tags:tagged_form")(value)
        return tagged
    if kind == "json_object" and value.get("schema") is None:
        return {"json": True}
    held = value.get("json_schema", value)
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(f"response_format of type {kind} needs a schema: an object under json_schema.schema")
    return {"json": schema}
