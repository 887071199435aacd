"""Harmony, gpt-oss's turns: read whatever the cutting and however sloppy, prescribed as a whole, written back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern import LLM, SamplingParams
from kvern.api.conversation import plain_messages
from kvern.request.outputs import CompletionOutput
from kvern.request.pieces import Message
from kvern.request.sampling_params import StructuredOutput
from kvern.tools.chat import PromptOptions
from kvern.tools.formats import formats_of
from kvern.tools.harmony import Harmony
from kvern.tools.thinking import HARMONY
from kvern.tools.thinking_splitter import ThoughtTokens
from tests.support.internals import engine_of
from tests.support.sampling import examples
from tests.support.served import KEY, Served, serving
from tests.support.tiny_model import make_tiny_model
from tests.support.tool_calls import everywhere, read, reader_of
from tests.support.tool_questions import ALARM, CLAUDE, FLAT, QUESTION, TOOLS, check_call, gathered

CONTINUED = PromptOptions(add_generation_prompt=False, continue_final_message=True)

TEMPLATE = """
{%- macro functions(tools) -%}
namespace functions {
{% for tool in tools %}// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{% endfor %}} // namespace functions
{%- endmacro -%}
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.

Reasoning: {{ reasoning_effort | default("medium") }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>
{%- set told = messages[0].content if messages[0].role == "system" else "" -%}
{%- set said = messages[1:] if messages[0].role == "system" else messages -%}
{%- if told or tools -%}
<|start|>developer<|message|>{% if told %}# Instructions\n\n{{ told }}{% endif %}
{%- if tools %}# Tools\n\n## functions\n\n{{ functions(tools) }}{% endif %}<|end|>
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for message in said -%}
{%- if message.role == "assistant" -%}
{%- if message.tool_calls -%}
{%- set answered = namespace(later=false) -%}
{%- for later in said[loop.index:] if later.role == "assistant" and "tool_calls" not in later -%}
{%- set answered.later = true -%}
{%- endfor -%}
{%- if message.content and message.thinking -%}
{{ raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
{%- elif (message.content or message.thinking) and not answered.later -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>
{%- endif -%}
{%- set called.name = message.tool_calls[0].function.name -%}
<|start|>assistant to=functions.{{ called.name }}<|channel|>commentary json<|message|>
{{- message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- set called.name = none -%}
{%- endif -%}
{%- elif message.role == "tool" -%}
{%- if called.name is none %}{{ raise_exception("a result without a call") }}{% endif -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else -%}
<|start|>user<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{% if opened is defined %}{{ opened }}{% endif %}{%- endif -%}
"""
ANALYSIS, FINAL, COMMENTARY = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
AGAIN = "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = [("f", '{"a": 1}')]


def taken(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{ANALYSIS}Hm.{AGAIN}{FINAL}Yes.<|return|>", "Hm.", "Yes.", []),
        (f"{ANALYSIS}Hm.{AGAIN}{FINAL}Yes.", "Hm.", "Yes.", []),
        (f'{ANALYSIS}Hm.{AGAIN}{TO_F}{{"a": 1}}<|call|>', "Hm.", "", F),
        (f'{ANALYSIS}Hm.{AGAIN} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>', "Hm.", "", F),
        ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}', "", "", F),
        ('<|start|>assistant<|channel|>commentary<|channel|>commentary to=functions.f<|message|>{"a": 1}', "", "", F),
        ('<|channel|>commentary to=f<|message|>{"a": 1}', "", "", F),
        (f"{COMMENTARY}I look.{AGAIN}{ANALYSIS}Hm.{AGAIN}{FINAL}Yes.", "Hm.", "I look.\n\nYes.", []),
        (f"{ANALYSIS}One.{AGAIN}{ANALYSIS}Two.{AGAIN}{FINAL}Yes.", "One.\n\nTwo.", "Yes.", []),
        (f'{COMMENTARY}I look.{AGAIN}{TO_F}{{"a": 1}}', "", "I look.", F),
        (f'{TO_F}{{"a": 1}}<|call|>{TO_F}{{"a": "<|end|>"}}', "", "", [*F, ("f", '{"a": "<|end|>"}')]),
        (f"{TO_F}<|call|>", "", "", [("f", "{}")]),
        (f'{TO_F}{{"a": 1}}\n and more<|call|>', "", "and more", F),
        (f'{COMMENTARY}I look.{AGAIN}{TO_F}{{"a": 1}} more', "", "I look.\n\nmore", F),
        (f'{TO_F}{{"a": 1}}\n<|start|>, more', "", "<|start|>, more", F),
        (f'{TO_F}{{"a": 1}} <|call|>', "", "", F),
        (f'{TO_F}{{"a": 1', "", "", [("f", '{"a": 1')]),
        (f"{TO_F}no JSON<|call|>", "", "", [("f", "no JSON")]),
        ("<|channel|>commentary to=functions.new<|message|>{}", "", "", [("new", "{}")]),
        ("<|channel|>commentary to=browser.search<|message|>{}", "", "{}", []),
        ("<|channel|>elsewhere<|message|>Yes.<|end|>", "", "Yes.", []),
        (f"{ANALYSIS}Hm.<|channel|>final<|message|>Yes.", "Hm.", "Yes.", []),
        (f"{ANALYSIS}Hm.<|start|>assistant{FINAL}Yes.", "Hm.", "Yes.", []),
        (f"{ANALYSIS}Hm.{AGAIN}<|channel|>fin", "Hm.", "", []),
        (f"{ANALYSIS}Hm.{AGAIN}", "Hm.", "", []),
        ("<|channel|>", "", "", []),
        ("Hello <|world|>!", "", "Hello <|world|>!", []),
        (" to=nobody is text.", "", " to=nobody is text.", []),
        ("<|channel|>final Hello, you!", "", "<|channel|>final Hello, you!", []),
        ("<|channel|>final Hello, you!<|return|>", "", "<|channel|>final Hello, you!", []),
        (f"{FINAL}<|channel|> is a mark.", "", "<|channel|> is a mark.", []),
        (f"{ANALYSIS}Hm, <|start|> is one, too.{AGAIN}{FINAL}Yes.", "Hm, <|start|> is one, too.", "Yes.", []),
        (f"{FINAL}{'x' * 600}<|channel|>{'y' * 600}", "", f"{'x' * 600}<|channel|>{'y' * 600}", []),
        (f"{FINAL}Yes.<|end|>\n", "", "Yes.", []),
        ("", "", "", []),
    ],
)  # fmt: skip
def test_turns(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([], range(1, len(text))):
        assert taken(read(reader_of(Harmony()), text, cuts)) == (reasoning, content, calls)


SOUP = [*Harmony.markers, ANALYSIS, FINAL, TO_F, AGAIN, "analysis", "final", "commentary", " to=functions.f", "json"]
SOUP += ['{"a": ', '"<|end|>"', "}", " ", "\n", "Hm", "<|", "<", "assistant", "x" * 300]


@settings(max_examples=examples(120), deadline=None)
@given(
    text=st.lists(
        st.sampled_from(SOUP),
        max_size=12,
    ).map("".join),
    cuts=everywhere,
)
def test_sloppy_turns_are_read_the_same_however_they_come(text: str, cuts: list[int]) -> None:
    whole = taken(read(reader_of(Harmony()), text))
    assert taken(read(reader_of(Harmony()), text, cuts)) == whole
    assert taken(read(reader_of(Harmony()), text, range(1, len(text)))) == whole


def test_nothing_waits_that_is_certain() -> None:
    reader, text = reader_of(Harmony()), ""
    for more, expected in (
        (f"{ANALYSIS}The fo", ("The fo", "", [])),
        (f"x{AGAIN}{TO_F}", ("The fox", "", [("f", "")])),
        ('{"city": "Os', ("The fox", "", [("f", '{"city": "Os')])),
    ):
        text += more
        reader.read(text, False)
        assert taken(reader.message) == expected


def test_calls_are_text_where_there_are_no_tools() -> None:
    assert taken(read(reader_of(Harmony(), tools={}), f"{TO_F}{{}}<|call|>")) == ("", "{}", [])


def test_both_parsers_or_neither() -> None:
    form, thinking = formats_of(TEMPLATE, "auto", "auto")
    assert (form and form.name, thinking) == ("harmony", HARMONY)
    assert formats_of(TEMPLATE, "none", "auto") == (None, None)
    assert formats_of(TEMPLATE, "auto", "none") == (None, None)
    form, thinking = formats_of("{{ content }}<|end|>", "auto", "auto")
    assert (form and form.name, thinking) == ("json", None)


def test_thought_tokens_are_those_of_all_analysis() -> None:
    tokens = [
        ANALYSIS,
        "a",
        "b",
        "<|end|>",
        "<|start|>assistant",
        COMMENTARY,
        "c",
        "<|end|>",
        ANALYSIS,
        "d",
        "<|end|>",
        "e",
    ]
    spelled = [token.encode() for token in tokens]
    growing = ThoughtTokens(HARMONY, "possible", spelled.__getitem__)
    found = [growing.count(range(count + 1)) for count in range(len(tokens))]
    assert found == [0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    assert ThoughtTokens(HARMONY, "possible", spelled.__getitem__).count(range(len(tokens))) == 3


def harmony_model(folder: Path) -> Path:
    """The tiny model with harmony's tokens, which ends as gpt-oss does."""
    make_tiny_model(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = sorted(vocabulary, key=vocabulary.get)[-len(Harmony.markers) :]
    for mark, old in zip(Harmony.markers, taken, strict=True):
        token = vocabulary[mark] = vocabulary.pop(old)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token, "content": mark, "special": True, **flags})
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) in vocabulary]
    path.write_text(json.dumps(tokenizer))
    ends = [1, vocabulary["<|return|>"], vocabulary["<|call|>"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harmony_model(tmp_path_factory.mktemp("harmony") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_model_len=1600, max_batch_requests=16, threads=1) as llm:
        yield llm


def prompt_of(llm: LLM, messages: list[Any], **options: Any) -> str:
    chat = engine_of(llm).inputs.chat.request(
        plain_messages(messages), SamplingParams(), options=PromptOptions(**options)
    )
    return llm.tokenizer.decode(chat.prompt, skip_special_tokens=False)


def call(number: int, **arguments: Any) -> dict[str, Any]:
    """In OpenAI's form."""
    function = {"name": f"f{number}", "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def test_analysis_goes_back_with_a_tools_result(llm: LLM) -> None:
    """As the template wants it: until the answer has come, and beside what was said before the call."""
    asked = [
        *QUESTION,
        {"role": "assistant", "reasoning_content": "I must look.", "content": "I look.", "tool_calls": [call(1, a=1)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    looked = "<|start|>assistant to=functions.f1<|channel|>commentary json<|message|>"
    result = '<|start|>functions.f1 to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
    prompt = prompt_of(llm, asked)
    thought = "<|start|>assistant<|channel|>analysis<|message|>I must look.\n\nI look.<|end|>"
    assert prompt.endswith(f'{thought}{looked}{{"a": 1}}<|call|>{result}<|start|>assistant')
    answer = [{"role": "assistant", "reasoning": "It rains.", "content": "Rain."}, {"role": "user", "content": "Oh."}]
    prompt = prompt_of(llm, asked + answer)
    assert "analysis<|message|>" not in prompt
    assert "<|start|>assistant<|channel|>final<|message|>Rain.<|end|>" in prompt


def test_several_calls_are_written_one_by_one(llm: LLM) -> None:
    asked = [
        *QUESTION,
        {"role": "assistant", "thinking": "Both.", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "user", "content": "And?"},
    ]
    prompt = prompt_of(llm, asked)
    names = [part.partition("<")[0].removeprefix("assistant to=") for part in prompt.split("<|start|>")[3:]]
    assert names == [
        "assistant", "functions.f1", "functions.f1 to=assistant", "functions.f2", "functions.f2 to=assistant", "user",
        "assistant",
    ]  # fmt: skip
    assert prompt.index('"one"') < prompt.index('"two"')


def answers(llm: LLM, count: int = 4, **options: Any) -> list[CompletionOutput]:
    params = {"max_tokens": 250, "temperature": 1.0, **options.pop("params", {})}
    several = [SamplingParams(seed=seed, **params) for seed in range(count)]
    return [output.outputs[0] for output in llm.chat([QUESTION] * count, several, **options)]


OPENED = pytest.mark.parametrize("opened", ["", ANALYSIS, FINAL], ids=["", "analysis", "final"])


@pytest.mark.sample(1)
@OPENED
def test_a_demanded_turn_is_constrained_as_a_whole(llm: LLM, opened: str) -> None:
    """Whatever the prompt opens, what comes is a call, or an answer of the form."""
    variables = {"opened": opened}
    stopped = 0
    budget = {"thinking_budget": 9} if opened != FINAL else {}
    for answer in answers(llm, tools=TOOLS, tool_choice="required", variables=variables, **budget):
        assert answer.message is not None
        if answer.finish_reason == "stop":
            stopped += 1
            [one] = answer.message.tool_calls
            check_call(one.name, one.arguments)
            assert not answer.message.content
    form = {"structured": StructuredOutput(json=ALARM)}
    for options in ({}, {"tools": TOOLS}):
        for answer in answers(llm, params=form, variables=variables, **budget, **options):
            assert answer.message is not None
            if answer.finish_reason == "stop" and not answer.message.tool_calls:
                stopped += 1
                jsonschema.validate(json.loads(answer.message.content), ALARM)
    assert stopped


def test_free_turns_hold_valid_calls_or_none(llm: LLM) -> None:
    for answer in answers(llm, tools=TOOLS, parallel_tool_calls=False):
        assert answer.message is not None
        assert answer.message.content or answer.message.reasoning or answer.message.tool_calls
        assert "<|" not in answer.message.content
        for one in answer.message.tool_calls if answer.finish_reason == "stop" else ():
            check_call(one.name, one.arguments)


@pytest.mark.parametrize("budget", [0, 7])
def test_a_budget_ends_the_analysis(llm: LLM, budget: int) -> None:
    end = llm.tokenizer.token_to_id("<|end|>")
    for answer in answers(llm, params={"max_tokens": 60}, thinking_budget=budget, variables={"opened": ANALYSIS}):
        assert answer.message is not None
        assert end in answer.token_ids[: budget + 1]
        assert answer.message.content or "<|message|>" not in answer.text
    for answer in answers(llm, params={"max_tokens": 60}, thinking_budget=budget):
        assert ThoughtTokens(HARMONY, "possible", llm.tokenizer.id_to_bytes).count(answer.token_ids) <= budget


def test_an_answer_goes_on(llm: LLM) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    chat = engine_of(llm).inputs.chat
    request = chat.request(messages, SamplingParams(), options=CONTINUED)
    assert llm.tokenizer.decode(request.prompt, skip_special_tokens=False).endswith(f"{FINAL}It is")
    assert taken(request.message(" raining.")) == ("", " raining.", [])


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving("--model", str(folder), "--threads", "1", "--max-model-len", "1600") as served:
        yield served


def test_every_api_shows_the_turn(server: Served) -> None:
    """Analysis, then a demanded call; whole and streamed."""
    client = server.client()
    model = client.models.list().data[0].id
    extra = {"thinking_budget": 8, "chat_template_kwargs": {"opened": ANALYSIS}}
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "seed": 2, "max_tokens": 300, "extra_body": extra}
    asked |= {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "set_alarm"}}}
    choice = client.chat.completions.create(**asked).choices[0]
    [one] = choice.message.tool_calls
    check_call(one.function.name, one.function.arguments)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    thought, arguments = choice.message.reasoning_content, one.function.arguments
    [streamed] = gathered(client.chat.completions.create(**asked, stream=True))
    assert (streamed["reasoning"], streamed["calls"]) == (thought, [["set_alarm", arguments]])
    assert streamed["finish_reason"] == "tool_calls"

    response: dict[str, Any] = {"model": model, "input": QUESTION, "max_output_tokens": 300, "tools": FLAT}
    response |= {"tool_choice": {"type": "function", "name": "set_alarm"}, "extra_body": {"seed": 2, **extra}}
    reasoning, called = client.responses.create(**response).output
    assert (reasoning.content[0].text, called.name, called.arguments) == (thought, "set_alarm", arguments)
    events = list(client.responses.create(**response, stream=True))
    kinds = ("response.reasoning_text.delta", "response.function_call_arguments.delta")
    told = ["".join(event.delta for event in events if event.type == kind) for kind in kinds]
    assert told == [thought, arguments]

    with anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as claude:
        message: dict[str, Any] = {"model": model, "max_tokens": 300, "messages": QUESTION, "tools": CLAUDE}
        message |= {"tool_choice": {"type": "tool", "name": "set_alarm"}}
        message |= {"thinking": {"type": "enabled", "budget_tokens": 8}}
        message["extra_body"] = {"seed": 2, "chat_template_kwargs": extra["chat_template_kwargs"]}
        whole = claude.messages.create(**message)
        assert [block.type for block in whole.content] == ["thinking", "tool_use"]
        assert (whole.content[0].thinking, whole.content[1].input) == (thought, json.loads(arguments))
        assert whole.stop_reason == "tool_use"
        with claude.messages.stream(**message) as stream:
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "tool_use"]

    body = {"model": model, "messages": QUESTION, "format": ALARM, "options": {"seed": 2, "num_predict": 300}}
    address, head = server.url.removesuffix("/v1") + "/api/chat", {"Authorization": f"Bearer {KEY}"}
    said = httpx.post(address, json={**body, "stream": False}, headers=head).json()["message"]
    jsonschema.validate(json.loads(said["content"]), ALARM)
    lines = httpx.post(address, json=body, headers=head).text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == said["content"]
