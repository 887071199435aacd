"""Items and tools of /v1/responses: what clients send, and what they are told."""

import json
import re
import typing
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseError, ResponseInputItemParam, ResponseStreamEvent
from pydantic import TypeAdapter

from kvern.api.conversation import plain_messages
from kvern.api.errors import HttpError
from kvern.api.other_names import ignored
from kvern.api.response_items import (
    CALLS,
    MOST_BYTES,
    PASSED_OVER,
    input_messages,
    kept_items,
    opened_reasoning,
    packed_reasoning,
)
from kvern.api.response_items import OUTPUTS as OUTPUT_KINDS
from kvern.api.response_output import OutputItems
from kvern.api.responses import KNOWN, fail, read_response
from kvern.errors import InvalidRequest
from kvern.request.pieces import Arguments, CallBegins, Content, Piece, Reasoning
from kvern.text.content import readable
from kvern.text.message_forms import UNPARSED
from tests.support.served import QUESTION, Served

RESPONSE: dict[str, Any] = {"id": f"resp_{'0' * 32}", "tools": [], "include": [], "reasoning": {"summary": None}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = 'A "quoted" \\ line\nand \u00e9\U0001f600 after'
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}
CODE: dict[str, Any] = {
    "type": "custom",
    "name": "code",
    "description": "Runs code.",
    "format": {"type": "grammar", "syntax": "regex", "definition": '[0-9]{2} "\\+" [0-9]{2}'},
}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{**WEATHER, "name": "find"}, {**CODE, "name": "note"}],
}


@pytest.fixture(scope="module")
def server(talking_server: Served) -> Served:
    return talking_server


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client()


def told(pieces: list[Piece], status: str = "completed", **response: Any) -> tuple[list[Any], list[Any]]:
    """The items and the events of an answer, each of which has the form that clients know."""
    items = OutputItems({**RESPONSE, **response})
    events = [event for piece in pieces for event in items.add([piece])] + items.end(status)
    for number, (kind, fields) in enumerate(events):
        EVENT.validate_python({"type": kind, "sequence_number": number, **json.loads(json.dumps(fields))}, strict=False)
    return items.items, events


def called(name: str, arguments: str) -> list[Piece]:
    return [CallBegins(0, "call_1", name), *(Arguments(0, character) for character in arguments)]


# What the model says


@pytest.mark.parametrize("arguments", [json.dumps({"input": TEXT}), json.dumps({"input": TEXT}, ensure_ascii=False)])
def test_the_text_of_a_custom_call_wherever_it_is_cut(arguments: str) -> None:
    for cut in range(len(arguments)):
        pieces: list[Piece] = [CallBegins(0, "call_1", "code"), Arguments(0, arguments[:cut])]
        [item], events = told([*pieces, Arguments(0, arguments[cut:])], tools=[CODE])
        deltas = [fields["delta"] for kind, fields in events if kind == "response.custom_tool_call_input.delta"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "code", TEXT)
        assert "".join(deltas) == TEXT


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (r'{"input": "\ud800x\udc00 \x \uZZ"}', r"?x? \x \uZZ"),
        ('{"input": "cut \\u00', "cut "),
        ('{"code": "1"}', '{"code": "1"}'),
        ("{}", "{}"),
        ("", ""),
        ('{"input": "a\nb"}', "a\nb"),
    ],
)
def test_custom_calls_that_are_no_good_json(arguments: str, text: str) -> None:
    [item], _ = told(called("code", arguments), tools=[CODE])
    assert item["input"] == text


FIXED_TOOLS: list[dict[str, Any]] = [
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]
FIXED_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("local_shell", {"command": ["ls", "-l"], "env": {"A": "b"}}, "action"),
    ("shell", {"commands": ["ls"], "timeout_ms": 5}, "action"),
    ("apply_patch", {"type": "update_file", "path": "a", "diff": "+a"}, "operation"),
    ("tool_search", {"query": "mail"}, "arguments"),
]


@pytest.mark.parametrize(("name", "arguments", "holder"), FIXED_CALLS, ids=[call[0] for call in FIXED_CALLS])
def test_calls_with_items_of_their_own(name: str, arguments: dict[str, Any], holder: str) -> None:
    """And back as the call that the model has written."""
    [item], _ = told(called(name, json.dumps(arguments)), tools=FIXED_TOOLS)
    assert item["type"] == f"{name}_call"
    assert item[holder].items() >= arguments.items()
    [message] = input_messages([json.loads(json.dumps(item))])
    [call] = message["tool_calls"]
    assert (call["id"], call["function"]["name"]) == (item["call_id"], name)
    assert call["function"]["arguments"].items() >= arguments.items()
    [cut], _ = told(called(name, json.dumps(arguments)[:-3]), "incomplete", tools=FIXED_TOOLS)
    assert (cut["type"], cut["name"], cut["status"]) == ("function_call", name, "incomplete")


def test_thinking_is_summed_up_and_packed_if_that_is_wanted() -> None:
    pieces: list[Piece] = [Reasoning("Let me "), Reasoning("see."), Content("Yes.")]
    (thought, said), events = told(
        pieces, include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}, id=f"resp_{'a' * 32}"
    )
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert thought["summary"] == [{"type": "summary_text", "text": "Let me see."}]
    deltas = [fields["delta"] for kind, fields in events if kind == "response.reasoning_summary_text.delta"]
    assert deltas == ["Let me ", "see."]
    only_packed = {"type": "reasoning", "id": "a", "summary": [], "encrypted_content": thought["encrypted_content"]}
    [message] = input_messages([only_packed, said])
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}


# What clients send

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]}
IMAGE = {"type": "input_image", "image_url": "data:,"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
PASSED: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "a", "status": "completed"},
    {"type": "mcp_list_tools", "id": "a", "server_label": "a", "tools": []},
    {"type": "tool_search_call", "arguments": {}, "execution": "server"},
    {"type": "compaction", "encrypted_content": "gAAA"},
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAforeign"},
    {"type": "reasoning", "summary": [], "encrypted_content": "kvern1.????"},
]


def test_what_is_kept_still_belongs_to_its_call() -> None:
    output = {"type": "local_shell_call_output", "id": "c", "output": "a"}
    assert input_messages(kept_items([output])) == input_messages([output])


def test_thinking_by_every_name() -> None:
    for named in ({"thinking_token_budget": 5}, {"reasoning": {"max_tokens": 5}}, {"thinking_budget": 5}):
        assert read_response({"input": "a", **named}, "m", []).conversation.options.thinking_budget == 5
    off: list[dict[str, Any]] = [{"enable_thinking": False}, {"reasoning": {"effort": "none"}}, {"thinking": False}]
    for named in off:
        assert (
            read_response({"input": "a", **named}, "m", []).conversation.options.variables["enable_thinking"] is False
        )
    hidden = read_response({"input": "a", "reasoning": {"exclude": True, "effort": "low"}}, "m", [])
    assert hidden.response["reasoning"] == {"effort": "low", "summary": None, "exclude": True}
    items, _ = told([Reasoning("Hm."), Content("Yes.")], reasoning=hidden.response["reasoning"])
    assert [item["type"] for item in items] == ["message"]
    assert not ignored({"reasoning_effort": "low", "include_reasoning": False, "input": "a"}, KNOWN)


def test_what_went_wrong_has_a_code() -> None:
    for error, code in (
        (InvalidRequest("the prompt is too long"), "invalid_prompt"),
        (HttpError(429, "wait"), "rate_limit_exceeded"),
        (HttpError(500, "a fault"), "server_error"),
    ):
        response = {"status": "in_progress"}
        fail(response, error)
        assert ResponseError.model_validate(response["error"]).code == code


def test_a_turn_of_the_assistant_is_one_message() -> None:
    items = [THOUGHT, MESSAGE, {**THOUGHT, "content": [{"type": "reasoning_text", "text": "long"}]}, CALL, *PASSED]
    [message] = input_messages(items)
    assert (message["content"], message["reasoning_content"]) == ("Hm.", "short\nlong")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    first, _, last = input_messages([CALL, MESSAGE, {"role": "user", "content": "a"}, THOUGHT])
    assert (first["content"], last["reasoning_content"]) == ("Hm.", "short")


OUTPUTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "function_call_output", "output": [{"type": "input_text", "text": "a"}, IMAGE]},
     "a\n[an image, which this model cannot read]"),
    ({"type": "custom_tool_call_output", "output": "a"}, "a"),
    ({"type": "local_shell_call_output", "call_id": None, "id": "c", "output": "a"}, "a"),
    ({"type": "shell_call_output", "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "timeout"}}]},
     '[{"stdout":"a","stderr":"","outcome":{"type":"timeout"}}]'),
    ({"type": "apply_patch_call_output", "status": "failed", "output": "no file"}, "failed\nno file"),
    ({"type": "tool_search_output", "tools": [SPACE]}, "Tools that can be called now: crm.find, crm.note"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "text"), OUTPUTS, ids=[output["type"] for output, _ in OUTPUTS])
def test_outputs_of_tools(item: dict[str, Any], text: str) -> None:
    found = readable(input_messages([{"call_id": "c", **item}]))
    assert found == [{"role": "tool", "content": text, "tool_call_id": "c"}]


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    [message] = input_messages([{**CALL, "namespace": "crm", "arguments": '{"city": "Os'}])
    assert message["tool_calls"][0]["function"] == {"name": "crm.f", "arguments": '{"city": "Os'}
    assert plain_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == {UNPARSED: '{"city": "Os'}


BAD: list[tuple[Any, str]] = [
    ([{"role": "user", "content": [IMAGE]}], "a content part is of type 'input_image': this model takes text"),
    ([{"type": "item_reference", "id": "msg_1"}], r"input\[0\] refers to the item 'msg_1', which is not stored"),
    ([{"type": "hologram"}], r"input\[0\] of type 'hologram' is not understood"),
    ([{"type": ["message"]}], r"input\[0\].type is \['message'\]"),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "f"}], r"input\[0\].input is None"),
    ([{"type": "shell_call", "call_id": "c", "action": 1}], r"input\[0\].action is 1"),
    ([{"type": "function_call_output", "call_id": "c", "output": 1}], r"input\[0\].output is 1"),
    ([{"type": "reasoning", "content": 1}], r"input\[0\].content is 1"),
]


@pytest.mark.parametrize(("value", "said"), BAD, ids=range(len(BAD)))
def test_bad_items_name_the_place(value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        readable(input_messages(value))


def test_every_type_of_item_is_known() -> None:
    hints = [typing.get_type_hints(item).get("type") for item in typing.get_args(ResponseInputItemParam)]
    kinds = {kind for hint in hints for part in (hint, *typing.get_args(hint)) for kind in typing.get_args(part)}
    assert {kind for kind in kinds if isinstance(kind, str)} == {
        *CALLS, *OUTPUT_KINDS, *PASSED_OVER, "message", "reasoning", "item_reference",
    }  # fmt: skip


def test_packed_thinking_cannot_grow_without_bound() -> None:
    small, large, larger = (packed_reasoning("a" * size) for size in (9, 3 << 20, 5 << 20))
    torn, asked = large[:-9] + "a" * 9, {"role": "user", "content": "a"}
    for packed, opened in (([large, large], [True, False]), ([larger, small], [False] * 2), ([torn] * 2, [False] * 2)):
        items = [({"type": "reasoning", "encrypted_content": text}, MESSAGE, asked) for text in packed]
        said = input_messages([item for turn in items for item in turn])[::2]
        assert ["reasoning_content" in message for message in said] == opened
    text, size = opened_reasoning(torn, MOST_BYTES)
    assert text is None and size > 3 << 20, "what was unpacked in vain counts, too"


# Through the real client


def checked(events: Any) -> tuple[Response, list[Any]]:
    """The last response of a stream, all of whose events have the form that clients know."""
    every = [event.to_dict() for event in events]
    for number, event in enumerate(every):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    return Response.model_validate(every[-1]["response"]), every


def shape(response: Response) -> list[Any]:
    """Its items, but for what is random."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "note"}, {"type": "function", "name": "find"}])
def test_calls_of_a_namespace_streamed_and_whole(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "kvern-12m", "tools": [SPACE], "tool_choice": choice, "temperature": 0}
    asked |= {"input": "What is the weather in Oslo?", "reasoning": {"summary": "auto"}, "max_output_tokens": 60}
    whole = client.responses.create(**asked)
    streamed, _ = checked(client.responses.create(**asked, stream=True))
    assert shape(streamed) == shape(whole)
    [item] = whole.output
    assert (item.name, item.namespace, item.status) == (choice["name"], "crm", "completed")
    assert item.type == "function_call" or re.fullmatch(CODE["format"]["definition"], item.input)
    kind = f"{item.type}_output"
    output: Any = {"type": kind, "call_id": item.call_id, "output": "It rains."}
    after = client.responses.create(**{**asked, "tool_choice": "none"}, previous_response_id=whole.id)
    given: list[Any] = [{"type": "item_reference", "id": item.id}, output]
    assert after.status == client.responses.create(**{**asked, "tool_choice": "none", "input": given}).status
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] refers to the item"):
        client.responses.create(**{**asked, "input": [given[0], given[0]]})


def test_tools_of_every_type(client: openai.OpenAI) -> None:
    """Those that only a service runs are left out, and so are choices of them."""
    hosted: list[Any] = [
        {"type": "web_search"}, {"type": "mcp", "server_label": "docs"}, {"type": "image_generation"},
        {"type": "shell", "environment": {"type": "container_auto"}}, {"type": "tool_search"}, {"type": "hologram"},
    ]  # fmt: skip
    asked: dict[str, Any] = {"model": "kvern-12m", "input": QUESTION, "max_output_tokens": 2, "metadata": {"a": "b"}}
    tools = [*hosted, *FIXED_TOOLS, WEATHER, CODE, SPACE]
    response = client.responses.create(**asked, tools=tools, tool_choice={"type": "web_search_preview"})
    assert response.metadata == {
        "a": "b",
        "kvern_tools_left_out": "web_search, mcp:docs, image_generation, shell, tool_search, hologram",
        "kvern_tool_choice": "auto: web_search_preview is not offered",
    }
    for choice in ("required", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}):
        assert client.responses.create(**asked, tools=hosted, tool_choice=choice).metadata["kvern_tool_choice"]


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "kvern-12m", "input": "What is the weather in Oslo?", "temperature": 0}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]}
    response = client.responses.create(**asked, tools=[WEATHER, SPACE], tool_choice=allowed, max_output_tokens=60)
    assert all(item.namespace == "crm" for item in response.output)
    allowed["tools"] = [{"type": "function", "name": "get_wether"}]
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'get_wether', which is none of the tools"):
        client.responses.create(**asked, tools=[WEATHER], tool_choice=allowed)


def test_tools_that_the_input_adds(client: openai.OpenAI) -> None:
    added: list[Any] = [{"type": "additional_tools", "role": "developer", "tools": [SPACE]}] * 2
    choice: Any = {"type": "function", "name": "find", "namespace": "crm"}
    asked: dict[str, Any] = {"model": "kvern-12m", "input": [*added, *QUESTION], "tool_choice": choice}
    [item] = client.responses.create(**asked, max_output_tokens=60, temperature=0).output
    assert (item.type, item.name, item.namespace) == ("function_call", "find", "crm")


def test_log_probabilities_of_what_is_said(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "kvern-12m", "input": QUESTION, "temperature": 0, "top_logprobs": 2}
    asked |= {"include": ["message.output_text.logprobs"], "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    streamed, events = checked(client.responses.create(**asked, stream=True))
    part = whole.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    same = [entry.logprob for entry in streamed.output[0].content[0].logprobs]
    assert same == pytest.approx([entry.logprob for entry in part.logprobs], abs=1e-3)
    deltas = [entry for event in events for entry in event.get("logprobs", ()) if event["type"].endswith("delta")]
    assert [entry["logprob"] for entry in deltas] == same


def test_what_is_accepted_and_what_is_refused(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "kvern-12m", "input": QUESTION, "max_output_tokens": 1}
    harmless: dict[str, Any] = {
        "truncation": "auto", "max_tool_calls": 3, "prompt_cache_key": "a", "prompt_cache_retention": "24h",
        "safety_identifier": "a", "text": {"verbosity": "low"}, "stream_options": {"include_obfuscation": False},
        "include": ["web_search_call.results", "something.new"], "reasoning": {"effort": "low", "summary": "concise"},
    }  # fmt: skip
    response = client.responses.create(**asked, **harmless, extra_body={"client_metadata": {"a": "b"}})
    Response.model_validate(response.to_dict())
    assert (response.status, response.prompt_cache_key, response.text.verbosity) == ("incomplete", "a", "low")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": {"id": "a"}}, "prompt is .*: this server does not do that"),
        ({"truncation": "some"}, "truncation is 'some'"),
        ({"include": [1]}, r"include is \[1\]"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary is 'long'"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, r"tools\[0\].tools is None"),
        ({"tools": [{**CODE, "format": {"type": "grammar"}}]}, r"tools\[0\].format is"),
        ({"tools": [WEATHER, WEATHER]}, "names must differ"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity is 'loud'"),
        ({"input": [{"type": "configuration_update", "text": {"format": {"type": "a"}}}, *QUESTION]}, "'a'"),
    ]
    for body, said in refused:
        with pytest.raises(openai.BadRequestError, match=said):
            client.responses.create(**{**asked, **body})
