"""The OpenAPI description of ollama's routes."""

from kvern.api.ollama import CHAT, GENERATE, LINES
from kvern.server.openapi.bodies import MESSAGE, TOOLS, sampling
from kvern.server.openapi.schemas import (
    NUMBER,
    OBJECT,
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

ERROR = record({"error": TEXT}, "error")
VECTOR = listed(NUMBER)
LISTING = record({"models": listed(record({"model": TEXT, "name": TEXT}, "model", "name"))}, "models")
REFUSED = "Refused: models are chosen when the server starts."


def ollama_paths(models: list[str]) -> dict[str, Schema]:
    """Returns all of ollama's routes."""
    named: dict[str, Schema] = {"model": optional(one_of(*models, *(f"{name}:latest" for name in models)))}
    embedded = {**named, "dimensions": optional({"type": "integer", "minimum": 1}), "options": optional(OBJECT)}
    embedded["truncate"] = optional(SWITCH)
    several: Schema = {"anyOf": [TEXT, listed(TEXT, minItems=1)]}
    return {
        CHAT: {"post": _answer("Answer a conversation.", {**_fields(), **named, **_of_chat()}, "message")},
        GENERATE: {"post": _answer("Answer a text.", {**_fields(), **named, **_of_generate()}, "response")},
        "/api/embed": {
            "post": _post(
                "Embeddings of texts.", record({**embedded, "input": several}, "input"), {"embeddings": listed(VECTOR)}
            )
        },
        "/api/embeddings": {
            "post": _post(
                "The embedding of a text.", record({**embedded, "prompt": TEXT}, "prompt"), {"embedding": VECTOR}
            )
        },
        "/api/tags": {"get": get("The models, as ollama lists them.", LISTING, error=ERROR)},
        "/api/ps": {"get": get("The models in memory, which are all models.", LISTING, error=ERROR)},
        "/api/show": {"post": _post("Details of a model.", record(named), {"details": OBJECT, "model_info": OBJECT})},
        "/api/version": {"get": get("The version of ollama's API.", record({"version": TEXT}, "version"), error=ERROR)},
        **{
            f"/api/{name}": {"post": get(REFUSED, None, 403, error=ERROR)}
            for name in ("pull", "push", "create", "copy")
        },
        "/api/delete": {"delete": get(REFUSED, None, 403, error=ERROR)},
    }


def _post(summary: str, body: Schema, answer: dict[str, Schema]) -> Schema:
    return post(summary, body, record(answer, *answer), error=ERROR)


def _answer(summary: str, fields: dict[str, Schema], said: str) -> Schema:
    answer = record({said: {}, "done": SWITCH, "done_reason": TEXT}, said, "done")
    operation = post(summary, record(fields), answer, error=ERROR)
    operation["responses"]["200"]["content"][LINES] = {
        "schema": {"type": "string", "description": "One line of JSON for each part of the answer."}
    }
    return operation


def _fields() -> dict[str, Schema]:
    options = {name: sampling()[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")}
    more = {"num_predict": optional(WHOLE), "repeat_penalty": optional(NUMBER)}
    return {
        "stream": optional(SWITCH),
        "options": optional(record({**options, **more})),
        "format": optional({"anyOf": [one_of("json"), OBJECT]}),
        "think": optional({"anyOf": [SWITCH, one_of("low", "medium", "high")]}),
        "logprobs": optional(SWITCH),
        "top_logprobs": optional({"type": "integer", "minimum": 0, "maximum": 100}),
        "keep_alive": {},
    }


def _of_chat() -> dict[str, Schema]:
    return {"messages": optional(listed(MESSAGE)), "tools": TOOLS}


def _of_generate() -> dict[str, Schema]:
    texts = ("prompt", "system")
    return {**{name: optional(TEXT) for name in texts}, "raw": optional(SWITCH), "context": optional(listed(WHOLE))}
