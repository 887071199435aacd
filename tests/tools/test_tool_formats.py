"""Parsers of tool calls and thinking: however a text is cut, they say the same, and nothing of it is lost."""

import json
import re
import typing
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.config import EngineConfig
from kvern.tools.chat import AnswerReader
from kvern.tools.formats import FORMATS, format_of
from kvern.tools.json_calls import HERMES, JsonCalls
from kvern.tools.thinking import THINKING, thinking_of
from kvern.tools.thinking_splitter import Thought, beginning_of
from kvern.tools.tool_format import ToolFormat
from tests.support.sampling import examples
from tests.support.tool_calls import DIFFERENT, NAMES, TYPED_BY_SCHEMA, calls_of, everywhere, read, reader_of, typed

BY_NAME = [pytest.param(form, id=f"{form.name}{number}") for number, form in enumerate(DIFFERENT)]

OWN_MARKS = {
    "qwen3_coder": (
        "<tool_call>",
        "</parameter>",
        "</parameter>\n<p>",
        "\n</function>\n}",
        "x <parameter=f>",
        "\n",
        "\n\n<",
    ),
    "minimax": (
        "<minimax:tool_call>",
        "</parameter>",
        "</parameter>\n<p>",
        "x</invoke>",
        'x <parameter name="f">',
        "\n",
    ),
    "glm": ("<tool_call>", "</arg_value>", "x</arg_value>\n<", "x<arg_key>", "\n", "<arg_value>"),
}
"""That may be in values; others end them, as they do for a model that forgot the value's own end."""
SIGNS = ["{", "}", "[", "]", '"', "\\", "<", "</", ",", ":", " ", "\n", "'", "(", ")", ";", "🦊", "é", "=", "|", "name"]


def written(form: ToolFormat, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of this family writes them."""
    texts = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    names = [name for name, _ in calls]
    pairs = list(zip(names, texts, strict=True))
    if isinstance(form, JsonCalls):
        listed = (form.between or "").join(form.before + n + form.middle + t + form.after for n, t in pairs)
        return form.begin + listed + form.end
    match form.name:
        case "mistral" if form.matches("[TOOL_CALLS]"):
            listed = ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in pairs)
            return f"[TOOL_CALLS] [{listed}]"
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in pairs)
        case "qwen3_coder":
            return "\n".join(f"<tool_call>\n<function={n}>\n{qwen(v)}</function>\n</tool_call>" for n, v in calls)
        case "minimax":
            invokes = "\n".join(f'<invoke name="{n}">\n{minimax(v)}</invoke>' for n, v in calls)
            return f"<minimax:tool_call>\n{invokes}\n</minimax:tool_call>"
        case "glm":
            return "\n".join(f"<tool_call>{n}\n{glm(v)}</tool_call>" for n, v in calls)
        case "harmony":
            head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
            return "<|start|>assistant".join(head.format(*pair) for pair in pairs)
        case "functionary_v32":
            return ">>>".join(f"{name}\n{text}" for name, text in pairs)
        case "pythonic" | "lfm2":
            begin, end = form.markers or ("", "")  # type: ignore[attr-defined]
            return f"{begin}[{', '.join(f'{name}(**{text})' for name, text in pairs)}]{end}"
        case "deepseek" if form.matches("<｜tool▁calls▁begin｜>```json"):
            head = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
            listed = "\n".join(head.format(*pair) for pair in pairs)
            return f"<｜tool▁calls▁begin｜>{listed}<｜tool▁calls▁end｜>"
        case "deepseek":
            head = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜>{''.join(head.format(*pair) for pair in pairs)}<｜tool▁calls▁end｜>"
        case "solar":
            head = "<|tool_call:begin|>id{}<|tool_call:name|>{}<|tool_call:args|>{}<|tool_call:end|>"
            listed = "".join(head.format(number, name, text) for number, (name, text) in enumerate(pairs))
            return f"<|tool_calls|>{listed}"
        case "kimi_k2":
            head = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
            listed = "".join(head.format(name, number, text) for number, (name, text) in enumerate(pairs))
            return f"<|tool_calls_section_begin|>{listed}<|tool_calls_section_end|>"
        case "gemma4" | "functiongemma":
            begin, end, quote = form.markers  # type: ignore[attr-defined]
            return "".join(f"{begin}call:{name}{gemma(value, quote)}{end}" for name, value in calls)
        case _:
            raise NotImplementedError(f"say here how models write calls of the format {form.name}")


def qwen(value: dict[str, Any]) -> str:
    return "".join(f"<parameter={key}>\n{in_tags(item)}\n</parameter>\n" for key, item in value.items())


def minimax(value: dict[str, Any]) -> str:
    return "".join(f'<parameter name="{key}">{in_tags(item)}</parameter>\n' for key, item in value.items())


def glm(value: dict[str, Any]) -> str:
    pairs = value.items()
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{in_tags(item)}</arg_value>\n" for key, item in pairs)


def in_tags(value: Any) -> str:
    """As models write it that are told that strings are strings."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: Any, quote: str) -> str:
    """A value in Gemma's notation, where texts hold what they like but the quote."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote}{key}{quote}:{gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


@pytest.mark.sample(5)
@pytest.mark.parametrize("form", BY_NAME)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_whole_calls_arrive_whatever_the_cutting(form: ToolFormat, data: st.DataObject) -> None:
    """Also with strings that hold braces, quotes and the format's own marks."""
    given_marks = () if form.name in ("gemma4", "functiongemma") else OWN_MARKS.get(form.name, form.markers)
    marks = st.sampled_from(given_marks or ("}",))
    calls = [(name, {**given, "m": data.draw(marks)}) for name, given in data.draw(calls_of)]
    if form.name == "pythonic":
        calls = [(name.replace("-", "_").replace(".", "_"), given) for name, given in calls]
        calls = [(name if name in NAMES else "f", given) for name, given in calls]
    tools = NAMES
    if form.name in TYPED_BY_SCHEMA:
        calls, tools = typed(calls)
    if form.name.endswith(("gemma", "gemma4")):
        quote = form.markers[2]
        calls = [(name, json.loads(json.dumps(given).replace(json.dumps(quote)[1:-1], ""))) for name, given in calls]
    text = written(form, calls)
    if form.trigger is not None:
        text = data.draw(st.sampled_from(["", "Well.\n\n"])) + text
    message = read(reader_of(form, tools=tools), text, data.draw(everywhere))
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    assert message.content == ("Well." if text.startswith("Well.") else "")
    assert message == read(reader_of(form, tools=tools), text)


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", BY_NAME)
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_broken_texts_are_read_the_same_in_pieces_and_as_a_whole(form: ToolFormat, data: st.DataObject) -> None:
    """Half a call, a call with something in the wrong place, marks strewn about: no difference, and no error."""
    text = written(form, data.draw(calls_of))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(place, min(place + 3, len(text))))
        text = text[:place] + data.draw(st.sampled_from([*SIGNS, *form.markers, ""])) + text[end:]
    text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]
    whole = read(reader_of(form), text)
    assert read(reader_of(form), text, data.draw(everywhere)) == whole
    if not whole.tool_calls and form.name != "harmony":
        assert whole.content == text


@pytest.mark.parametrize("form", BY_NAME)
@settings(max_examples=examples(25), deadline=None)
@given(text=st.lists(st.sampled_from(SIGNS) | st.text(max_size=5), max_size=20).map("".join), cuts=everywhere)
def test_text_without_calls_is_content(form: ToolFormat, text: str, cuts: list[int]) -> None:
    message = read(reader_of(form), text, cuts)
    if not message.tool_calls:
        assert message.content == text
    assert all(mark not in text for mark in form.markers) or form.trigger is None or not message.tool_calls


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> ok', " ok", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": "{\\"x\\": 1}", "name": "f"}', "", [("f", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
        ("hermes", "<tool_call>never</tool_call>", "<tool_call>never</tool_call>", []),
        ("llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama", '{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}', []),
        ("llama", 'Sure: {"name": "f", "parameters": {}}', 'Sure: {"name": "f", "parameters": {}}', []),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "", [("f", "{}")]),
        ("mistral", "[TOOL_CALLS] no", "[TOOL_CALLS] no", []),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x}<|"|>,b:[1,{c:true}]}<tool_call|>', "",
         [("f", '{"a": "x}", "b": [1, {"c": true}]}')]),
        ("functiongemma", "<start_function_call>call:f{city:<escape>Oslo<escape>}<end_function_call>", "",
         [("f", '{"city": "Oslo"}')]),
        ("functiongemma", "<start_function_call>call:f{city:}", "<start_function_call>call:f{city:}", []),
        ("pythonic", "[f(a=1, b='x)', c=[True, None])]", "", [("f", '{"a": 1, "b": "x)", "c": [true, null]}')]),
        ("pythonic", "[f(a=1), f(a=b)]", ", f(a=b)]", [("f", '{"a": 1}')]),
        ("pythonic", "[f(1)]", "[f(1)]", []),
        ("lfm2", "I look.<|tool_call_start|>[f(a=1), new(b='x')]<|tool_call_end|>Wait.", "I look.Wait.",
         [("f", '{"a": 1}'), ("new", '{"b": "x"}')]),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>", []),
        ("lfm2", "<|tool_call_start|>f(a=1)", "<|tool_call_start|>f(a=1)", []),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜> x", " x", [("f", "{}")]),
        ("deepseek", "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>", "",
         [("f", "{}")]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no {}",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no {}", []),
        ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1\n```<｜tool▁call▁end｜>', "",
         [("f", '{"a": 1\n```<｜tool▁call▁end｜>')]),
        ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>{"a": 1}', "", [("function", '{"a": 1}')]),
        ("kimi_k2", '<|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>{"a": 1', "", [("f", '{"a": 1')]),
        ("kimi_k2", "<|tool_calls_section_begin|> no", "<|tool_calls_section_begin|> no", []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
    ],
)  # fmt: skip
def test_examples(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    form = next(form for form in FORMATS if form.name == name)
    for cuts in ([], range(1, len(text))):
        message = read(reader_of(form), text, cuts)
        assert (message.content, [(call.name, call.arguments) for call in message.tool_calls]) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r"""<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>"""),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>['\\ud800']</parameter></function></tool_call>"),
        ("pythonic", r"[f(a='\ud800')]"),
        ("lfm2", r"""<|tool_call_start|>[f(a="\ud800")]<|tool_call_end|>"""),
    ],
)
def test_halves_of_characters_stay_escapes(name: str, text: str) -> None:
    """No answer with them could be encoded."""
    form = next(form for form in FORMATS if form.name == name)
    message = read(reader_of(form), text)
    assert json.loads(message.tool_calls[0].arguments.encode())["a"] in ("\ud800", ["\ud800"])


def test_kimis_ids_are_handed_on() -> None:
    """Its template writes them again. No two calls of an answer have the same."""
    form = next(form for form in FORMATS if form.name == "kimi_k2")
    reader = reader_of(form)
    text = written(form, [("f", {}), ("a-b.c", {})])
    reader.read(text + text, True)
    ids = [call.call_id for call in reader.message.tool_calls]
    assert ids[:2] == ["functions.f:0", "functions.a-b.c:1"]
    assert len(set(ids)) == 4


def test_arguments_come_while_they_form() -> None:
    """Of a call in JSON nothing waits that is certain."""
    reader = reader_of(HERMES)
    text = '<tool_call>{"name": "f", "arguments": {"city": "Os'
    reader.read(text, False)
    assert reader.message.tool_calls[0].arguments == '{"city": "Os'


@pytest.mark.sample(12)
@pytest.mark.parametrize("form", [form for form in THINKING if not form.in_turns], ids=lambda form: form.name)
@pytest.mark.parametrize("beginning", ["possible", "inside", "over"])
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_thinking_is_split_off(form: Any, beginning: Any, data: st.DataObject) -> None:
    """With calls behind it; a call inside the thinking is a thought."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    thought = data.draw(st.sampled_from(["", "Hm, 2 < 3.", f"I could {call}.", "<thin", "</thin"]))
    answer = data.draw(st.sampled_from(["", "Yes.", call, f"Yes. {call}"]))
    gap = data.draw(st.sampled_from(["", "\n\n"]))
    text = {"inside": "", "possible": form.begin, "over": ""}[beginning] + gap + thought + gap
    text = answer if beginning == "over" else text + form.end + gap + answer

    def fresh() -> AnswerReader:
        return reader_of(HERMES, Thought(form, beginning))

    message = read(fresh(), text, data.draw(everywhere))
    assert message == read(fresh(), text)
    assert message.reasoning == ("" if beginning == "over" else thought)
    assert message.content == ("Yes." if answer.startswith("Yes.") else "")
    assert len(message.tool_calls) == (call in answer)
    cut = text[: data.draw(st.integers(0, len(text)))]
    assert read(fresh(), cut, data.draw(everywhere)) == read(fresh(), cut)


def test_the_options_name_all_of_them() -> None:
    kinds = typing.get_type_hints(EngineConfig)
    assert set(typing.get_args(kinds["tool_parser"])) == {"auto", "none", *(form.name for form in FORMATS)}
    assert set(typing.get_args(kinds["reasoning_parser"])) == {"auto", "none", *(form.name for form in THINKING)}


def test_prompts_that_begin_thinking() -> None:
    think, mistral, *_ = THINKING
    assert beginning_of("<|assistant|>\n<think>\n", think) == "inside"
    assert beginning_of("<think>\n\n</think>\n\n", think) == "over"
    assert beginning_of("</think>Fine.<|assistant|>", think) == "possible"
    assert thinking_of("{{ '<think>' }}...</think>", "auto") is think
    assert thinking_of("{{ '<think>' }}...</think>", "none") is None
    assert thinking_of("", "auto") is None
    assert thinking_of("", "mistral") is mistral


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' }} <parameter=", "qwen3_coder"),
        ("""{{ '<minimax:tool_call>' }}<invoke name="{{ name }}"><parameter name="{{ key }}">""", "minimax"),
        ("{{ '<tool_call>' + name }}<arg_key>", "glm"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}", "mistral"),
        ("{{ '<|tool_calls|><|tool_call:begin|>' }}", "solar"),
        ("""{{ '<|tool_call>call:' }}{{ '<|"|>' }}""", "gemma4"),
        ("<start_function_call> <escape>", "functiongemma"),
        ("in the format [func_name1(params_name1=params_value1, params_name2=...), func_name2(params)]", "pythonic"),
        ("{{ '<|start|>' + role + '<|channel|>final<|message|>' }}{{ '<|end|>' }}", "harmony"),
        ("{{ '<｜tool▁calls▁begin｜>' }}```json", "deepseek"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseek"),
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("List of tools: [", "lfm2"),
        ("{{ messages }}", "json"),
        ("{{ '<TOOLCALL>[' }}", "nemotron"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ("{{ '<|tool|>' }}", "phi4_mini"),
        ("prefix them with functools[", "functools"),
        ("{{ '<tool_calls>' }}", "tool_calls"),
    ],
)
def test_templates_that_write_no_calls_say_the_format(template: str, name: str) -> None:
    found = format_of(template, "auto")
    assert found is not None
    assert found.name == name
    assert found.matches(template) or name == "json"
    assert format_of(template, "none") is None
    named = format_of("", "mistral")
    assert named is not None and re.match("mistral", named.name)
