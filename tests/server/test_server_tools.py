"""Tools and thinking through the server, with the official clients: calls, their results, and what is refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvern.cli.main import main
from tests.support.served import KEY, Served
from tests.support.tool_questions import CLAUDE, FLAT, QUESTION, TOOLS, check_call, gathered

NAMED: Any = {"type": "function", "function": {"name": "set_alarm"}}
ALL: dict[str, Any] = {"model": "kvern-12m", "max_tokens": 200}


@pytest.fixture(scope="module")
def server(talking_server: Served) -> Served:
    return talking_server


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as made:
        yield made


def test_a_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**ALL, messages=QUESTION, tools=TOOLS, temperature=0).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    [call] = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 7, "condition": "rainy"}'}
    messages = [*QUESTION, first.message, result]
    second = client.chat.completions.create(**ALL, messages=messages, tools=TOOLS, temperature=0).choices[0]
    assert second.finish_reason == "stop"
    assert second.message.tool_calls is None
    assert "rainy" in second.message.content


@pytest.mark.sample(4)
@pytest.mark.parametrize("choice", ["auto", "required", NAMED, "none"], ids=str)
@pytest.mark.parametrize("options", [{"n": 3, "logprobs": True}, {"parallel_tool_calls": False}], ids=str)
def test_streams_say_the_same(client: openai.OpenAI, choice: Any, options: dict[str, Any]) -> None:
    asked = {
        **ALL,
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": choice,
        "seed": 5,
        "temperature": 0.7,
        **options,
    }
    whole = client.chat.completions.create(**asked)
    streamed = gathered(client.chat.completions.create(**asked, stream=True), options.get("n", 1))
    for one, other in zip(whole.choices, streamed, strict=True):
        calls = [[call.function.name, call.function.arguments] for call in one.message.tool_calls or ()]
        assert (other["content"], other["calls"]) == (one.message.content or "", calls)
        assert other["finish_reason"] == one.finish_reason
        if one.logprobs:
            assert other["tokens"] == len(one.logprobs.content)
        if choice == "none":
            assert not calls
        if choice in ("required", NAMED):
            assert one.finish_reason == "tool_calls"
            assert calls
        for name, arguments in calls:
            assert choice != NAMED or name == "set_alarm"
            if choice != "auto":
                check_call(name, arguments)
        assert len(calls) <= 1 or options.get("parallel_tool_calls") is not False
    if options.get("logprobs"):
        assert sum(other["tokens"] for other in streamed) == whole.usage.completion_tokens


def test_strict_tools_are_called_as_their_schema_says(client: openai.OpenAI) -> None:
    """The answer is free until a call begins."""
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    messages: list[Any] = [{"role": "user", "content": "Set an alarm for 7:30."}]
    for seed in range(4):
        asked = {**ALL, "messages": messages, "tools": strict, "seed": seed, "temperature": 1.5}
        for call in client.chat.completions.create(**asked).choices[0].message.tool_calls or ():
            check_call(call.function.name, call.function.arguments)
    chat: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = client.chat.completions.create(**ALL, messages=chat, tools=strict[1:], temperature=0).choices[0]
    assert answer.finish_reason == "stop"
    assert "42" in answer.message.content


def test_an_answer_in_json_or_a_call(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    extract: list[Any] = [{"role": "user", "content": "Extract name and age as JSON: Anna is 31 years old."}]
    asked = {**ALL, "tools": TOOLS, "response_format": form, "temperature": 0}
    answer = client.chat.completions.create(**asked, messages=extract).choices[0]
    assert json.loads(answer.message.content) == {"name": "Anna", "age": 31}
    call = client.chat.completions.create(**asked, messages=QUESTION).choices[0]
    assert call.finish_reason == "tool_calls"
    demanded = client.chat.completions.create(**asked, messages=extract, tool_choice="required").choices[0]
    assert demanded.message.tool_calls, "a call that is demanded goes before the form of an answer"


CODE: dict[str, Any] = {"name": "run_code", "description": "Runs code."}
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r'print\("[a-z]{1,8}\\n"\)'}}
CODE_TOOLS: list[Any] = [*TOOLS, {"type": "custom", "custom": {**CODE, "format": REGEX}}]
CODE_CHOICE: Any = {"type": "custom", "custom": {"name": "run_code"}}
ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CODE_CHOICE]}}


@pytest.mark.parametrize("choice", [CODE_CHOICE, ALLOWED], ids=["named", "allowed"])
def test_custom_tools_take_texts(client: openai.OpenAI, choice: Any) -> None:
    """Whole and streamed, and back in the conversation."""
    asked = {**ALL, "messages": QUESTION, "tools": CODE_TOOLS, "seed": 3, "temperature": 0.8, "tool_choice": choice}
    whole = client.chat.completions.create(**asked).choices[0]
    [call, *_] = whole.message.tool_calls
    assert (whole.finish_reason, call.type, call.custom.name) == ("tool_calls", "custom", "run_code")
    assert re.fullmatch(REGEX["grammar"]["definition"], call.custom.input)
    deltas = [
        part
        for chunk in client.chat.completions.create(**asked, stream=True)
        for part in chunk.choices[0].delta.tool_calls or ()
        if part.index == 0
    ]
    assert (deltas[0].type, deltas[0].custom["name"], deltas[0].function) == ("custom", "run_code", None)
    assert "".join(part.custom["input"] for part in deltas) == call.custom.input and len(deltas) > 2
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "hello"}
    once = whole.message.model_copy(update={"tool_calls": [call]})
    again = client.chat.completions.create(**ALL, messages=[*QUESTION, once, result], tools=CODE_TOOLS, temperature=0)
    function = {"name": "run_code", "arguments": json.dumps({"input": call.custom.input})}
    said = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    same = client.chat.completions.create(
        **ALL, messages=[*QUESTION, said, result], tools=CODE_TOOLS, temperature=0
    )  # the model sees a call of a function
    assert (again.choices[0].message, again.usage.prompt_tokens) == (same.choices[0].message, same.usage.prompt_tokens)


def test_functions_beside_custom_tools_stay_functions(client: openai.OpenAI) -> None:
    free = [*TOOLS, {"type": "custom", "custom": CODE}]
    call = client.chat.completions.create(**ALL, messages=QUESTION, tools=free, tool_choice=NAMED).choices[0]
    assert [made.type for made in call.message.tool_calls] == ["function"] * len(call.message.tool_calls)
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    counts = [
        client.post(
            "/../tokenize", cast_to=object, body={"messages": QUESTION, "tools": [{"type": "custom", "custom": tool}]}
        )
        for tool in (CODE, {**CODE, "format": {"type": "text"}}, {**CODE, "format": lark})
    ]
    assert counts[0] == counts[1] and counts[2]["count"] > counts[0]["count"], "a grammar is described"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom"}]}, r"tools\[0\].custom is None: it must be an object"),
    ({"tools": [{"type": "custom", "custom": {}}]}, r"tools\[0\].custom.name is None"),
    ({"tools": [{"type": "custom", "custom": {**CODE, "format": {"type": "json"}}}]}, r"tools\[0\].custom.format is"),
    ({"tools": CODE_TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "none of the tools"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}]},
        r"messages\[0\].tool_calls\[0\].custom.input is None: it must be a text",
    ),
    ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\].function.name is None"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\].function is None"),
    ({"tools": ["f"]}, r"tools\[0\] is 'f'"),
    ({"tools": "f"}, "tools is 'f'"),
    ({"tools": [{"type": "function", "function": {"name": "no blanks"}}]}, "letters, digits"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "1 to 128"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, r"tools\[1\].function.name is 'get_weather', as in tools\[0\]"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type is 'web_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "none of the tools"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls is 'no'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "type is 'array'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, r"parameters is \[1\]"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}]}, "properties is 3"),
    (
        {"tools": [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {
            "type": "bogus"}}}}}], "tool_choice": "required"},
        r"tools\[1\].function.parameters: .*bogus",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "x" * (1 << 18)}}}]}, "at most"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].tool_call_id is missing"),
    ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, r"messages\[1\].tool_calls\[0\]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "arguments is 5: it must be a JSON object",
    ),
    ({"extra_body": {"thinking_budget": 5}}, "knows no thinking"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "field of its own"),
    ({"extra_body": {"chat_template_kwargs": 3}}, "chat_template_kwargs is 3"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "said"), BAD, ids=range(len(BAD)))
def test_bad_bodies_name_the_place(client: openai.OpenAI, body: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(**{**ALL, "messages": QUESTION, **body})


@pytest.mark.parametrize("depth", [200, 900, 100_000])
def test_nested_too_deeply(server: Served, depth: int) -> None:
    """In a schema, and in a place where none belongs; a call's arguments are a text that a model may have written."""
    schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    deep = "[" * depth + "]" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    call = f'{{"function": {{"name": "f", "arguments": "{deep}"}}}}'
    places = (
        f'"tools": [{tool}], "tool_choice": "required"',
        f'"tools": {deep}',
        f'"response_format": {deep}',
        f'"guided_json": {schema}',
        f'"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]',
    )
    for place in places:
        body = f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "a"}}], {place}}}'
        status, _, said = server.raw("POST", "/v1/chat/completions", body.encode())
        assert status == 400 or place.startswith('"messages"'), (place[:40], said)
        assert status < 500


def test_responses_call_and_go_on(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "kvern-12m", "tools": FLAT, "temperature": 0}
    first = client.responses.create(**asked, input="What is the weather in Oslo?")
    [call] = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 7, "condition": "rainy"}',
    }
    stored = client.responses.create(**asked, previous_response_id=first.id, input=[result])
    given = client.responses.create(**asked, input=[*QUESTION, call.model_dump(exclude_none=True), result])
    assert "rainy" in stored.output_text
    assert given.output_text == stored.output_text
    named: Any = {"type": "function", "name": "set_alarm"}
    form: Any = {"format": {"type": "json_schema", "name": "f", "schema": {"type": "object"}, "strict": True}}
    forced = client.responses.create(**asked, input="Hello.", tool_choice=named, text=form)
    check_call(forced.output[0].name, forced.output[0].arguments)
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].call_id is None"):
        client.responses.create(**asked, input=[{"type": "function_call_output", "output": "x"}])


def test_a_stream_of_a_response_with_a_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "kvern-12m", "tools": FLAT, "temperature": 0, "input": QUESTION}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas, "one or several: tokens that come together go together"
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == whole.output[0].arguments
    kinds = [event.type for event in events if event.type != "response.function_call_arguments.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output[0].arguments == whole.output[0].arguments


def test_messages_call_and_go_on(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "kvern-12m", "max_tokens": 100, "tools": CLAUDE, "extra_body": {"temperature": 0}}
    first = claude.messages.create(**asked, messages=QUESTION)
    assert first.stop_reason == "tool_use"
    [use] = first.content
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 7, "condition": "rainy"}'}
    messages: list[Any] = [*QUESTION, {"role": "assistant", "content": first.content}]
    messages.append({"role": "user", "content": [result]})
    second = claude.messages.create(**asked, messages=messages)
    assert "rainy" in second.content[0].text
    with claude.messages.stream(**asked, messages=QUESTION) as stream:
        kinds = [event.type for event in stream if event.type.startswith("content_block")]
        final = stream.get_final_message()
    assert (final.content[0].input, final.stop_reason) == (use.input, "tool_use")
    assert kinds[0] == "content_block_start" and kinds[-1] == "content_block_stop"
    assert set(kinds[1:-1]) == {"content_block_delta"}, "one or several: tokens that come together go together"
    chosen = claude.messages.create(**asked, messages=QUESTION, tool_choice={"type": "tool", "name": "set_alarm"})
    check_call(chosen.content[0].name, json.dumps(chosen.content[0].input))
    forced = claude.messages.create(**asked, messages=QUESTION, tool_choice={"type": "any"})
    assert forced.content[0].type == "tool_use"
    for extra, said in (
        ({"tool_choice": {"type": "tool", "name": "g"}}, "none of the tools"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] is"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id is None"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=said):
            claude.messages.create(**{**asked, "messages": QUESTION, **extra})


def test_batches_call_tools(tmp_path: Path) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0, "max_tokens": 100}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    answered = tmp_path / "answers.jsonl"
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert main(["run", str(tmp_path / "rows.jsonl"), str(answered), "--threads", "1", "--max-model-len", "1024"]) == 0
    [choice] = json.loads(answered.read_text())["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    check_call("set_alarm", choice["message"]["tool_calls"][0]["function"]["arguments"])
