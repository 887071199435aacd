"""Models that think: what they think is split off, and it has an end; whatever is asked of the answer follows it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from kvern import LLM, SamplingParams
from kvern.errors import InvalidParameter, InvalidRequest
from kvern.request.outputs import CompletionOutput
from kvern.request.pieces import Message
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.grammar import grammars_of
from kvern.text.chat_template import ChatTemplate
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import Chat
from tests.support.served import KEY, Served, serving
from tests.support.thinking_model import TEMPLATE, thinking_model
from tests.support.tiny_model import make_tiny_model
from tests.support.tool_questions import ALARM, QUESTION, TOOLS, check_call, gathered


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = thinking_model(tmp_path_factory.mktemp("thinking") / "model", request.param)
    with LLM(str(folder), max_model_len=500, max_batch_requests=16, threads=1) as llm:
        yield llm


def answers(llm: LLM, count: int = 8, **options: Any) -> list[CompletionOutput]:
    """Of a model whose weights mean nothing, drawn with different seeds."""
    params = {"max_tokens": 300, "temperature": 1.0, **options.pop("params", {})}
    several = [SamplingParams(seed=seed, **params) for seed in range(count)]
    return [output.outputs[0] for output in llm.chat([QUESTION] * count, several, **options)]


def message_of(answer: CompletionOutput) -> Message:
    assert answer.message is not None
    return answer.message


@pytest.mark.parametrize("open_", [True, False])
@pytest.mark.parametrize("budget", [0, 7])
def test_a_budget_ends_the_thinking(llm: LLM, open_: bool, budget: int) -> None:
    end, begin = (llm.tokenizer.token_to_id(mark) for mark in ("</think>", "<think>"))
    bias = {} if open_ else {"logit_bias": {begin: 40.0}}
    found = answers(llm, params={"max_tokens": 60, **bias}, thinking_budget=budget, variables={"open": open_})
    for answer in found:
        thought = answer.token_ids if open_ else answer.token_ids[1:]
        assert open_ or answer.token_ids[0] == begin
        assert end in thought[: budget + 1]
        assert message_of(answer).content == answer.text.partition("</think>")[2].lstrip(" \t\r\n")
    if budget:
        assert any(message_of(answer).reasoning for answer in found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("open_", [True, False])
def test_the_form_is_the_answers_alone(llm: LLM, open_: bool) -> None:
    """A schema, also with a budget; a demanded call; a strict one."""
    form = {"structured": StructuredOutput(json=ALARM)}
    for answer in answers(llm, params=form, thinking_budget=9, variables={"open": open_}):
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(message_of(answer).content), ALARM)
    begin = llm.tokenizer.token_to_id("<think>")
    bias = {} if open_ else {"logit_bias": {begin: 10.0}}
    options: dict[str, Any] = {"tools": TOOLS, "thinking_budget": 9, "variables": {"open": open_}}
    stopped = 0
    for answer in answers(llm, params=bias, tool_choice="required", parallel_tool_calls=False, **options):
        if answer.finish_reason == "stop":
            stopped += 1
            [call] = message_of(answer).tool_calls
            check_call(call.name, call.arguments)
            assert not message_of(answer).content
            assert "<tool_call>" in answer.text
    assert stopped


def test_thinking_that_is_switched_off(llm: LLM) -> None:
    [answer] = answers(llm, 1, params={"max_tokens": 20}, variables={"enable_thinking": False}, thinking_budget=5)
    assert message_of(answer).reasoning == ""


def test_thinking_that_no_switch_of_the_template_ends_is_ended_at_once(tmp_path: Path) -> None:
    folder = thinking_model(tmp_path / "model", special=True)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<think>\n{# </think> #}")
    with LLM(str(folder), max_model_len=256, threads=1) as llm:
        for answer in answers(llm, 2, params={"max_tokens": 20}, variables={"enable_thinking": False}):
            assert answer.token_ids[0] == llm.tokenizer.token_to_id("</think>")
            assert message_of(answer).reasoning == ""


def test_a_stream_is_taken_apart(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=3, temperature=1.0)
    options: dict[str, Any] = {"thinking_budget": 12, "variables": {"open": True}}
    [whole] = llm.chat(QUESTION, params, **options)
    last = None
    for output in llm.stream_chat(QUESTION, params, **options):
        last = message_of(output.outputs[0])
    assert last == whole.outputs[0].message
    assert last.reasoning


@pytest.mark.sample(2)
@pytest.mark.parametrize("beams", [{}, {"beam_width": 2, "n": 2, "temperature": None}])
def test_stop_strings_count_behind_the_thinking(llm: LLM, beams: dict[str, Any]) -> None:
    """One of the thinking's letters, and one of the answer's; without thinking they count from the start."""
    options: dict[str, Any] = {"thinking_budget": 12, "variables": {"open": True}}
    for before in answers(llm, 4, params={"max_tokens": 40, **beams}, **options):
        thought, said = message_of(before).reasoning, message_of(before).content
        for stop in (thought[0], said[-1]):
            for kept in (False, True):
                asked = {"max_tokens": 40, "stop": stop, "include_stop_str_in_output": kept, **beams}
                found = [message_of(answer) for answer in answers(llm, 4, params=asked, **options)]
                assert all(message.reasoning for message in found)
                assert all(stop not in message.content.removesuffix(stop if kept else "") for message in found)
    off = {**options, "variables": {"enable_thinking": False}, "thinking_budget": None}
    [plain] = answers(llm, 1, params={"max_tokens": 40}, **off)
    [cut] = answers(llm, 1, params={"max_tokens": 40, "stop": plain.text[5]}, **off)
    assert cut.text == plain.text[: plain.text.index(plain.text[5])]


def test_what_cannot_be_done_is_refused(llm: LLM, tiny_llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="thinking_budget is -1"):
        answers(llm, 1, thinking_budget=-1)
    with pytest.raises(InvalidRequest, match="knows no thinking"):
        answers(tiny_llm, 1, thinking_budget=5)
    folder = make_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    refused = pytest.raises(InvalidRequest, match="several tokens, which cannot be forced")
    with LLM(str(folder), max_model_len=256, threads=1) as several_tokens, refused:
        answers(several_tokens, 1, thinking_budget=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = thinking_model(tmp_path_factory.mktemp("served") / "model", special=True)
    with serving("--model", str(folder), "--threads", "1", "--max-model-len", "500") as served:
        yield served
    shutil.rmtree(folder)


def test_every_api_shows_the_thinking(server: Served) -> None:
    client = server.client()
    model = server.client().models.list().data[0].id
    extra = {"thinking_budget": 8, "chat_template_kwargs": {"open": True}}
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "seed": 1, "max_tokens": 40, "extra_body": extra}
    whole = client.chat.completions.create(**asked).choices[0].message
    assert whole.reasoning_content
    [streamed] = gathered(client.chat.completions.create(**asked, stream=True))
    assert (streamed["reasoning"], streamed["content"]) == (whole.reasoning_content, whole.content)
    hidden = client.chat.completions.create(**{**asked, "extra_body": {**extra, "include_reasoning": False}})
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert hidden.choices[0].message.content == whole.content

    response: dict[str, Any] = {"model": model, "input": QUESTION, "max_output_tokens": 40}
    response["extra_body"] = {"seed": 1, **extra}
    thought, said = client.responses.create(**response).output
    assert (thought.type, thought.content[0].text) == ("reasoning", whole.reasoning_content)
    assert said.content[0].text == whole.content
    with client.responses.stream(**response, reasoning={"summary": "auto"}) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[0].summary[0].text == whole.reasoning_content
    assert kinds.count("response.reasoning_summary_text.delta") == kinds.count("response.reasoning_text.delta") > 0
    events = list(client.responses.create(**response, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == whole.reasoning_content
    assert [event.sequence_number for event in events] == list(range(len(events)))

    with anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as claude:
        message: dict[str, Any] = {"model": model, "max_tokens": 40, "messages": QUESTION}
        message["extra_body"] = {"seed": 1, "chat_template_kwargs": {"open": True}}
        message["thinking"] = {"type": "enabled", "budget_tokens": 8}
        thinking, text = claude.messages.create(**message).content
        assert (thinking.type, thinking.thinking) == ("thinking", whole.reasoning_content)
        assert text.text == whole.content
        with claude.messages.stream(**message) as stream:
            streamed = stream.get_final_message().content
        assert [block.type for block in streamed] == ["thinking", "text"]
        assert streamed[0].signature == thinking.signature != ""  # without one, some clients hand no thinking back
        again = [*QUESTION, {"role": "assistant", "content": streamed}, {"role": "user", "content": "And now?"}]
        assert claude.messages.create(**{**message, "messages": again}).stop_reason


def test_stop_strings_leave_the_thinking_alone_in_every_api(server: Served) -> None:
    """One that the thinking has, asked for in each API's own way, whole and streamed."""
    client, opened = server.client(), {"thinking_budget": 12, "chat_template_kwargs": {"open": True}}
    model = client.models.list().data[0].id
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "seed": 1, "max_tokens": 40, "extra_body": opened}
    whole = client.chat.completions.create(**asked).choices[0].message
    stop = next(letter for letter in whole.reasoning_content if letter not in whole.content[:3])
    said = (whole.reasoning_content, whole.content.partition(stop)[0])
    choice = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == said
    [streamed] = gathered(client.chat.completions.create(**asked, stop=[stop], stream=True))
    assert (streamed["reasoning"], streamed["content"]) == said

    extra = {"seed": 1, "stop": [stop], **opened}
    thought, text = client.responses.create(model=model, input=QUESTION, max_output_tokens=40, extra_body=extra).output
    assert (thought.content[0].text, text.content[0].text) == said
    head = {"Authorization": f"Bearer {KEY}"}
    body: dict[str, Any] = {"model": model, "messages": QUESTION, **opened}
    claude = {**body, "max_tokens": 40, "seed": 1, "stop_sequences": [stop]}
    claude["thinking"] = {"type": "enabled", "budget_tokens": claude.pop("thinking_budget")}
    address = server.url.removesuffix("/v1")
    blocks = httpx.post(f"{address}/v1/messages", json=claude, headers=head).json()["content"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == said
    [begin] = httpx.post(
        f"{address}/tokenize", json={"prompt": "<think>", "add_special_tokens": False}, headers=head
    ).json()["tokens"]
    options = {"num_predict": 8, "stop": ["<think>"], "logit_bias": {str(begin): 100}}
    ollama = {"model": model, "messages": QUESTION, "stream": False, "options": options}
    answer = httpx.post(f"{address}/api/chat", json=ollama, headers=head).json()
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 8), answer
    scope = httpx.post(f"{address}/v1/chat/completions", json={**body, "stop_scope": {"end": "(a+)+"}}, headers=head)
    assert (scope.status_code, "stop_scope" in scope.text) == (400, True)
    assert "stop_scope" not in httpx.get(f"{address}/openapi.json", headers=head).text


def test_what_the_template_lacks_is_named(server: Served) -> None:
    """It reads `enable_thinking`, no effort, and writes neither tools nor calls."""
    text = {"model": server.client().models.list().data[0].id}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    asked: list[tuple[str, dict[str, Any], str | None]] = [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "enable_thinking": False}, None),
        (
            "/v1/chat/completions",
            {"messages": QUESTION, "max_tokens": 1, "reasoning_effort": "low"},
            "reasoning_effort",
        ),
        ("/v1/chat/completions", {"messages": called, "max_tokens": 1, "tools": TOOLS}, "tools, tool_calls"),
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "tools": TOOLS, "stream": True}, "tools"),
        (
            "/v1/responses",
            {"input": "Hm?", "max_output_tokens": 16, "reasoning": {"effort": "low"}},
            "reasoning_effort",
        ),
        (
            "/v1/messages",
            {"messages": QUESTION, "max_tokens": 1, "output_config": {"effort": "low"}},
            "reasoning_effort",
        ),
        ("/api/chat", {"messages": QUESTION, "options": {"num_predict": 1}, "think": "low"}, "reasoning_effort"),
    ]
    for path, body, lacks in asked:
        answer = httpx.post(
            server.url.removesuffix("/v1") + path, json={**text, **body}, headers={"authorization": f"Bearer {KEY}"}
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-kvern-template-lacks") == lacks


def test_a_template_that_leaves_tools_out_is_told_of_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    for template, warned in (("{{ tools and messages[0].content }}", True), ("{{ messages[0].content }}", False)):
        (folder / "chat_template.jinja").write_text(template)
        caplog.clear()
        tokenizer = Tokenizer(folder)
        Chat(tokenizer, grammars_of(folder, tokenizer.vocab_size), "auto", "auto", 64).warn_of_template()
        assert ("leaves tools and tool_calls and tool_results out of prompts" in caplog.text) == warned


SAID = "{{ m.content }}"
CALLED = "{% for call in m.tool_calls %}{{ call.function.name + (call.function.arguments | tojson) }}{% endfor %}"
EITHER = "{% if m.content %}" + SAID + "{% else %}" + CALLED + "{% endif %}"


@pytest.mark.parametrize(
    ("tools", "message", "lost"),
    [
        ("{{ tools }}", SAID + CALLED, []),
        ("{{ xml_tools }}", SAID + CALLED, []),
        ("{% for tool in python_tools %}{{ tool }}{% endfor %}", SAID + CALLED, []),
        ("{{ my_tools }}", SAID + CALLED, ["tools"]),
        ("{{ tools }}", CALLED, ["content_beside_tool_calls"]),
        ("{{ tools }}", EITHER, ["tool_calls"]),
        ("{{ tools }}", SAID, ["tool_calls"]),
    ],
    ids=range(7),
)
def test_what_a_template_leaves_out_is_known(tools: str, message: str, lost: list[str]) -> None:
    template = tools + "{% for m in messages %}" + message + "{% endfor %}"
    forms = ChatTemplate({"default": template}).forms(True, {})
    assert forms.lost([{"role": "assistant", "content": "So.", "tool_calls": [{}]}], True) == lost
    assert "content_beside_tool_calls" not in forms.lost([{"role": "assistant", "tool_calls": [{}]}], True)


def test_tools_have_the_name_that_the_template_reads() -> None:
    template = ChatTemplate({"default": "{{ xml_tools }},{{ python_tools }}"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    said = [{"role": "user", "content": "Hm?"}]
    assert template.render(said, tools, True, {}) == f"{tools},"
    assert template.render(said, tools, True, {"xml_tools": "own"}) == "own,"
    assert template.render(said, None, True, {}) == ","
