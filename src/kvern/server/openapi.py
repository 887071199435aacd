"""The OpenAPI 3.1 document of the server, at /openapi.json, of the operations in `operations.toml`."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from kvern.api.completions import MOST_PROMPTS
from kvern.api.fields import MOST_SEQUENCES
from kvern.api.messages import MESSAGES
from kvern.api.ollama import LINES
from kvern.api.responses import LONGEST_NAME
from kvern.api.text_pairs import MOST_PAIRS
from kvern.documentation import field_documents
from kvern.request.sampling_params import SamplingParams
from kvern.server.handlers.batches import ENDPOINTS
from kvern.server.handlers.files import MOST_ON_PAGE, OUTPUT, PURPOSES
from kvern.server.operations import JSON, Operation, read_operations
from kvern.serving.client_traces import MOST_SECONDS, MOST_STEPS
from kvern.tools.tool_format import NAME
from kvern.version import __version__

Schema = dict[str, Any]
ABOUT = (
    "Beside the parameters of each API, bodies may hold kvern's own; fields that would change an answer and are "
    "not known are refused, others ignored and named in the header x-kvern-ignored-fields."
)
REFUSALS = (400, 401, 404, 408, 413, 429, 500, 503, 507)
"""Statuses of errors that every operation with a body has."""
STORED = (404, 503, 507)
"""Statuses of errors when stored objects are read."""


def document(models: list[str], vocab_size: int, keys: bool) -> Schema:
    """Returns the OpenAPI document of a server with these models; `keys` says that it needs API keys."""
    words = Words(models, vocab_size)
    components: Schema = {"schemas": words.components}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Schema] = {}
    for route, operation in read_operations().operations.items():
        method, _, path = route.replace(":path}", "}").partition(" ")
        paths.setdefault(path, {})[method.lower()] = words.operation(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvern", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": components,
        "security": [{"key": []}] if keys else [],
    }


class Words:
    """The schemas that words stand for on a server with these models."""

    def __init__(self, models: list[str], vocab_size: int) -> None:
        self._words = read_operations()
        sampling = self._sampling()
        for_ollama = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
        unlike = [name for name in sampling if name.startswith("prompt_logprobs") or name in ("n", "logprobs")]
        self._groups = {
            "sampling": sampling,
            "response_sampling": {name: schema for name, schema in sampling.items() if name not in unlike},
            "ollama_sampling": {name: sampling[name] for name in for_ollama},
        }
        self._types = {
            **self._words.types,
            "user": {"type": "string", "maxLength": LONGEST_NAME},
            "tool_name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
            "trace_steps": {"type": "integer", "minimum": 1, "maximum": MOST_STEPS},
            "trace_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS},
            "page_size": {"type": "integer", "minimum": 1, "maximum": MOST_ON_PAGE},
            "model": one_of(*models),
            "ollama_name": one_of(*models, *(f"{name}:latest" for name in models)),
            "purpose": one_of(*PURPOSES),
            "kept_purpose": one_of(*PURPOSES, OUTPUT),
            "endpoint": one_of(*ENDPOINTS),
            "token": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
            "vector": listed(self._words.types["number"]),
        }
        some, compared = self.schema("text|[token]+"), self.schema("name|text_object")
        several = listed(some, minItems=1, maxItems=MOST_SEQUENCES)
        documents = listed(compared, minItems=1, maxItems=MOST_PAIRS)
        prompts = listed(self._types["text"], minItems=1, maxItems=MOST_PROMPTS)
        self._types |= {
            "prompts": {"anyOf": [*some["anyOf"], prompts]},
            "contexts": {"anyOf": [some, several]},
            "continuations": several,
            "documents": documents,
            "texts": {"anyOf": [compared, documents]},
        }

    def _sampling(self) -> dict[str, Schema]:
        """Returns the fields of SamplingParams that requests may have, and sets the schemas of their types."""
        template = "#/components/schemas/{name}"
        _, self.components = msgspec.json.schema_components([SamplingParams], ref_template=template)
        fields = self.components.pop("SamplingParams")["properties"]
        del self.components["StopScope"], fields["stop_scope"]  # only chats set it
        documents = field_documents(SamplingParams)
        return {name: _nullable(schema) | {"description": documents[name]} for name, schema in fields.items()}

    def schema(self, words: str) -> Schema:
        """Returns the schema of a type."""
        if words.endswith("?"):
            return optional(self.schema(words[:-1]))
        choices = re.split(r"\|(?![^\[]*\])", words)
        if len(choices) > 1:
            return {"anyOf": [self.schema(choice) for choice in choices]}
        if words.startswith("["):
            return listed(self.schema(words.rstrip("+")[1:-1]), **({"minItems": 1} if words.endswith("+") else {}))
        if words.startswith("/"):
            return one_of(*words[1:].split("/"))
        return self._types[words] if words in self._types else self.record(self._words.records[words])

    def fields(self, words: str) -> dict[str, Schema]:
        """Returns the schema of each field, required or not."""
        found: dict[str, Schema] = {}
        for word in self._spelled(words):
            name, _, kind = word.partition("=")
            found |= self._groups[name[1:]] if name.startswith("*") else {name.rstrip("!"): self.schema(kind)}
        return found

    def _spelled(self, words: str) -> Iterator[str]:
        """Yields the words, with those of `Operations.fields` in place of the names of groups."""
        for word in words.split():
            group = self._words.fields.get(word[1:]) if word.startswith("*") else None
            if group is None:
                yield word
            else:
                yield from self._spelled(group)

    def record(self, words: str) -> Schema:
        """Returns the schema of an object; fields that are not named are ignored."""
        required = [word.partition("!=")[0] for word in self._spelled(words) if "!=" in word]
        return {"type": "object", "properties": self.fields(words), "required": required}

    def operation(self, asked: Operation, path: str) -> Schema:
        """Returns an operation with its answers and errors."""
        bodies = (asked.body,) if isinstance(asked.body, str) else asked.body
        usual = REFUSALS if bodies else (401,)
        statuses = () if asked.is_open else sorted({*usual, *asked.statuses, *(STORED if asked.stored else ())})
        kind = JSON if bodies else asked.kind
        content: Schema = {kind: {"schema": self.record(asked.answer)} if asked.answer else {}}
        if asked.stream:
            content[asked.stream] = {"schema": self._stream(asked.stream)}
        text = self._types["text"]
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in re.findall(r"\{(\w+)\}", path)
        ]
        query = self.fields(asked.query)
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        refused = {str(status): self._refused(status, path) for status in statuses}
        found: Schema = {
            "summary": asked.summary,
            "parameters": parameters,
            "responses": {"200": {"description": "Done.", "content": content}, **refused},
        }
        if bodies:
            forms = [self.record(body) for body in bodies]
            schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
            found["requestBody"] = {"required": True, "content": {asked.kind: {"schema": schema}}}
        return {**found, "security": []} if asked.is_open else found

    def _stream(self, kind: str) -> Schema:
        if kind == LINES:
            return {"type": "string", "description": "One line of JSON for each part of the answer."}
        return self.record("*event") | {"description": "An event of the stream; data is JSON."}

    @functools.cache  # noqa: B019 (it lives as long as one document is made)
    def _refused(self, status: int, path: str) -> Schema:
        """Returns the answer of an error, in the format of the path's API."""
        error = "error!=openai_error"
        if path.startswith("/api/"):
            error = "error!=text"
        elif path.startswith(MESSAGES):
            error = "type!=/error error!=claude_error"
        return {"description": self._words.reasons[status], "content": {JSON: {"schema": self.record(error)}}}


def listed(items: Schema, **limits: int) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": items, **limits}


def optional(schema: Schema) -> Schema:
    """Returns the schema of an optional field; null is the same as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    """Returns the schema of one of these texts."""
    return {"type": "string", "enum": list(values)}


def _nullable(schema: Schema) -> Schema:
    schema = {name: value for name, value in schema.items() if name != "default"}
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], *([] if {"type": "null"} in schema["anyOf"] else [{"type": "null"}])]}
    return optional(schema)
