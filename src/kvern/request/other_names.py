"""Names that sampling parameters and outputs have in other engines, and the forms of answers as vLLM writes them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from kvern.errors import InvalidParameter
from kvern.io.json_lines import is_too_much

RENAMED = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "rep_pen": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_sequence": "stop",
    "stopping_strings": "stop",
    "no_stop_trim": "include_stop_str_in_output",
    "typ_p": "typical_p",
    "typical": "typical_p",
    "nsigma": "top_n_sigma",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "num_return_sequences": "n",
}
"""Names in llama.cpp, ollama, SGLang, TGI, transformers and others, with kvern's names."""
WITHOUT_CHOICE = {"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "json_object"}
"""Switches of vLLM's `structured_outputs` that change nothing if they are false."""


def fields_of(value: object) -> object:
    """Returns an object of another library, such as vLLM's BeamSearchParams, as a mapping; other values unchanged."""
    if isinstance(value, msgspec.Struct):
        names = [*value.__struct_fields__]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        return value
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def structured_fields(held: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of StructuredOutput for `structured`, or for vLLM's `structured_outputs`. Raises
    InvalidParameter."""
    found = {key: value for key, value in held.items() if value is not None}
    found = {key: value for key, value in found.items() if not (key in WITHOUT_CHOICE and value is False)}
    if "json" in found:
        found["json"] = schema_of("json", found["json"])
    if found.get("json_object") is True:
        del found["json_object"]
        found.setdefault("json", True)
    return found


def schema_of(name: str, value: object) -> object:
    """Returns a schema that may be given as JSON text. Raises InvalidParameter."""
    if not isinstance(value, str):
        return value
    if is_too_much(value.encode(errors="replace")):
        raise InvalidParameter(f"{name} holds more values than fit in one request: send a smaller schema")
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(f"{name} is not valid JSON: {error}") from error
