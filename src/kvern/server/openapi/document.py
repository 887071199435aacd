"""The OpenAPI 3.1 document of the server."""

from typing import Any

from kvern.api.completions import CHAT, COMPLETIONS
from kvern.api.messages import COUNT_TOKENS, MESSAGES
from kvern.server.batches import ENDPOINTS
from kvern.server.handlers.files import OUTPUT, PURPOSES
from kvern.server.openapi.bodies import (
    MESSAGE,
    TOOLS,
    chat_fields,
    claude_fields,
    common_fields,
    completion_fields,
    components_of_sampling,
)
from kvern.server.openapi.ollama import ollama_paths
from kvern.server.openapi.responses import conversation_paths, response_paths
from kvern.server.openapi.schemas import (
    CLAUDE_ERROR,
    IDENTIFIED,
    LISTING,
    NAMED,
    OBJECT,
    PAGE,
    SWITCH,
    TEXT,
    WHOLE,
    Schema,
    get,
    listed,
    one_of,
    optional,
    post,
    record,
)
from kvern.server.openapi.scores import score_paths
from kvern.version import __version__

ABOUT = (
    "Beside the parameters of each API, bodies may hold kvern's own; fields that would change an answer and are "
    "not known are refused, others ignored and named in the header x-kvern-ignored-fields."
)
ANSWER = record(
    {"id": TEXT, "choices": listed(OBJECT), "usage": OBJECT}, "id", "object", "created", "model", "choices", "usage"
)


ENGINE = record({"model": TEXT, "engine": TEXT, "ready": SWITCH}, "model", "engine", "ready")
"""The state of one of several engines of a model."""


def document(models: list[str], vocab_size: int, keys: bool) -> Schema:
    """Returns the OpenAPI document of a server with these models; `keys` says that it needs API keys."""
    components: dict[str, Any] = {"schemas": components_of_sampling()}
    del components["schemas"]["SamplingParams"]  # its fields are listed in each API's body
    del components["schemas"]["StopScope"]  # only chats set it
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths = {
        **_own_paths(models),
        **_model_paths(models),
        **_completion_paths(models, vocab_size),
        **score_paths(models, vocab_size),
        **response_paths(models),
        **conversation_paths(),
        **_message_paths(models),
        **ollama_paths(models),
        **_file_paths(),
        **_batch_paths(),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvern", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": components,
        "security": [{"key": []}] if keys else [],
    }


def _own_paths(models: list[str]) -> dict[str, Schema]:
    """Routes of the server itself and of its tokenizer."""
    return {
        "/health": {"get": get("The process lives.", record({"status": TEXT}, "status"), open_to_all=True)},
        "/ready": {
            "get": get(
                "An engine takes requests; 503 while none does.",
                record({"ready": SWITCH, "engines": listed(ENGINE)}, "ready"),
                503,
            )
        },
        "/ping": {
            "get": get("For load balancers: the server takes requests.", None, kind="text/plain", open_to_all=True)
        },
        "/load": {"get": get("Number of requests in flight.", record({"server_load": WHOLE}, "server_load"), 403)},
        "/version": {"get": get("The version of kvern.", record({"version": TEXT}, "version"))},
        "/metrics": {"get": get("Metrics for Prometheus.", None, kind="text/plain")},
        "/tokenize": {
            "post": post(
                "Tokenize a text or a conversation.",
                record(
                    {
                        "model": common_fields(models)["model"],
                        "prompt": optional(TEXT),
                        "messages": listed(MESSAGE, minItems=1),
                        "tools": TOOLS,
                        "add_special_tokens": optional(SWITCH),
                        "add_generation_prompt": optional(SWITCH),
                        "continue_final_message": optional(SWITCH),
                        "chat_template_kwargs": optional(OBJECT),
                        "return_token_strs": optional(SWITCH),
                    }
                ),
                record({"tokens": listed(WHOLE), "count": WHOLE, "max_model_len": WHOLE}, "tokens", "count"),
            )
        },
        "/detokenize": {
            "post": post(
                "Decode token ids.",
                record(
                    {
                        "model": common_fields(models)["model"],
                        "tokens": optional(listed({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})),
                    }
                ),
                record({"prompt": TEXT}, "prompt"),
            )
        },
    }


def _model_paths(models: list[str]) -> dict[str, Schema]:
    """Routes of models, adapters and engines."""
    model = {"model": common_fields(models)["model"]}
    of_model = {**model, "lora_name": NAMED}
    return {
        "/v1/models": {"get": get("The names that `model` may have.", LISTING)},
        "/v1/models/{model}": {"get": get("One of these models.", IDENTIFIED, 404, path=("model",))},
        "/v1/load_lora_adapter": {
            "post": post(
                "Load an adapter from a folder of the server; needs an API key with admin=1.",
                record({**of_model, "lora_path": NAMED}, "lora_name", "lora_path"),
                IDENTIFIED,
                403,
            )
        },
        "/v1/unload_lora_adapter": {
            "post": post("Refuse an adapter to new requests.", record(of_model, "lora_name"), IDENTIFIED, 403)
        },
        "/v1/add_engine": {
            "post": post(
                "Start another engine of a model; needs an API key with admin=1.", record(model), IDENTIFIED, 403
            )
        },
        "/v1/remove_engine": {
            "post": post(
                "End an engine; requests that do not end in time continue in other engines.",
                record({**model, "engine": NAMED, "grace_seconds": {"type": "number", "minimum": 0}}, "engine"),
                IDENTIFIED,
                403,
            )
        },
    }


def _completion_paths(models: list[str], vocab_size: int) -> dict[str, Schema]:
    """Routes of OpenAI's completions."""
    return {
        COMPLETIONS: {
            "post": post(
                "Continue a text.", record(completion_fields(models, vocab_size), "prompt"), ANSWER, streams=True
            )
        },
        CHAT: {"post": post("Answer a conversation.", record(chat_fields(models), "messages"), ANSWER, streams=True)},
    }


def _message_paths(models: list[str]) -> dict[str, Schema]:
    """Routes of Anthropic's messages."""
    fields = claude_fields(models)
    return {
        MESSAGES: {
            "post": post(
                "Anthropic's messages.",
                record(fields, "messages", "max_tokens"),
                record({"id": TEXT, "content": listed(OBJECT), "usage": OBJECT}, "id", "content", "usage"),
                streams=True,
                error=CLAUDE_ERROR,
            )
        },
        COUNT_TOKENS: {
            "post": post(
                "Tokens of a conversation.",
                record(
                    {
                        name: fields[name]
                        for name in ("model", "messages", "system", "tools", "tool_choice", "thinking")
                    },
                    "messages",
                ),
                record({"input_tokens": WHOLE}, "input_tokens"),
                error=CLAUDE_ERROR,
            )
        },
    }


def _file_paths() -> dict[str, Schema]:
    """Routes of files."""
    return {
        "/v1/files": {
            "get": get(
                "The files of this key.",
                LISTING,
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
                IDENTIFIED,
                kind="multipart/form-data",
            ),
        },
        "/v1/files/{file_id}": {
            "get": get("A file.", IDENTIFIED, 404, 503, 507, path=("file_id",)),
            "delete": get("Delete a file.", IDENTIFIED, 404, 503, 507, path=("file_id",)),
        },
        "/v1/files/{file_id}/content": {
            "get": get(
                "The content of a file.", None, 404, 503, 507, path=("file_id",), kind="application/octet-stream"
            )
        },
    }


def _batch_paths() -> dict[str, Schema]:
    """Routes of batches."""
    return {
        "/v1/batches": {
            "get": get(
                "The batches of this key, newest first.",
                LISTING,
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
                IDENTIFIED,
            ),
        },
        "/v1/batches/{batch_id}": {
            "get": get("A batch with its state.", IDENTIFIED, 404, 503, 507, path=("batch_id",))
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": get("End a batch and keep its answers.", IDENTIFIED, 400, 404, 503, 507, path=("batch_id",))
        },
    }
