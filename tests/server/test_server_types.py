"""Values of wrong types everywhere in the bodies of all APIs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.raw_requests import CHAT, SCORE, TEXT, connect
from tests.support.served import Served

WRONG: list[Any] = [{}, {"a": 1}, [], [[]], [{}], [None], 1.5, -1, True, "", "\u0000", "x" * 100]
FIELDS: dict[str, dict[str, Any]] = {
    "/v1/batches": {"endpoint": TEXT, "input_file_id": "a", "completion_window": "24h", "metadata": {}},
    "/v1/embeddings": {"input": "a", "encoding_format": "float", "dimensions": 1, "model": "kvern-1m"},
    SCORE: {"context": "a", "continuations": ["b"], "logprobs": True, "model": "kvern-1m"},
    "/tokenize": {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tools": [], "model": "kvern-1m"},
    "/detokenize": {"tokens": [1], "model": "kvern-1m"},
    TEXT: {"prompt": "a", "max_tokens": 1, "model": "kvern-1m", "stream_options": {}, "echo": False, "suffix": "",
           "response_format": {"type": "text"}, "best_of": 1, "user": "a", "extra_body": {}, "use_beam_search": False},
    CHAT: {
        "messages": [{"role": "user", "content": "a", "tool_calls": [], "tool_call_id": "a", "name": "a"}],
        "max_tokens": 1,
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {}, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "a"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
        "chat_template_kwargs": {}, "reasoning_effort": "low", "modalities": ["text"], "logprobs": True,
        "top_logprobs": 1,
        "parallel_tool_calls": True, "include_reasoning": True, "documents": [{"text": "a"}],
        "reasoning": {"effort": "low", "enabled": True, "exclude": False}, "thinking": {"type": "enabled"},
        "add_generation_prompt": True, "continue_final_message": False, "truncate_prompt_tokens": 9,
        "truncation_side": "left", "add_special_tokens": False, "return_token_ids": True, "request_id": "a",
        "return_tokens_as_token_ids": True, "stream_interval": 2, "service_tier": "auto", "thinking_token_budget": -1,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [], "encrypted_content": "kvern1.a"},
            {"type": "custom_tool_call", "call_id": "a", "name": "a", "namespace": "a", "input": "a"},
            {"type": "local_shell_call", "call_id": "a", "action": {"command": ["a"]}},
            {"type": "tool_search_output", "call_id": "a", "tools": [{"type": "namespace", "name": "a", "tools": []}]},
        ],
        "instructions": "a", "previous_response_id": None, "max_output_tokens": 1, "metadata": {},
        "text": {"format": {}}, "tools": [
            {"type": "function", "name": "a", "parameters": {}}, {"type": "shell", "environment": {"type": "local"}},
            {"type": "namespace", "name": "a", "description": "a", "tools": [{"type": "custom", "name": "a", "format": {
                "type": "grammar", "syntax": "regex", "definition": "a"}}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]},
        "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "truncation": "disabled", "store": False, "background": False, "top_logprobs": 1, "prompt_cache_key": "a",
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 1, "system": [{"type": "text", "text": "a"}], "stop_sequences": ["a"], "metadata": {},
        "tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "a"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
    },
}  # fmt: skip


def variants(value: Any) -> Iterator[Any]:
    """The value with one part of it replaced by something of another type."""
    yield from WRONG
    if isinstance(value, dict):
        for name in value:
            yield from (value | {name: inner} for inner in variants(value[name]))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from ([*value[:index], inner, *value[index + 1 :]] for inner in variants(value[index]))


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", FIELDS)
def test_values_of_other_types(server: Served, path: str) -> None:
    """Wherever one stands, the answer says what is wrong, or does without it."""
    with connect(server) as connection:
        file = connection.makefile("rb")
        for name in FIELDS[path]:
            for value in variants(FIELDS[path][name]):
                body = json.dumps(FIELDS[path] | {name: value}).encode()
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                status = int(file.readline().split()[1])
                length = 0
                while (line := file.readline()) != b"\r\n":
                    length = int(line.split()[1]) if line.lower().startswith(b"content-length") else length
                said = file.read(length)
                assert status < 500, (body, said)
