"""Fields that several APIs take, and checks of a field's type."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvern.api.errors import HttpError
from kvern.errors import InvalidParameter, shown
from kvern.request.request import RequestOptions
from kvern.request.sampling_params import MAX_WIDE_INTEGER, SamplingParams

COMMON_FIELDS = ("priority", "timeout", "cache_salt")
"""Fields of every API beside its own parameters and those of SamplingParams."""
# fmt: off
WITHOUT_EFFECT = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "spaces_between_special_tokens",
}
# fmt: on
LONGEST_TIMEOUT = 7 * 24 * 3600.0
LONGEST_SALT = 256
MOST_METADATA = 16
LONGEST_METADATA_NAME = 64
LONGEST_METADATA = 512

JSON_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class CommonFields:
    """Common fields. `timeout` is in seconds from now; requests with different `cache_salt` share no cached blocks."""

    options: RequestOptions = RequestOptions()
    """The options of which a body says something."""
    timeout: float | None = None
    cache_salt: str = ""


def read_common(body: Mapping[str, Any]) -> CommonFields:
    """Reads the fields of every API. Raises HttpError."""
    timeout = typed(body, "timeout", (int, float), None)
    if timeout is not None and not 0 < timeout <= LONGEST_TIMEOUT:
        raise HttpError(
            400, f"timeout is {shown(timeout)}: it must be above 0 and at most {LONGEST_TIMEOUT}", param="timeout"
        )
    salt = typed(body, "cache_salt", str, "")
    if len(salt) > LONGEST_SALT:
        message = f"cache_salt has {len(salt)} characters: at most {LONGEST_SALT}"
        raise HttpError(400, message, param="cache_salt")
    return CommonFields(RequestOptions(priority=typed(body, "priority", int, 0)), timeout, salt)


def typed(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """Returns a field of this type, or the default if it is missing or null. Integers have 64 bits. Raises
    HttpError."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    value = value if float in kinds else whole(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(JSON_NAMES[kind] for kind in kinds)
        raise HttpError(400, f"{name} is {shown(value)}: it must be {expected}", param=name)
    if isinstance(value, int) and not -MAX_WIDE_INTEGER - 1 <= value <= MAX_WIDE_INTEGER:
        message = f"{name} is {shown(value)}: it must be at least -2**63 and below 2**63"
        raise HttpError(400, message, param=name)
    return value


def whole(value: object) -> object:
    """Returns an integer for a value such as 8.0, which clients send whose language has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_WIDE_INTEGER else value


def merge_extra(body: dict[str, Any]) -> None:
    """Moves the fields of `extra_body` into the body, unless the body has them."""
    extra = body.pop("extra_body", None)
    if isinstance(extra, dict):
        for name, value in extra.items():
            body.setdefault(name, value)


def read_metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """Reads `metadata`, texts by name, within OpenAI's limits. Raises HttpError."""
    metadata: dict[str, str] = typed(body, "metadata", dict, {})
    if len(metadata) > MOST_METADATA:
        raise HttpError(400, f"metadata has {len(metadata)} entries: at most {MOST_METADATA}", param="metadata")
    for name, value in metadata.items():
        if len(name) > LONGEST_METADATA_NAME:
            message = f"metadata has a name of {len(name)} characters: at most {LONGEST_METADATA_NAME}"
            raise HttpError(400, message, param="metadata")
        if not isinstance(value, str) or len(value) > LONGEST_METADATA:
            message = f"metadata[{name!r}] must be a text of at most {LONGEST_METADATA} characters"
            raise HttpError(400, message, param="metadata")
    return metadata


def sampling_params(defaults: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """Returns `defaults` with the named parameters, types and ranges checked. Raises InvalidParameter."""
    named = {name: whole(values[name]) for name in SamplingParams.__struct_fields__ if values.get(name) is not None}
    if not named:
        return defaults
    try:
        everything = {**msgspec.to_builtins(defaults, str_keys=True), **named}
        return msgspec.convert(everything, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidParameter(_readable_type_error(str(error))) from error


def _readable_type_error(message: str) -> str:
    """Rewrites ``Expected `float`, got `str` - at `$.top_p` `` as ``top_p: expected float, got str``."""
    match = re.fullmatch(r"(Expected .*) - at `\$\.?(.*)`", message.replace(" | null", ""))
    if match is None:
        return re.sub(r" - at `\$.*`$", "", message)
    expected = match[1].replace("`", "")
    return f"{match[2]}: {expected[0].lower()}{expected[1:]}"
