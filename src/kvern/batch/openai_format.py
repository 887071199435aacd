"""Rows in the format of OpenAI's batch API, for /v1/chat/completions and /v1/completions.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}
    out  {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

Beside OpenAI's own parameters a body may hold every field of ``SamplingParams``. What would change the answer and is
not understood is refused by name.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.batch.chat_body import CHAT_FIELDS, assistant_message, finish_reason, read_chat_body
from kvern.batch.requests import BatchRequest, sampling_params, split_prompt
from kvern.errors import InvalidParameter, InvalidRequest, shown
from kvern.json_work import is_too_much
from kvern.sampling_params import SamplingParams
from kvern.structured.tags import StructuralTag, structural_tags

if TYPE_CHECKING:
    from kvern.outputs import CompletionOutput, RequestOutput
    from kvern.tools.chat import ChatRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's earlier names of what `structured` holds."""
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
STRUCTURED = {"response_format", "structured_outputs", *GUIDED}
# fmt: off
OWN_FIELDS = {
    "prompt", "max_completion_tokens", "top_logprobs", "logprobs", "use_beam_search", *STRUCTURED, *CHAT_FIELDS
}
# fmt: on
# Fields that are accepted with the value that asks for nothing special.
ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
}


def is_openai_row(values: Mapping[str, Any]) -> bool:
    return "custom_id" in values and "url" in values and "body" in values


def read_openai_row(
    values: Mapping[str, Any], defaults: SamplingParams, model: str, created: int, adapters: Collection[str] = ()
) -> BatchRequest:
    """Return the request of a row in OpenAI's format.

    ``model`` and ``created`` (seconds since 1970) appear in the answer. A body whose model is one of the ``adapters``
    is answered by that one.

    Raises:
        InvalidRequest, InvalidParameter: the row is malformed or asks for what kvern does not do.
    """
    url, body, custom_id = values["url"], values["body"], values["custom_id"]
    if not isinstance(custom_id, str):
        raise InvalidRequest(f"custom_id is {shown(custom_id)}: it must be a text")
    if values.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {shown(values['method'])}: it must be POST")
    if url not in (CHAT, COMPLETIONS):
        raise InvalidRequest(f"url is {shown(url)}: it must be {CHAT} or {COMPLETIONS}")
    if not isinstance(body, dict):
        raise InvalidRequest(f"body must be an object, got {type(body).__name__}")
    check_fields(body)
    name = "messages" if url == CHAT else "prompt"
    if body.get(name) is None:
        raise InvalidRequest(f"body has no {name}, which {url} needs")
    prompt, messages = split_prompt(body[name], name)
    if (messages is None) == (url == CHAT):
        raise InvalidRequest(f"body has a {name} that {url} does not take: {shown(body[name])}")
    chat = read_chat_body(body) if url == CHAT else None
    params = sampling_params(defaults, parameters(body, url))
    named = body.get("model")
    adapter = named if isinstance(named, str) and named in adapters else None
    answer = functools.partial(
        openai_answer,
        custom_id=custom_id,
        model=adapter or model,
        created=created,
        include_reasoning=chat is None or chat.include_reasoning,
    )
    return BatchRequest(prompt, chat, params, answer, adapter)


def check_fields(body: Mapping[str, Any]) -> None:
    known = WITHOUT_EFFECT | OWN_FIELDS | set(ONLY_VALUES) | set(SamplingParams.__struct_fields__)
    for name, value in body.items():
        if name in ONLY_VALUES and not (name == "best_of" and body.get("use_beam_search")):
            if value not in ONLY_VALUES[name]:
                raise InvalidParameter(f"{name} is {shown(value)}: a batch does not support that; leave it out")
        elif name not in known:
            raise InvalidParameter(f"unknown field {name!r} in body: leave it out")


def parameters(body: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the body's sampling parameters under kvern's names."""
    found = {name: body[name] for name in SamplingParams.__struct_fields__ if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        found["max_tokens"] = body["max_completion_tokens"]
    structured = structured_of(body)
    if structured is not None:
        found["structured"] = structured
    searching = body.get("use_beam_search")
    if searching is not None and not isinstance(searching, bool):
        raise InvalidParameter(f"use_beam_search is {shown(searching)}: it must be true or false")
    if searching:
        found.setdefault("beam_width", body.get("best_of") or body.get("n") or 1)
    if url == CHAT:
        wanted = found.pop("logprobs", False)
        if not isinstance(wanted, bool):
            raise InvalidParameter(
                f"logprobs is {shown(wanted)}: {CHAT} takes true or false, and top_logprobs a number"
            )
        if wanted:
            found["logprobs"] = body.get("top_logprobs") or 0
    return found


def structured_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a body asks of the form of its answer, under any of the names that clients use. Raises InvalidParameter."""
    asked: dict[str, dict[str, Any]] = {}
    shape = body.get("response_format")
    if shape is not None:
        found = response_format(shape)
        if found is not None:
            asked["response_format"] = found
    for name, ours in GUIDED.items():
        if body.get(name) is not None:
            asked[name] = {ours: _schema(name, body[name]) if ours == "json" else body[name]}
    for name in ("structured_outputs", "structured"):
        if body.get(name) is not None:
            if not isinstance(body[name], dict):
                raise InvalidParameter(f"{name} is {shown(body[name])}: it must be an object")
            asked[name] = {key: value for key, value in body[name].items() if value is not None}
    if len(asked) > 1:
        raise InvalidParameter(f"{' and '.join(asked)} are set: give one of them")
    return next(iter(asked.values()), None)


def _schema(name: str, value: object) -> object:
    """A schema that may come as JSON text."""
    if not isinstance(value, str):
        return value
    if is_too_much(value.encode(errors="replace")):
        raise InvalidParameter(f"{name} holds more values than fit in one request: send a smaller schema")
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(f"{name} is not valid JSON: {error}") from error


def response_format(value: object) -> dict[str, Any] | None:
    """OpenAI's form, of chat completions or of responses: the schema stands under `json_schema`, or beside the type."""
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
    if kind == "json_object":
        return {"json": True}
    held = value.get("json_schema", value)
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidParameter("response_format of type json_schema needs a schema: an object under json_schema.schema")
    return {"json": schema}


def openai_answer(
    output: RequestOutput,
    chat: ChatRequest | None,
    *,
    custom_id: str,
    model: str,
    created: int,
    include_reasoning: bool,
) -> dict[str, Any]:
    """Return the output row. Its ids derive from the row, so that a resumed job writes the same ones."""
    key = hashlib.sha256(f"{custom_id}/{output.request_id}".encode()).hexdigest()[:24]
    choices = [
        text_choice(item) if chat is None else chat_choice(item, chat, include_reasoning) for item in output.outputs
    ]
    generated = sum(len(item.token_ids) for item in output.outputs)
    prompt = len(output.prompt_token_ids)
    body = {
        "id": f"{'cmpl' if chat is None else 'chatcmpl'}-{key}",
        "object": "text_completion" if chat is None else "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    response = {"status_code": 200, "request_id": key, "body": body}
    return {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": None}


def chat_choice(completion: CompletionOutput, chat: ChatRequest, include_reasoning: bool) -> dict[str, Any]:
    message = chat.message(completion.text)
    return {
        "index": completion.index,
        "message": assistant_message(message, include_reasoning),
        "logprobs": chat_logprobs(completion),
        "finish_reason": finish_reason(completion, message),
    }


def text_choice(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": completion.index,
        "text": completion.text,
        "logprobs": text_logprobs(completion),
        "finish_reason": completion.finish_reason,
    }


def chat_logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = []
    for token_id, table in zip(completion.token_ids, completion.logprobs, strict=True):
        entries = {
            candidate: {
                "token": entry.token or "",
                "logprob": finite(entry.logprob),
                "bytes": None if "\ufffd" in (entry.token or "") else list((entry.token or "").encode()),
            }
            for candidate, entry in table.items()
        }
        content.append({**entries[token_id], "top_logprobs": list(entries.values())})
    return {"content": content}


def text_logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
    tokens = [table[token_id].token or "" for token_id, table in pairs]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(table[token_id].logprob) for token_id, table in pairs],
        "top_logprobs": [{entry.token or "": finite(entry.logprob) for entry in table.values()} for _, table in pairs],
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that could not be sampled."""
    return logprob if math.isfinite(logprob) else -9999.0
