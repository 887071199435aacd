"""The description of the API (OpenAPI 3.1)."""

from collections.abc import Mapping
from typing import Any

import msgspec

import kvern
from kvern.batch.openai_format import CHAT, COMPLETIONS, RESPONSE_FORMATS
from kvern.documentation import field_documents
from kvern.sampling_params import SamplingParams
from kvern.server import messages
from kvern.server.batches import EMBEDDINGS, ENDPOINTS, SCORE
from kvern.server.files import MOST_ON_PAGE, OUTPUT, PURPOSES
from kvern.server.service import MOST_SEQUENCES
from kvern.tools.tool_format import NAME

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
SWITCH: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
PAGE: dict[str, Schema] = {"limit": {"type": "integer", "minimum": 1, "maximum": MOST_ON_PAGE}, "after": TEXT}


def listed(items: Schema, **limits: int) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **limits}


def optional(schema: Schema) -> Schema:
    """Null is the same as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object; fields that are not named are ignored."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def one_of(*values: str) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(values)}


def sampling() -> dict[str, Schema]:
    """The fields of SamplingParams, with what is said of them."""
    described = _components()["SamplingParams"]["properties"]
    documents = field_documents(SamplingParams)
    return {name: _nullable(schema) | {"description": documents[name]} for name, schema in described.items()}


def _components() -> dict[str, Schema]:
    """SamplingParams, and the types that its fields are of."""
    return msgspec.json.schema_components([SamplingParams], ref_template="#/components/schemas/{name}")[1]


def _nullable(schema: Schema) -> Schema:
    schema = {name: value for name, value in schema.items() if name != "default"}
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], *([] if {"type": "null"} in schema["anyOf"] else [{"type": "null"}])]}
    return optional(schema)


def document(models: list[str], vocab_size: int, keys: bool) -> Schema:
    """What this server can be asked."""
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    some_text = {"anyOf": [TEXT, listed(token, minItems=1)]}
    prompt = {"anyOf": [TEXT, listed(token, minItems=1), listed(TEXT, minItems=1, maxItems=256)]}
    named = {"type": "string", "minLength": 1}
    common = {
        "model": optional(one_of(*models)),
        "priority": optional(WHOLE),
        "timeout": optional({"type": "number", "exclusiveMinimum": 0}),
        "cache_salt": optional({"type": "string", "maxLength": 256}),
    }
    streamed = {"stream": optional(SWITCH), "stream_options": optional(record({"include_usage": optional(SWITCH)}))}
    tag = record({"begin": TEXT, "schema": OBJECT, "end": TEXT}, "begin", "schema")
    shapes = {"json_schema": {"json_schema": OBJECT}, "structural_tag": {"structures": listed(tag)}}
    forms = [record({"type": one_of(name), **shapes.get(name, {})}, "type") for name in RESPONSE_FORMATS]
    shaped = {"response_format": optional({"anyOf": forms})}
    searched = {"use_beam_search": optional(SWITCH), "best_of": optional(WHOLE)}
    part = record({"type": one_of("text"), "text": TEXT}, "type", "text")
    message = record({"role": TEXT, "content": optional({"anyOf": [TEXT, listed(part)]})}, "role")
    thinks = {"chat_template_kwargs": optional(OBJECT), "thinking_budget": optional({"type": "integer", "minimum": 0})}
    name = {"type": "string", "pattern": f"^{NAME.pattern}$"}
    function = record({"name": name, "description": optional(TEXT), "parameters": optional(OBJECT)}, "name")
    tools = optional(listed(record({"type": one_of("function"), "function": function}, "type", "function")))
    flat_tools = optional(listed(record({"type": one_of("function"), **function["properties"]}, "type", "name")))
    parallel = {"parallel_tool_calls": optional(SWITCH)}
    choice = optional({"anyOf": [one_of("auto", "none", "required"), OBJECT]})
    completion_fields = {
        **sampling(),
        **common,
        **streamed,
        "prompt": prompt,
        **shaped,
        "echo": optional(SWITCH),
        **searched,
    }
    chat_fields = {
        **sampling(),
        **common,
        **streamed,
        "messages": listed(message, minItems=1),
        "tools": tools,
        "tool_choice": choice,
        **parallel,
        **thinks,
        "include_reasoning": optional(SWITCH),
        "reasoning_effort": optional(TEXT),
        **shaped,
        **searched,
        "max_completion_tokens": optional({"type": "integer", "minimum": 1}),
        "logprobs": optional(SWITCH),
        "top_logprobs": optional({"type": "integer", "minimum": 0, "maximum": 100}),
    }
    response_fields = {
        **{
            name: schema
            for name, schema in sampling().items()
            if not name.startswith("prompt_logprobs") and name not in ("n", "logprobs")
        },
        **common,
        "input": {"anyOf": [TEXT, listed(OBJECT, minItems=1)]},
        "instructions": optional(TEXT),
        "previous_response_id": optional(TEXT),
        "max_output_tokens": optional({"type": "integer", "minimum": 1}),
        "stream": optional(SWITCH),
        "background": optional(SWITCH),
        "store": optional(SWITCH),
        "metadata": optional(OBJECT),
        "tools": flat_tools,
        "tool_choice": choice,
        **parallel,
        **thinks,
        "reasoning": optional(OBJECT),
    }
    claude_message = record(
        {"role": one_of("user", "assistant"), "content": {"anyOf": [TEXT, listed(part)]}}, "role", "content"
    )
    claude_fields = {
        **common,
        "messages": listed(claude_message, minItems=1),
        "max_tokens": {"type": "integer", "minimum": 1},
        "system": optional({"anyOf": [TEXT, listed(part)]}),
        "stop_sequences": optional(listed({"type": "string", "minLength": 1}, maxItems=64)),
        "temperature": optional(NUMBER),
        "top_k": optional(WHOLE),
        "top_p": optional(NUMBER),
        "stream": optional(SWITCH),
        "tools": optional(listed(record({"name": name, "input_schema": OBJECT}, "name", "input_schema"))),
        "tool_choice": optional(record({"type": one_of("auto", "any", "tool", "none"), "name": TEXT}, "type")),
        "thinking": optional(record({"type": one_of("enabled", "disabled"), "budget_tokens": WHOLE}, "type")),
        "chat_template_kwargs": thinks["chat_template_kwargs"],
    }
    identified = record({"id": TEXT, "object": TEXT}, "id", "object")
    listing = record({"object": one_of("list"), "data": listed(OBJECT)}, "object", "data")
    answer = record(
        {"id": TEXT, "choices": listed(OBJECT), "usage": OBJECT}, "id", "object", "created", "model", "choices", "usage"
    )
    paths: dict[str, Schema] = {
        "/health": {"get": get("The process lives.", record({"status": TEXT}, "status"), open_to_all=True)},
        "/ready": {
            "get": get("The engine takes requests; 503 while it does not.", record({"ready": SWITCH}, "ready"), 503)
        },
        "/version": {"get": get("Which kvern this is.", record({"version": TEXT}, "version"))},
        "/metrics": {"get": get("Figures for Prometheus.", None, kind="text/plain")},
        "/tokenize": {
            "post": post(
                "A text, or a conversation, as token ids.",
                record(
                    {
                        "model": common["model"],
                        "prompt": optional(TEXT),
                        "add_special_tokens": optional(SWITCH),
                        "return_token_strs": optional(SWITCH),
                    }
                ),
                record({"tokens": listed(WHOLE), "count": WHOLE, "max_model_len": WHOLE}, "tokens", "count"),
            )
        },
        "/detokenize": {
            "post": post(
                "Token ids as text.",
                record(
                    {
                        "model": common["model"],
                        "tokens": optional(listed({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})),
                    }
                ),
                record({"prompt": TEXT}, "prompt"),
            )
        },
        "/v1/models": {"get": get("The names that `model` may have.", listing)},
        "/v1/models/{model}": {"get": get("One of them.", identified, 404, path=("model",))},
        "/v1/load_lora_adapter": {
            "post": post(
                "Load an adapter from a folder of the server, for keys that may.",
                record({"lora_name": named, "lora_path": named}, "lora_name", "lora_path"),
                identified,
                guarded=True,
            )
        },
        "/v1/unload_lora_adapter": {
            "post": post(
                "Let no new request use one.", record({"lora_name": named}, "lora_name"), identified, guarded=True
            )
        },
        COMPLETIONS: {"post": post("Continue a text.", record(completion_fields, "prompt"), answer, streams=True)},
        CHAT: {"post": post("Answer a conversation.", record(chat_fields, "messages"), answer, streams=True)},
        EMBEDDINGS: {
            "post": post(
                "The last token's last hidden state, for models that were trained for that.",
                record(
                    {
                        **common,
                        "input": prompt,
                        "dimensions": optional({"type": "integer", "minimum": 1}),
                        "encoding_format": optional(one_of("float", "base64")),
                    },
                    "input",
                ),
                listing,
            )
        },
        SCORE: {
            "post": post(
                "How likely continuations are after their contexts.",
                record(
                    {
                        **common,
                        "context": {"anyOf": [some_text, listed(some_text, minItems=1, maxItems=MOST_SEQUENCES)]},
                        "continuations": listed(some_text, minItems=1, maxItems=MOST_SEQUENCES),
                        "logprobs": optional(SWITCH),
                        "add_special_tokens": optional(SWITCH),
                    },
                    "context",
                    "continuations",
                ),
                record({"object": one_of("list"), "data": listed(SCORED), "usage": OBJECT}, "object", "data", "usage"),
            )
        },
        "/v1/responses": {
            "post": post(
                "Answer, remember, and go on later.", record(response_fields, "input"), identified, streams=True
            )
        },
        "/v1/responses/{response_id}": {
            "get": get("How a response stands.", identified, 404, path=("response_id",)),
            "delete": get("Forget a response.", identified, 404, path=("response_id",)),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": get("End one in the background.", identified, 400, 404, path=("response_id",))
        },
        messages.PATH: {
            "post": post(
                "Anthropic's messages.",
                record(claude_fields, "messages", "max_tokens"),
                record({"id": TEXT, "content": listed(OBJECT), "usage": OBJECT}, "id", "content", "usage"),
                streams=True,
                error=CLAUDE_ERROR,
            )
        },
        messages.COUNT_PATH: {
            "post": post(
                "Tokens of a conversation.",
                record({name: claude_fields[name] for name in ("model", "messages", "system", "tools")}, "messages"),
                record({"input_tokens": WHOLE}, "input_tokens"),
                error=CLAUDE_ERROR,
            )
        },
        "/v1/files": {
            "get": get(
                "The files of this key.",
                listing,
                400,
                404,
                503,
                507,
                query={**PAGE, "purpose": one_of(*PURPOSES, OUTPUT)},
            ),
            "post": post(
                "Upload a file.",
                record(
                    {
                        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                        "purpose": one_of(*PURPOSES),
                    },
                    "file",
                    "purpose",
                ),
                identified,
                kind="multipart/form-data",
            ),
        },
        "/v1/files/{file_id}": {
            "get": get("One of them.", identified, 404, 503, 507, path=("file_id",)),
            "delete": get("Remove it.", identified, 404, 503, 507, path=("file_id",)),
        },
        "/v1/files/{file_id}/content": {
            "get": get("What it holds.", None, 404, 503, 507, path=("file_id",), kind="application/octet-stream")
        },
        "/v1/batches": {
            "get": get(
                "The batches of this key, the newest first.",
                listing,
                400,
                404,
                503,
                507,
                query=PAGE,
            ),
            "post": post(
                "Begin a batch.",
                record(
                    {
                        "input_file_id": TEXT,
                        "endpoint": one_of(*ENDPOINTS),
                        "completion_window": one_of("24h"),
                        "metadata": optional(OBJECT),
                    },
                    "input_file_id",
                    "endpoint",
                ),
                identified,
            ),
        },
        "/v1/batches/{batch_id}": {"get": get("How a batch stands.", identified, 404, 503, 507, path=("batch_id",))},
        "/v1/batches/{batch_id}/cancel": {
            "post": get("End it, and keep what it has.", identified, 400, 404, 503, 507, path=("batch_id",))
        },
    }
    components: dict[str, Any] = {"schemas": _components()}
    del components["schemas"]["SamplingParams"]  # its fields stand in each API's body
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    about = (
        "Beside the parameters of each API, bodies may hold kvern's own; fields that are not known are ignored and "
        "named in the header x-kvern-ignored-fields."
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvern", "version": kvern.__version__, "description": about},
        "paths": paths,
        "components": components,
        "security": [{"key": []}] if keys else [],
    }


ERROR = record(
    {
        "error": record(
            {"message": TEXT, "type": TEXT, "param": optional(TEXT), "code": optional(TEXT)},
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
CLAUDE_ERROR = record(
    {"type": one_of("error"), "error": record({"type": TEXT, "message": TEXT}, "type", "message")}, "type", "error"
)
EVENT = record({"event": TEXT, "data": TEXT}, "data") | {"description": "One of the stream's events; data is JSON."}
SCORED = record(
    {
        "index": WHOLE,
        "logprob": NUMBER,
        "tokens": WHOLE,
        "is_greedy": SWITCH,
        "token_ids": listed(WHOLE),
        "token_logprobs": listed(NUMBER),
    },
    "index",
    "logprob",
    "tokens",
    "is_greedy",
)
REASONS = {
    400: "The request cannot be carried out as it is; the message says why.",
    401: "The API key is missing or unknown.",
    403: "This key may not.",
    404: "There is no such thing.",
    408: "The deadline has passed, or the body came too slowly.",
    413: "The body is too large.",
    429: "Too much at once: try again after the seconds in the header Retry-After.",
    500: "The server has a fault, or the engine died over the request twice.",
    503: "Not now.",
    507: "The server's disk is full.",
}


def get(
    summary: str,
    answer: Schema | None,
    *statuses: int,
    path: tuple[str, ...] = (),
    query: Mapping[str, Schema] | None = None,
    kind: str = "application/json",
    open_to_all: bool = False,
) -> Schema:
    """An operation without a body."""
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in path]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()]
    refusals = () if open_to_all else (401, *statuses)
    operation = {"summary": summary, "parameters": parameters, "responses": _responses(answer, kind, refusals, ERROR)}
    return {**operation, "security": []} if open_to_all else operation


def post(
    summary: str,
    body: Schema,
    answer: Schema,
    *,
    streams: bool = False,
    kind: str = "application/json",
    error: Schema = ERROR,
    guarded: bool = False,
) -> Schema:
    """An operation with a body, `guarded` if not every key may use it."""
    refusals = (400, 401, 404, 408, 413, 429, 500, 503, 507, *((403,) if guarded else ()))
    responses = _responses(answer, "application/json", refusals, error)
    if streams:
        responses["200"]["content"]["text/event-stream"] = {"schema": EVENT}
    content = {kind: {"schema": body}}
    return {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": responses}


def _responses(answer: Schema | None, kind: str, statuses: tuple[int, ...], error: Schema) -> Schema:
    done = {"description": "Done.", "content": {kind: {"schema": answer} if answer is not None else {}}}
    refused = {
        str(status): {"description": REASONS[status], "content": {"application/json": {"schema": error}}}
        for status in sorted(set(statuses))
    }
    return {"200": done, **refused}
