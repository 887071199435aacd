"""Chat templates that take messages or tools in one form only get them in that form; nothing is lost silently."""

from pathlib import Path
from typing import Any

import pytest

from kvern.errors import InvalidRequest
from kvern.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_level, save

CALLS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.id }}:"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)  # fmt: skip
SINGLE = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}{% endfor %}"  # noqa: E501
FIRST = CALLS.replace("in m.tool_calls %}{{", "in m.tool_calls[:1] %}{{")
NINE = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}{% endfor %}{% endfor %}"  # noqa: E501
NAMED = CALLS.replace(
    "{{ m.content }}", "{{ m.content }}{% if m.role == 'tool' %} of {{ m.name | default('?') }}{% endif %}"
)
PARTS = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"  # noqa: E501
USERS_PARTS = PARTS.replace("{% for part", "{% if m.role != 'user' %}{{ m.content }}{% else %}{% for part").replace(
    "{% endfor %}{% endfor %}", "{% endfor %}{% endif %}{% endfor %}"
)
USER: dict[str, Any] = {"role": "user", "content": "Hm?"}


def call(identity: str, name: str, arguments: Any = None) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def result(identity: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": content, **more}


TWO = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [call("a", "f", {"x": 1}), call("b", "g")]},
    result("b", "of b"),
    result("a", "of a"),
    {"role": "assistant", "content": "Fine."},
]


def prompt(folder: Path, template: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    save(folder, byte_level(), template)
    return Tokenizer(folder).chat_prompt(messages, tools)


@pytest.mark.parametrize("template", [SINGLE + CALLS, FIRST], ids=["refused", "dropped"])
def test_templates_of_one_call_a_message_get_one_each(template: str, tmp_path: Path) -> None:
    written = '[user]Hm?[assistant]a:f{"x": 1}[tool]of a[assistant]b:g{}[tool]of b[assistant]Fine.'
    assert prompt(tmp_path, template, TWO) == written
    assert prompt(tmp_path, CALLS, TWO).startswith('[user]Hm?[assistant]a:f{"x": 1}b:g{}[tool]of b')


def test_ids_are_mapped_where_the_template_wants_short_ones(tmp_path: Path) -> None:
    ids = ["call_0123456789", "toolu_01ABC", "x", "abcDEF123", ""]
    calls = [{"role": "assistant", "content": "", "tool_calls": [call(each, "f")]} for each in ids]
    messages = [
        USER,
        *(message for each, said in zip(ids, calls, strict=True) for message in (said, result(each, "r"))),
    ]
    wanted = NINE + CALLS.replace("{{ m.content }}", "{{ m.tool_call_id }}")
    parts = prompt(tmp_path, wanted, messages).split("[assistant]")[1:]
    assert len({part[:9] for part in parts}) == len(ids)
    assert all(part[:9].isalnum() and part.endswith(f"[tool]{part[:9]}") for part in parts)
    assert parts[3].startswith("abcDEF123:")
    assert prompt(tmp_path, CALLS, messages).count("call_0123456789:") == 1


def test_ids_that_the_template_takes_stay(tmp_path: Path) -> None:
    calls = [call("call_0123456789", "f"), call("x", "g")]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    written = prompt(tmp_path, NINE.replace("!= 9", "< 9") + CALLS, messages)
    assert "call_0123456789:f" in written
    assert "]x:g" not in written and "}x:g" not in written


def test_results_say_whose_they_are(tmp_path: Path) -> None:
    assert "of b of g[tool]of a of f" in prompt(tmp_path, NAMED, TWO)
    assert "of a of h" in prompt(tmp_path, NAMED, [*TWO[:2], result("a", "of a", name="h")])
    assert prompt(tmp_path, NAMED, [USER, result("unknown", "r")]).endswith("r of ?")


@pytest.mark.parametrize("template", [PARTS, USERS_PARTS], ids=["all", "users"])
def test_texts_come_in_parts_where_the_template_writes_parts_only(template: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be short."}, USER, {"role": "assistant", "content": "Yes."}, USER]
    assert prompt(tmp_path, template, messages) == "[system]Be short.[user]Hm?[assistant]Yes.[user]Hm?"


@pytest.mark.parametrize(
    ("arguments", "content"), [('{"x": 1}', None), ({"x": 1}, ""), ('{"x": 1}', [{"type": "text", "text": "r"}])]
)
def test_nulls_and_texts_of_programs_are_put_right(arguments: Any, content: Any, tmp_path: Path) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("a", "f", arguments)]},
        result("a", content),
    ]
    written = prompt(tmp_path, CALLS, messages)
    assert written.startswith('[user]Hm?[assistant]a:f{"x": 1}[tool]')
    assert "None" not in written


DEFINED = "{% for t in tools %}<{{ t.function.name }}{{ ':' + t.function.description }}:"
PROPERTIES = (
    DEFINED
    + "{% for n, p in t.function.parameters.properties.items() %}{{ n + '=' + p.type + p.description }}"
    + "{% endfor %}>{% endfor %}"
)
SCHEMA = DEFINED + "{{ t.function.parameters | tojson }}>{% endfor %}"
CITY = {"type": "object", "properties": {"c": {"type": "string", "description": "d"}}, "required": ["c"]}


def one_of(schema: object) -> dict[str, Any]:
    return {"parameters": {"type": "object", "properties": {"c": schema}}}


@pytest.mark.parametrize(
    ("function", "written"),
    [
        ({}, "<f::>"),
        ({"description": "D"}, "<f:D:>"),
        ({"description": None, "parameters": None}, "<f::>"),
        ({"parameters": {}}, "<f::>"),
        ({"parameters": CITY}, "<f::c=stringd>"),
        (one_of({"type": ["null", "integer"]}), "<f::c=integer>"),
        (one_of({"anyOf": [{"type": "null"}, {"type": "number"}]}), "<f::c=number>"),
        (one_of({"enum": ["a"], "description": None}), "<f::c=string>"),
        ({"parameters": {"type": "object", "properties": {"c": True}, "required": None}}, "<f::c=string>"),
        ({"parameters": {"properties": {"c": {"properties": {"e": {}}}}}}, "<f::c=object>"),
    ],
    ids=range(10),
)  # fmt: skip
def test_definitions_are_filled_in(function: dict[str, Any], written: str, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    assert prompt(tmp_path, PROPERTIES, [USER], tools) == written
    assert "Undefined" not in prompt(tmp_path, SCHEMA, [USER], tools)


def test_definitions_that_a_template_takes_are_left_as_they_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"c": {}}}}}]
    assert prompt(tmp_path, "{{ tools | tojson }}", [USER], tools).endswith(
        '"parameters": {"properties": {"c": {}}}}}]'
    )
    with pytest.raises(InvalidRequest, match="no attribute 'version'"):
        prompt(tmp_path, "{{ '' + tools[0].version }}", [USER], tools)


def test_a_template_that_counts_tools_gets_an_empty_list(tmp_path: Path) -> None:
    assert prompt(tmp_path, "{{ tools | length }}{{ messages[0].content }}", [USER]) == "0Hm?"


def test_tools_that_only_a_system_message_brings_along(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}<{{ tools[0].function.name }}>{% else %}{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt(tmp_path, template, [USER], tools) == "<f>Hm?"
    assert prompt(tmp_path, template, [{"role": "system", "content": "s"}, USER], tools) == "s<f>Hm?"


def test_a_template_that_refuses_everything_is_tried_out_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="never"):
        prompt(tmp_path, "{{ raise_exception('never') }}", [{"role": "system", "content": "s"}, *TWO])
