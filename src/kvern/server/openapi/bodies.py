"""Schemas of request bodies: the fields of each API."""

import msgspec

from kvern.api.completions import MOST_PROMPTS
from kvern.api.forms import RESPONSE_FORMATS
from kvern.api.responses import LONGEST_NAME, NAMES
from kvern.documentation import field_documents
from kvern.request.sampling_params import SamplingParams
from kvern.server.openapi.schemas import (
    NUMBER,
    OBJECT,
    SWITCH,
    TEXT,
    WHOLE,
    Schema,
    listed,
    one_of,
    optional,
    record,
)
from kvern.tools.tool_format import NAME

STREAMED: Schema = {
    "stream": optional(SWITCH),
    "stream_options": optional(record({"include_usage": optional(SWITCH), "continuous_usage_stats": optional(SWITCH)})),
}
PROMPTED: Schema = {
    "truncate_prompt_tokens": optional(WHOLE),
    "truncation_side": optional(one_of("left", "right")),
    "add_special_tokens": optional(SWITCH),
}
SHOWN: Schema = {
    "return_token_ids": optional(SWITCH),
    "return_tokens_as_token_ids": optional(SWITCH),
    "request_id": optional({"type": "string", "minLength": 1, "maxLength": 128}),
    "stream_interval": optional(WHOLE),
}
_TAG = record({"begin": TEXT, "schema": OBJECT, "end": TEXT}, "begin", "schema")
_SHAPES: dict[str, Schema] = {"json_schema": {"json_schema": OBJECT}, "structural_tag": {"structures": listed(_TAG)}}
_FORMS = [record({"type": one_of(name), **_SHAPES.get(name, {})}, "type") for name in RESPONSE_FORMATS]
SHAPED: Schema = {"response_format": optional({"anyOf": _FORMS})}
SEARCHED: Schema = {"use_beam_search": optional(SWITCH), "best_of": optional(WHOLE)}
PART = record({"type": one_of("text"), "text": TEXT}, "type", "text")
MESSAGE = record({"role": TEXT, "content": optional({"anyOf": [TEXT, listed(PART)]})}, "role")
_BLOCK: Schema = {"anyOf": [PART, record({"type": {"type": "string", "not": {"enum": ["text"]}}}, "type")]}
"""A text block, or a block of any other type."""
CLAUDE_MESSAGE = record(
    {"role": one_of("user", "assistant", "system"), "content": {"anyOf": [TEXT, listed(_BLOCK)]}}, "role", "content"
)
FITTING = record({"type": one_of("json_schema"), "schema": OBJECT}, "type", "schema")
THINKS: Schema = {
    "chat_template_kwargs": optional(OBJECT),
    "thinking_budget": optional({"type": "integer", "minimum": 0}),
    "thinking_token_budget": optional({"type": "integer", "minimum": -1}),
    "enable_thinking": optional(SWITCH),
    "thinking": optional(record({"type": one_of("enabled", "disabled", "adaptive")}, "type")),
    "reasoning": optional(record({"effort": optional(TEXT), "enabled": optional(SWITCH), "exclude": optional(SWITCH)})),
    "include_reasoning": optional(SWITCH),
    "reasoning_effort": optional(TEXT),
    "documents": optional(listed(OBJECT)),
}
TOOL_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
FUNCTION = record({"name": TOOL_NAME, "description": optional(TEXT), "parameters": optional(OBJECT)}, "name")
TOOLS = optional(listed(record({"type": one_of("function"), "function": FUNCTION}, "type", "function")))
_FLAT = record({"type": one_of("function"), **FUNCTION["properties"]}, "type", "name")
FLAT_TOOLS = optional(listed({"anyOf": [_FLAT, record({"type": TEXT}, "type")]}))
"""Functions, and tools of any other type."""
PARALLEL: Schema = {"parallel_tool_calls": optional(SWITCH)}
CHOICE = optional({"anyOf": [one_of("auto", "none", "required"), OBJECT]})


def sampling() -> dict[str, Schema]:
    """Returns the fields of SamplingParams that requests may have, with their descriptions."""
    described = components_of_sampling()["SamplingParams"]["properties"]
    del described["stop_scope"]
    documents = field_documents(SamplingParams)
    return {name: _nullable(schema) | {"description": documents[name]} for name, schema in described.items()}


def components_of_sampling() -> dict[str, Schema]:
    """Returns the schemas of SamplingParams and of the types of its fields."""
    return msgspec.json.schema_components([SamplingParams], ref_template="#/components/schemas/{name}")[1]


def _nullable(schema: Schema) -> Schema:
    schema = {name: value for name, value in schema.items() if name != "default"}
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], *([] if {"type": "null"} in schema["anyOf"] else [{"type": "null"}])]}
    return optional(schema)


def token_of(vocab_size: int) -> Schema:
    """Returns the schema of a token id."""
    return {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}


def prompts(vocab_size: int) -> Schema:
    """Returns the schema of one or several prompts."""
    return {"anyOf": [TEXT, listed(token_of(vocab_size), minItems=1), listed(TEXT, minItems=1, maxItems=MOST_PROMPTS)]}


def common_fields(models: list[str]) -> Schema:
    """Returns the fields of every API."""
    return {
        "model": optional(one_of(*models)),
        "priority": optional(WHOLE),
        "timeout": optional({"type": "number", "exclusiveMinimum": 0}),
        "cache_salt": optional({"type": "string", "maxLength": 256}),
    }


def completion_fields(models: list[str], vocab_size: int) -> Schema:
    """Returns the fields of /v1/completions."""
    return {
        **sampling(),
        **common_fields(models),
        **STREAMED,
        "prompt": prompts(vocab_size),
        **SHAPED,
        "echo": optional(SWITCH),
        **SEARCHED,
        **PROMPTED,
        **SHOWN,
    }


def chat_fields(models: list[str]) -> Schema:
    """Returns the fields of /v1/chat/completions."""
    return {
        **sampling(),
        **common_fields(models),
        **STREAMED,
        "messages": listed(MESSAGE, minItems=1),
        "tools": TOOLS,
        "tool_choice": CHOICE,
        **PARALLEL,
        **THINKS,
        "add_generation_prompt": optional(SWITCH),
        "continue_final_message": optional(SWITCH),
        "prediction": optional(
            record({"type": one_of("content"), "content": {"anyOf": [TEXT, listed(PART)]}}, "type", "content")
        ),
        "echo": optional(SWITCH),
        **PROMPTED,
        **SHOWN,
        **SHAPED,
        **SEARCHED,
        "max_completion_tokens": optional({"type": "integer", "minimum": 1}),
        "logprobs": optional(SWITCH),
        "top_logprobs": optional({"type": "integer", "minimum": 0, "maximum": 100}),
    }


def response_fields(models: list[str]) -> Schema:
    """Returns the fields of /v1/responses."""
    return {
        **{
            name: schema
            for name, schema in sampling().items()
            if not name.startswith("prompt_logprobs") and name not in ("n", "logprobs")
        },
        **common_fields(models),
        "input": {"anyOf": [TEXT, listed(OBJECT, minItems=1)]},
        "instructions": optional(TEXT),
        "previous_response_id": optional(TEXT),
        "conversation": optional({"anyOf": [TEXT, record({"id": TEXT}, "id")]}),
        "max_output_tokens": optional({"type": "integer", "minimum": 1}),
        "stream": optional(SWITCH),
        "background": optional(SWITCH),
        "store": optional(SWITCH),
        "metadata": optional(OBJECT),
        **{name: optional({"type": "string", "maxLength": LONGEST_NAME}) for name in NAMES},
        "include": optional(listed(TEXT)),
        "text": optional(OBJECT),
        "top_logprobs": optional({"type": "integer", "minimum": 0, "maximum": 100}),
        "truncation": optional(one_of("auto", "disabled")),
        "max_tool_calls": optional(WHOLE),
        "tools": FLAT_TOOLS,
        "tool_choice": CHOICE,
        **PARALLEL,
        **THINKS,
    }


def claude_fields(models: list[str]) -> Schema:
    """Returns the fields of /v1/messages."""
    return {
        **common_fields(models),
        "messages": listed(CLAUDE_MESSAGE, minItems=1),
        "max_tokens": {"type": "integer", "minimum": 1},
        "system": optional({"anyOf": [TEXT, listed(PART)]}),
        "stop_sequences": optional(listed({"type": "string", "minLength": 1}, maxItems=64)),
        "temperature": optional(NUMBER),
        "top_k": optional(WHOLE),
        "top_p": optional(NUMBER),
        "stream": optional(SWITCH),
        "tools": optional(listed(record({"name": TOOL_NAME, "input_schema": OBJECT}, "name", "input_schema"))),
        "tool_choice": optional(record({"type": one_of("auto", "any", "tool", "none"), "name": TEXT}, "type")),
        "thinking": optional(
            record({"type": one_of("enabled", "adaptive", "disabled"), "budget_tokens": WHOLE}, "type")
        ),
        "output_config": optional(record({"effort": optional(TEXT), "format": optional(FITTING)})),
        "chat_template_kwargs": THINKS["chat_template_kwargs"],
    }
