"""Calls that are demanded: whatever the model, in every format, the arguments are what the tool's schema says."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvern import LLM, SamplingParams
from kvern.errors import InvalidRequest
from kvern.request.sampling_params import StructuredOutput
from kvern.tools.checks import read_tools
from kvern.tools.formats import format_of
from kvern.tools.json_calls import JSON
from kvern.tools.tool_format import ToolFormat
from tests.support.internals import engine_of
from tests.support.tiny_model import make_tiny_model
from tests.support.tool_calls import DIFFERENT

SHORT = {"type": "string", "maxLength": 4}
SCHEMAS: dict[str, Any] = {
    "move": {
        "type": "object",
        "properties": {
            "by": {"type": "integer", "minimum": -9, "maximum": 9},
            "id": {"enum": [1234567890123456789]},
            "to": {"enum": ["left", "[TOOL_CALLS]", "\n"]},
            "so": {"type": "string", "pattern": "^[a-z/]{1,3}(/|x)?$"},
            "maybe": {"anyOf": [{"enum": ["yes", "5"]}, {"type": "integer", "minimum": 7, "maximum": 9}]},
        },
        "required": ["by", "to", "id"],
        "additionalProperties": False,
    },
    "say.it": {
        "type": "object",
        "properties": {
            "text": SHORT,
            "on": {"type": "string", "format": "date"},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
        },
        "required": ["text"],
        "additionalProperties": False,
        "$defs": {"part": {"type": "object", "properties": {"a": SHORT}, "additionalProperties": False}},
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
MESSAGES = [{"role": "user", "content": "the fox"}]
FORMS = {f"{form.name}{number}": form for number, form in enumerate(DIFFERENT)}


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ToolFormat, LLM]:
    """The random model, speaking one of the formats; of some the marks are tokens of their own."""
    form = FORMS[request.param]
    folder = make_tiny_model(tmp_path_factory.mktemp(form.name))
    hints = {
        "llama": '{"name": function name, "parameters":',
        "pythonic": "[func_name(a=1)]",
        "qwen3_coder": "<function=name><parameter=key>",
        "minimax": '<invoke name="name"><parameter name="key">',
        "functionary_v32": ">>>all",
    }
    template = folder / "chat_template.jinja"
    text = "".join(form.markers[: {"mistral": 1, "json": 0}.get(form.name)]) + hints.get(form.name, "")
    text += next(hint for hint in ("", "[ARGS]", "```json") if form is JSON or form.matches(text + hint))
    assert format_of(text, "auto") is form
    template.write_text(template.read_text() + "{{ '' if true else '''" + text + "''' }}")
    if form.name in ("mistral", "functiongemma", "gemma4", "glm", "harmony", "deepseek", "kimi_k2", "lfm2"):
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        taken = sorted(vocabulary, key=vocabulary.get)[-len(form.markers) :]
        for mark, old in zip(form.markers, taken, strict=True):
            token = vocabulary[mark] = vocabulary.pop(old)
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokenizer["added_tokens"].append({"id": token, "content": mark, "special": True, **flags})
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) in vocabulary]
        path.write_text(json.dumps(tokenizer))
    return form, LLM(str(folder), max_model_len=400, max_batch_requests=16, threads=1)


def asked(llm: LLM, count: int = 6, params: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    several = [SamplingParams(seed=seed, max_tokens=250, temperature=1.0, **(params or {})) for seed in range(count)]
    return [output.outputs[0] for output in llm.chat([MESSAGES] * count, several, tools=TOOLS, **options)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid(model: tuple[ToolFormat, LLM], parallel: bool) -> None:
    _, llm = model
    ended = 0
    for answer in asked(llm, tool_choice="required", parallel_tool_calls=parallel):
        calls = answer.message.tool_calls
        if len(answer.token_ids) < 250:  # it ended by itself, or was brought to an end
            ended += 1
            assert calls
            assert not answer.message.content
            assert parallel or len(calls) == 1
            for call in calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert ended
    named = {"type": "function", "function": {"name": "stop"}}
    for answer in asked(llm, 3, tool_choice=named):
        assert [(call.name, json.loads(call.arguments)) for call in answer.message.tool_calls] == [("stop", {})]


@pytest.mark.sample(8)
def test_free_answers_hold_valid_calls_or_none(model: tuple[ToolFormat, LLM]) -> None:
    """Not more than one call: that is a constraint, too. A model that wants to call must call well."""
    form, llm = model
    opening = form.trigger or form.opening
    tokens = llm.tokenizer.encode(opening, add_special_tokens=False)
    seen = 0
    for answer in asked(llm, 4, {"logit_bias": {tokens[0]: 9.0}}, parallel_tool_calls=False):
        if answer.finish_reason == "stop":
            seen += len(answer.message.tool_calls)
            assert len(answer.message.tool_calls) <= 1
            for call in answer.message.tool_calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    # A random model hardly ever spells an opening of several tokens, nor the mark between messages.
    assert seen or len(tokens) > 1 or form.name == "functionary_v32"


@pytest.mark.sample(8)
def test_an_answer_of_a_form_or_a_call(model: tuple[ToolFormat, LLM]) -> None:
    form, llm = model
    params = {"structured": StructuredOutput(choice=["yes", "no"])}
    if form.trigger is None and form.name not in ("harmony", "functionary_v32"):
        with pytest.raises(InvalidRequest, match="cannot be told from an answer"):
            asked(llm, 1, params)
        return
    for answer in asked(llm, 4, params):
        if answer.finish_reason == "stop":
            assert answer.message.tool_calls or answer.message.content in ("yes", "no")


def test_a_schema_that_cannot_be_followed_is_named(model: tuple[ToolFormat, LLM]) -> None:
    _, llm = model
    bad = {"type": "function", "function": {"name": "b", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
    with pytest.raises(InvalidRequest, match=re.escape("tools[1].function.parameters: ")):
        llm.chat(MESSAGES, tools=[TOOLS[0], bad], tool_choice="required")
    [output] = llm.chat(MESSAGES, SamplingParams(max_tokens=4), tools=[TOOLS[0], bad])
    assert output.outputs[0].finish_reason


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"kv_cache_tokens": 160, "block_size": 4},
            marks=pytest.mark.features("structured", "tools", "n", "preemption"),
        ),
        {"batching": "static"},
        {"prefix_cache": False},
    ],
    ids=str,
)
def test_switches_and_preemption_change_no_call(tiny_model: Path, options: dict[str, Any]) -> None:
    """Thinking, demanded calls and answers of a form side by side, several answers each."""
    settings: dict[str, Any] = {
        "max_model_len": 150,
        "threads": 1,
        "tool_parser": "hermes",
        "reasoning_parser": "think",
    }

    def texts(llm: LLM) -> list[str]:
        chat = engine_of(llm).inputs.chat
        params = [SamplingParams(seed=seed, n=2, max_tokens=60) for seed in range(9)]
        uses = [read_tools(TOOLS, choice) for choice in ("required", "auto", "none")] * 3
        forms = [StructuredOutput(json=SCHEMAS["move"]) if number % 3 else None for number in range(9)]
        wanted = zip(params, uses, forms, strict=True)
        chats = [chat.request(MESSAGES, own.replace(structured=form), use) for own, use, form in wanted]
        outputs = llm.generate([chat.prompt for chat in chats], [chat.params for chat in chats])
        return [answer.text for output in outputs for answer in output.outputs]

    with LLM(str(tiny_model), **settings) as llm:
        expected = texts(llm)
    with LLM(str(tiny_model), **(settings | options)) as llm:
        assert texts(llm) == expected
        assert (llm.statistics().preemptions > 0) == ("kv_cache_tokens" in options)
