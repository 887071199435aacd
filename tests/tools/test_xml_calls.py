"""Calls between XML tags: values are what the tool's schema says, and tags that were forgotten are put up with."""

import json

import pytest

from kvern.tools.formats import FORMATS
from kvern.tools.nested_tags import MINIMAX_M3
from kvern.tools.xml_functions import DSML, GLM, QWEN3_CODER
from tests.support.tool_calls import read, reader_of
from tests.support.xml_calls import PLAN, glm_call, minimax_call, qwen_call


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ([("text", "42"), ("count", "42"), ("maybe", "42"), ("list", "[1]")],
         '{"text": "42", "count": 42, "maybe": "42", "list": [1]}'),
        ([("text", "null"), ("maybe", "null")], '{"text": "null", "maybe": null}'),
        ([("text", "None"), ("maybe", "None")], '{"text": "None", "maybe": null}'),
        ([("count", "about 4"), ("list", "['a', True, (1,)]")], '{"count": "about 4", "list": ["a", true, [1]]}'),
        ([("text", ' "a"\n\n'), ("maybe", '"a"')], '{"text": " \\"a\\"\\n\\n", "maybe": "a"}'),
        ([("either", "4"), ("either", "5"), ("other", "{'a': NaN}")], '{"either": 4, "other": "{\'a\': NaN}"}'),
        ([("either", "true"), ("mark", "2026-01-01")], '{"either": "true", "mark": "2026-01-01"}'),
        ([("list", '["</parameter></invoke></minimax:tool_call></function></arg_value></tool_call>"]')],
         '{"list": ["</parameter></invoke></minimax:tool_call></function></arg_value></tool_call>"]}'),
        ([("list", "[1, 2"), ("text", "x")], '{"list": "[1, 2", "text": "x"}'),
        ([("text", "a</parameter>b</arg_value>c")], '{"text": "a</parameter>b</arg_value>c"}'),
        ([], "{}"),
    ],
)  # fmt: skip
def test_values_between_tags_are_what_the_schema_says(text: list[tuple[str, str]], calls: str) -> None:
    for name, written_call in (("qwen3_coder", qwen_call(*text)), ("minimax", minimax_call(*text)),
                               ("glm", glm_call(*text)), ("glm", glm_call(*text, line="\n"))):  # fmt: skip
        form = next(form for form in FORMATS if form.name == name)
        for cuts in ([], range(1, len(written_call))):
            message = read(reader_of(form, tools={"plan": PLAN}), f"{written_call}\nBye.", cuts)
            assert [(call.name, call.arguments) for call in message.tool_calls] == [("plan", calls)]
            assert message.content == "\nBye."


A = '{"text": "a"}'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen3_coder", "Hm.\n" + qwen_call(("text", "a")).removeprefix("<tool_call>\n"), "Hm.", [("plan", A)]),
        ("qwen3_coder", qwen_call(("text", "a"), end="</function>"), "", [("plan", A)]),
        ("qwen3_coder", qwen_call(("text", "a"), end="</tool_call>."), ".", [("plan", A)]),
        ("qwen3_coder", qwen_call(("text", "a"), end="</func"), "", [("plan", A)]),
        ("qwen3_coder", qwen_call(("text", "a"), end=""), "", [("plan", A)]),
        ("qwen3_coder", qwen_call(("count", "1"), end=""), "", [("plan", '{"count": 1')]),
        ("qwen3_coder", qwen_call(("text", "a"), end="<parameter=c"), "", [("plan", '{"text": "a"')]),
        ("qwen3_coder", qwen_call(("text", "a"), end="<parameter=c>\n12"), "", [("plan", '{"text": "a", "c": ')]),
        ("qwen3_coder", qwen_call(("text", "a"), end="<parameter=text>\n1"), "", [("plan", '{"text": "a"')]),
        ("qwen3_coder", qwen_call(("text", "a")).replace("\n</parameter>", ""), "", [("plan", A)]),
        ("qwen3_coder", qwen_call(("text", "a"), ("count", "1")).replace("\n</parameter>", ""), "",
         [("plan", '{"text": "a", "count": 1}')]),
        ("qwen3_coder", qwen_call(("text", "a")) * 2, "", [("plan", A), ("plan", A)]),
        ("qwen3_coder", qwen_call(("text", "a"), end="") + qwen_call(("text", "a")), "", [("plan", A), ("plan", A)]),
        ("qwen3_coder", "<tool_call>\n<function=plan>\n<parameter=text>\nOs", "", [("plan", '{"text": "Os')]),
        ("qwen3_coder", "<tool_call>\n<function=new>\n</function>\n</tool_call>", "", [("new", "{}")]),
        ("qwen3_coder", "<function=new>\n</function>", "<function=new>\n</function>", []),
        ("qwen3_coder", '<tool_call>{"name": "plan"}</tool_call>', '<tool_call>{"name": "plan"}</tool_call>', []),
        ("qwen3_coder", '<tool_call>\n<function=plan>\n{"text": "a"}\n</function>\n</tool_call>', "", [("plan", A)]),
        ("minimax", minimax_call(("text", "a"), end="</invoke>") * 2, "", [("plan", A), ("plan", A)]),
        ("minimax", minimax_call(("text", "a"), end='<invoke name="new"></invoke>'), "", [("plan", A), ("new", "{}")]),
        ("minimax", minimax_call(("text", "a"), end='</invoke><invoke name="new">{}</invoke></minimax:tool_call> Ok'),
         " Ok", [("plan", A), ("new", "{}")]),
        ("minimax", minimax_call(("text", "a"), end="</minimax:tool_call>").replace("</parameter>\n", ""), "",
         [("plan", A)]),
        ("minimax", '<invoke name="new"></invoke>', '<invoke name="new"></invoke>', []),
        ("minimax", 'Hm.<invoke name="plan"></invoke>', "Hm.", [("plan", "{}")]),
        ("glm", glm_call(("text", "a"), end=""), "", [("plan", A)]),
        ("glm", glm_call(("text", "a")).replace("</arg_value>", ""), "", [("plan", A)]),
        ("glm", glm_call(("text", "a"), end="<arg_key>count</arg_key>"), "", [("plan", '{"text": "a"')]),
        ("glm", glm_call(end=" to day"), "<tool_call>plan to day", []),
        ("glm", glm_call(end='{"text": "a"}</tool_call>'), "", [("plan", A)]),
        ("glm", "<tool_call>new</tool_call>", "", [("new", "{}")]),
    ],
)  # fmt: skip
def test_calls_between_tags_with_marks_missing(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    form = next(form for form in FORMATS if form.name == name)
    for cuts in ([], range(1, len(text))):
        message = read(reader_of(form, tools={"plan": PLAN}), text, cuts)
        assert (message.content, [(call.name, call.arguments) for call in message.tool_calls]) == (content, calls)


NESTED = {
    "type": "object",
    "properties": {
        "place": {"type": "object", "properties": {"zip": {"type": "string"}, "at": {"items": {"type": "number"}}}},
        "names": {"type": "array", "items": {"type": "string"}},
        "count": {"type": "integer"},
    },
}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("<names>|<item>5|</item>|<item>b|</item>|</names>", {"names": ["5", "b"]}),
        ("<place>|<zip>0150|</zip>|<at>|<item>1|</item>|<item>2.5|</item>|</at>|</place>|<count>3|</count>",
         {"place": {"zip": "0150", "at": [1, 2.5]}, "count": 3}),
        ('<names>["a"]|</names>', {"names": ["a"]}),
        ("<other>|<a>x|</b>|</other>", {"other": "]<]minimax[>[<a>x]<]minimax[>[</b>"}),
        ("<count>None|</count>", {"count": None}),
    ],
)  # fmt: skip
def test_tags_within_tags_are_objects_and_lists(written: str, arguments: dict[str, object]) -> None:
    text = f'|<tool_call>\n|<invoke name="f">|{written}|</invoke>\n|</tool_call>'.replace("|", "]<]minimax[>[")
    for cuts in ([], range(1, len(text))):
        message = read(reader_of(MINIMAX_M3, tools={"f": NESTED}), text, cuts)
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("f", arguments)]
        assert message.content == ""


def test_tags_tell_whether_a_value_is_a_string() -> None:
    """Whatever the schema says; a string that is told to be none is in JSON's quotes."""
    parts = (("count", "true", "42"), ("text", "false", '"4"'), ("list", "false", "[1]"), ("either", "false", "7"))
    tags = "".join(f'<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>' for k, s, v in parts)
    text = f'<｜DSML｜function_calls><｜DSML｜invoke name="plan">{tags}</｜DSML｜invoke></｜DSML｜function_calls>'
    message = read(reader_of(DSML[0], tools={"plan": PLAN}), text)
    assert message.tool_calls[0].arguments == '{"count": "42", "text": "4", "list": [1], "either": 7}'


def test_texts_between_tags_come_while_they_form() -> None:
    for form, text in ((QWEN3_CODER, qwen_call(("text", 'He said "n'))), (GLM, glm_call(("text", 'He said "n')))):
        reader = reader_of(form, tools={"plan": PLAN})
        reader.read(text[: text.index('"n') + 2], False)
        assert reader.message.tool_calls[0].arguments == '{"text": "He said \\"n'
