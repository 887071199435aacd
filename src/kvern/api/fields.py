"""Fields that several APIs take, checks of a field's type, and the limits of one request.

The limits are higher than any use needs, and low enough for the server.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvern.api.errors import HttpError, wrong_value
from kvern.errors import InvalidParameter, InvalidRequest, shown
from kvern.request.request import RequestOptions
from kvern.request.sampling_params import MAX_WIDE_INTEGER, SamplingParams

T = TypeVar("T")

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

PARAMETERS = frozenset(SamplingParams.__struct_fields__) - {"n", "logprobs", "prompt_logprobs", "prompt_logprobs_from"}
"""Sampling parameters of APIs that give one answer, and ask for log-probabilities in another way."""

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
        raise wrong_value("timeout", timeout, f"above 0 and at most {LONGEST_TIMEOUT}")
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
        raise wrong_value(name, value, expected)
    if isinstance(value, int) and not -MAX_WIDE_INTEGER - 1 <= value <= MAX_WIDE_INTEGER:
        raise wrong_value(name, value, "at least -2**63 and below 2**63")
    return value


def inner(values: Mapping[str, Any], name: str, kind: type[T], place: str, right: str) -> T:
    """Returns a value of this type in an object at `place` of a body; `right` says what it must be. Raises
    InvalidRequest."""
    value = values.get(name)
    if not isinstance(value, kind):
        raise InvalidRequest(f"{place}.{name} is {shown(value)}: it must be {right}")
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


LONGEST_LISTS = {
    "stop": 64,
    "stop_token_ids": 1024,
    "visible_token_ids": 1024,
    "bad_words": 1024,
    "dry_sequence_breakers": 32,
    "allowed_token_ids": 1 << 20,
    "logit_bias": 4096,
}
MOST_ENTRIES = 1 << 21
"""The limit of all entries of these lists, times the answers: each answer sends its own to the engine."""
LONGEST_STOP = 1024
"""The limit of a stop string or bad word in characters."""
LONGEST_BREAKER = 40
"""The limit of one of `dry_sequence_breakers` in characters: each is compared with the text at every token."""
MOST_SAMPLES = 128
MOST_SEQUENCES = 1024
"""The limit of prompts times `n` (or beams) in one request."""
MOST_LOGPROBS = 8192
"""The limit of answers times log-probabilities for each in one step; an entry takes some 100 bytes."""
MOST_PROMPT_LOGPROBS = 1 << 18
"""The limit for all prompts of a request; an entry takes some 200 bytes in memory and 20 on the wire."""


def check_bounds(params: SamplingParams, prompts: int) -> None:
    """Refuses parameters that exceed the limits for so many prompts. Raises InvalidParameter."""
    for name, most in LONGEST_LISTS.items():
        value = getattr(params, name)
        if value is not None and not isinstance(value, str) and len(value) > most:
            raise InvalidParameter(f"{name} has {len(value)} entries: this server takes {most} at most")
    for names, words, longest in (
        ("stop or bad_words hold", (*params.stop_strings, *(params.bad_words or ())), LONGEST_STOP),
        ("dry_sequence_breakers holds", params.dry_sequence_breakers or (), LONGEST_BREAKER),
    ):
        for word in words:
            if len(word) > longest:
                raise InvalidParameter(f"{names} a text of {len(word)} characters: at most {longest}")
    if params.n > MOST_SAMPLES:
        raise InvalidParameter(f"n is {params.n}: this server takes {MOST_SAMPLES} at most")
    sequences, reported = params.sequences, 1 + (params.logprobs or 0)
    entries = sum(len(getattr(params, name) or ()) for name in LONGEST_LISTS)
    if prompts * sequences * entries > MOST_ENTRIES:
        raise InvalidParameter(
            f"{prompts * sequences} answers with {entries} stop strings, banned words, biases and token ids each are "
            f"more than {MOST_ENTRIES}: ask for fewer answers at once"
        )
    if prompts * sequences > MOST_SEQUENCES:
        name = "n" if params.beam_width is None else "beam_width"
        raise InvalidParameter(
            f"{prompts} prompts times {name} {sequences} are {prompts * sequences} answers: this server gives "
            f"{MOST_SEQUENCES} at most to one request"
        )
    if prompts * sequences * reported > MOST_LOGPROBS:
        raise InvalidParameter(
            f"logprobs is {params.logprobs}: {prompts * sequences} answers with {reported} each are "
            f"{prompts * sequences * reported} in a step, and this server gives {MOST_LOGPROBS}: ask for fewer"
        )


def reported_by(prompt_tokens: int, params: SamplingParams) -> int:
    """Returns the number of log-probabilities that are reported for a prompt of so many tokens."""
    if params.prompt_logprobs is None:
        return 0
    return max(prompt_tokens - params.prompt_logprobs_from, 0) * (1 + params.prompt_logprobs)


def check_reported(entries: int) -> None:
    """Refuses more log-probabilities of prompts than the server can hold. Raises InvalidParameter."""
    if entries > MOST_PROMPT_LOGPROBS:
        raise InvalidParameter(
            f"prompt_logprobs asks for {entries} log-probabilities: this server gives {MOST_PROMPT_LOGPROBS} at most "
            "to one request; send fewer prompts at once, ask for fewer, or use prompt_logprobs_from"
        )


Refused = Mapping[str, tuple[tuple[object, ...], str]]
"""Fields with the values that change nothing, and the advice of the refusal."""


def check_refused(values: Mapping[str, Any], refused: Refused, place: str = "") -> None:
    """Refuses fields unless their values change nothing. Raises HttpError."""
    for name, (nothing, remedy) in refused.items():
        if values.get(name) is not None and values[name] not in nothing:
            raise HttpError(400, f"{place}{name} is {shown(values[name])}: {remedy}", param=name)
