"""Valid bodies with everything that clients nest in them: each place in them is fuzzed, beside the described fields."""

from collections.abc import Iterator
from typing import Any

from kvern.api.completions import CHAT
from kvern.api.messages import COUNT_TOKENS, MESSAGES
from kvern.api.response_items import packed_reasoning
from kvern.api.scores import SCORE
from kvern.api.text_pairs import RERANK

Path = tuple[str | int, ...]

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "f", "description": "a", "parameters": SCHEMA, "strict": True}
OFFERED: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALLED: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
CUSTOM: dict[str, Any] = {
    "type": "custom",
    "name": "code",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{1,3}"},
}
OFFERED_TEXT: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "code",
        "description": "a",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]{1,3}"}},
    },
}
CALLED_TEXT: dict[str, Any] = {"id": "d", "type": "custom", "custom": {"name": "code", "input": "a"}}
ITEMS: list[dict[str, Any]] = [
    {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", **FUNCTION, "name": "g"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "content": None},
    {"type": "reasoning", "summary": [], "encrypted_content": packed_reasoning("a")},
    {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "custom_tool_call", "call_id": "c", "name": "code", "input": "a"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "a"},
    {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "c", "output": "a"},
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "outcome": {"type": "timeout"}}]},
    {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
    {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "a"},
    {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", **FUNCTION, "name": "h"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
]
HOSTED: list[dict[str, Any]] = [
    {"type": "function", **FUNCTION},
    {"type": "namespace", "name": "n", "description": "a", "tools": [CUSTOM]},
    {"type": "mcp", "server_label": "docs"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}], "is_error": True},
    {"type": "document", "title": "a", "source": {"type": "text", "data": "a"}},
    {"type": "search_result", "title": "a", "source": "b", "content": [{"type": "text", "text": "a"}]},
]
SAID: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "a", "signature": "b"},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"city": "Oslo"}},
]
DIALOG: dict[str, Any] = {
    "system": [{"type": "text", "text": "x-anthropic-billing-header: a\nb"}],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": BLOCKS},
        {"role": "system", "content": "a"},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "developer", "content": "a"},
            {"role": "assistant", "content": None, "reasoning": "a", "tool_calls": [CALLED, CALLED_TEXT]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]},
            {"role": "tool", "tool_call_id": "d", "content": "a"},
            {"role": "user", "content": "a"},
        ],
        "tools": [OFFERED, OFFERED_TEXT],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [OFFERED, OFFERED_TEXT]}},
        "documents": [{"title": "a", "text": "b"}],
        "chat_template_kwargs": {"a": 1},
        "reasoning": {"effort": "low", "max_tokens": None},
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": ITEMS,
        "tools": HOSTED,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "n"}]},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "reasoning": {"effort": "low", "summary": "auto", "max_tokens": None, "exclude": False},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "metadata": {"a": "b"},
    },
    "/v1/conversations": {"items": ITEMS, "metadata": {"a": "b"}},
    MESSAGES: DIALOG,
    COUNT_TOKENS: DIALOG,
    f"{MESSAGES}/batches": {"requests": [{"custom_id": "a", "params": {**DIALOG, "max_tokens": 1}}]},
    "/api/chat": {
        "stream": False,
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "assistant", "thinking": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "a"},
            {"role": "user", "content": "a"},
        ],
        "tools": [OFFERED],
        "format": SCHEMA,
        "logprobs": True,
        "top_logprobs": 1,
        "think": "low",
    },
    "/api/generate": {
        "stream": False,
        "prompt": "a",
        "system": "b",
        "context": [5, 6],
        "format": "json",
        "think": False,
    },
    RERANK: {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "instruction": "d"},
    SCORE: {"context": None, "continuations": None, "text_1": ["a", {"text": "b"}], "text_2": ["c", "d"]},
}
"""Bodies by route."""


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a body below its root."""
    if path:
        yield path
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield from places(inner, (*path, step))


def replaced(value: Any, path: Path, new: object) -> Any:
    """A body with another value in one place."""
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed
