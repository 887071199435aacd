"""What Claude Code and other agents send to /v1/messages: nothing ends a session, and what is cached stays good."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvern.api.errors import HttpError
from kvern.api.messages import KNOWN, read_conversation, read_message
from kvern.api.other_names import ignored
from kvern.text.content import readable
from tests.support.served import KEY, Served, serving

MODEL = "kvern-1m"
BASH: dict[str, Any] = {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
OWN: dict[str, Any] = {
    "type": "custom",
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "input_examples": [{"city": "Oslo"}],
    "defer_loading": True,
    "eager_input_streaming": True,
}
SYSTEM = "You are an agent that helps with programs. " * 8
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(MODEL, "--threads", "1", "--max-model-len", "1024", "--dtype", "float32") as served:
        yield served


@pytest.fixture(scope="module")
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as made:
        yield made


def user(*blocks: object) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def prompt_of(claude: anthropic.Anthropic, **body: Any) -> tuple[str, str, int]:
    """What the model is given: its messages and tools as JSON texts, and how many tokens it is."""
    chat = read_conversation(body, True)
    counted = claude.messages.count_tokens(model=MODEL, **body).input_tokens
    return json.dumps(readable(chat.messages)), json.dumps(chat.use.definitions), counted


def billed(digest: str) -> list[dict[str, Any]]:
    header = f"x-anthropic-billing-header: cc_version=2.1.197.{digest}; cc_entrypoint=cli; cch={digest};"
    return [text(header), {**text(SYSTEM), "cache_control": {"type": "ephemeral"}}]


def test_the_billing_header_spoils_no_cached_prefix(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": [user(text("Hello."))], "tools": [OWN]}
    first, second = (claude.messages.create(**asked, system=billed(digest)).usage for digest in ("1a2", "fff"))
    assert first.input_tokens + first.cache_read_input_tokens == second.input_tokens + second.cache_read_input_tokens
    assert second.cache_read_input_tokens > 64 > second.input_tokens
    bare = claude.messages.create(**asked, system=SYSTEM).usage
    assert bare.input_tokens == second.input_tokens

    body = {"messages": asked["messages"], "system": billed("1a2")}
    kept, left_out = (read_conversation(body, strip).messages[0]["content"] for strip in (False, True))
    assert kept == f"{billed('1a2')[0]['text']}\n{SYSTEM}"
    assert left_out == SYSTEM
    only = read_conversation({**body, "system": billed("1a2")[:1]}, True).messages
    assert [message["role"] for message in only] == ["user"]


def test_tokens_are_counted_as_messages_use_them(claude: anthropic.Anthropic) -> None:
    called = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}}
    body: dict[str, Any] = {
        "system": billed("7"),
        "thinking": {"type": "adaptive"},
        "tools": [BASH, SEARCH, OWN],
        "messages": [
            user(text("Look.")),
            {"role": "system", "content": [text("Be brief.")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Well.", "signature": "unsigned"},
                    {"type": "redacted_thinking", "data": "x"},
                    called,
                ],
            },
            user({"type": "tool_result", "tool_use_id": "t1", "content": [text("a.py"), IMAGE]}, text("And now?")),
        ],
    }
    counted = claude.messages.count_tokens(model=MODEL, **body).input_tokens
    beta: dict[str, Any] = {
        "betas": ["interleaved-thinking-2025-05-14"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
        "output_config": {"effort": "max"},
    }
    usage = claude.beta.messages.create(model=MODEL, max_tokens=1, **body, **beta).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    enabled = {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}}  # which this model never exceeds
    raw = claude.messages.with_raw_response.create(model=MODEL, max_tokens=1, **enabled)
    assert raw.headers["x-kvern-ignored-fields"] == "thinking.budget_tokens"


def test_thinking_by_every_name() -> None:
    body: dict[str, Any] = {"max_tokens": 1, "messages": [user(text("a"))]}
    budgets: list[dict[str, Any]] = [
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"thinking_budget": 5},
        {"reasoning": {"max_tokens": 5}},
    ]
    for named in budgets:
        assert read_message(body | named, True).conversation.options.thinking_budget == 5
    asked = read_message(
        body | {"enable_thinking": False, "reasoning_effort": "low"}, True
    ).conversation.options.variables
    assert asked == {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    assert ignored({"enable_thinking": False, "include_reasoning": True}, KNOWN) == []
    hiding: list[dict[str, Any]] = [{"include_reasoning": False}, {"reasoning": {"exclude": True}}]
    for hidden in hiding:
        with pytest.raises(HttpError, match="which this API always shows"):
            read_message(body | hidden, True)


def test_tools_of_the_service_are_left_out_by_name(claude: anthropic.Anthropic) -> None:
    messages: Any = [user(text("Hello."))]
    unknown = {"type": "hologram_20300101", "name": "hologram"}
    tools: Any = [SEARCH, OWN, {"type": "mcp_toolset", "mcp_server_name": "s"}, unknown]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": messages, "tools": tools}
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "auto"}):
        raw = claude.messages.with_raw_response.create(**asked, tool_choice=choice)
        assert raw.headers["x-kvern-ignored-tools"] == "web_search, mcp_toolset, hologram"
    alone = claude.messages.create(**{**asked, "tools": [SEARCH]}, tool_choice={"type": "any"})
    assert alone.stop_reason == "max_tokens"
    with_own, bare = (
        prompt_of(claude, messages=messages, tools=tools),
        prompt_of(claude, messages=messages, tools=[OWN]),
    )
    assert with_own == bare
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10}
    memory = {"type": "memory_20250818", "name": "memory"}
    definitions = json.loads(prompt_of(claude, messages=messages, tools=[BASH, editor, memory])[1])
    assert [tool["function"]["name"] for tool in definitions] == [BASH["name"], editor["name"], memory["name"]]
    assert all(tool["function"]["description"] for tool in definitions)
    assert "rename" in definitions[2]["function"]["parameters"]["properties"]["command"]["enum"]


def test_blocks_that_are_no_text(claude: anthropic.Anthropic) -> None:
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "N"},
    }
    parts = {"type": "document", "source": {"type": "content", "content": [text("C")]}}
    found = {"type": "search_result", "title": "T", "source": "https://a", "content": [text("F")]}
    said = json.loads(prompt_of(claude, messages=[user(document, parts, found, text("Q"))])[0])
    assert said == [{"role": "user", "content": "Notes\nN\nC\nT\nhttps://a\nF\nQ"}]

    searched = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        text("Found."),
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no such file"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [text("a"), IMAGE, found]},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    history: Any = [user(text("Q")), {"role": "assistant", "content": searched}, user(*results)]
    said = json.loads(prompt_of(claude, messages=history)[0])
    assert [(message["role"], message["content"]) for message in said] == [
        ("user", "Q"),
        ("assistant", "Found."),
        ("tool", "Error: no such file"),
        ("tool", "a\n['image' left out: this model reads text only]\nT\nhttps://a\nF"),
        ("tool", ""),
    ]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    for block in (IMAGE, pdf):
        with pytest.raises(
            anthropic.BadRequestError, match=rf"messages\[0\].content\[1\] is of type '{block['type']}'"
        ):
            claude.messages.create(model=MODEL, max_tokens=1, messages=[user(text("a"), block)])  # type: ignore[list-item]
    for role, block in (("assistant", {"type": "text"}), ("user", {**results[1], "content": [{"type": "text"}]})):
        with pytest.raises(anthropic.BadRequestError, match="a block of type text whose text is None"):
            claude.messages.create(model=MODEL, max_tokens=1, messages=[{"role": role, "content": [block]}])  # type: ignore[list-item,typeddict-item]


def test_an_answer_in_json_and_why_answers_end(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [user(text("Hello."))]}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    shape = {"type": "json_schema", "schema": schema}
    for given in ({"output_config": {"format": shape}}, {"extra_body": {"output_format": shape}}):
        answer = claude.messages.create(**asked, max_tokens=40, **given)  # type: ignore[arg-type]
        assert json.loads(answer.content[0].text)["a"] in (1, 2)  # type: ignore[union-attr]
        assert answer.stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match="must be of type json_schema"):
        claude.messages.create(**asked, max_tokens=1, output_config={"format": {"type": "xml"}})  # type: ignore[typeddict-item]
    endless: dict[str, Any] = {**asked, "extra_body": {"ignore_eos": True}}
    assert claude.messages.create(**endless, max_tokens=2).stop_reason == "max_tokens"
    with claude.messages.stream(**endless, max_tokens=9000) as stream:
        names = [event.type for event in stream]
        assert stream.get_final_message().stop_reason == "model_context_window_exceeded"
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"


def test_errors_and_models_are_in_the_shape_of_anthropic(claude: anthropic.Anthropic, server: Served) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1023 maximum") as long:
        claude.messages.create(model=MODEL, max_tokens=1, messages=[user(text("word " * 1100))])
    assert isinstance(long.value.body, dict)
    assert long.value.body["error"]["type"] == "invalid_request_error"
    assert long.value.body["request_id"] == long.value.request_id is not None
    with pytest.raises(openai.BadRequestError, match="the prompt has") as same:
        server.client().completions.create(model=MODEL, prompt="word " * 1100)
    assert same.value.code == "context_length_exceeded"
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/nothing", 404, "not_found_error"),
    ):
        got, headers, body = server.raw(method, path)
        assert (got, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == headers["request-id"]
    [model] = claude.models.list().data
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == (MODEL, "model", MODEL, 1024)
    assert claude.models.retrieve(MODEL).created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.models.retrieve("claude")
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["type"] == "error"
    assert [entry.object for entry in server.client().models.list()] == ["model"]
