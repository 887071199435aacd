"""Calls that are a little wrong, and what models write behind them."""

import pytest

from kvern.tools.formats import FORMATS
from tests.support.tool_calls import read, reader_of


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("lfm2", "<|tool_call_start|>[f(a='it's so', b=1)]<|tool_call_end|>", "", [("f", '{"a": "it\'s so", "b": 1}')]),
        ("lfm2", "<|tool_call_start|>[f(a='one\ntwo', b='x')]<|tool_call_end|>", "",
         [("f", '{"a": "one\\ntwo", "b": "x"}')]),
        ("lfm2", '<|tool_call_start|>[f(a="say "hi", so", b=["it"s", "x"])]<|tool_call_end|>', "",
         [("f", '{"a": "say \\"hi\\", so", "b": ["it\\"s", "x"]}')]),
        ("lfm2", "<|tool_call_start|>[f(a='x\\'y\nz's', b=None), f(a='')]<|tool_call_end|>", "",
         [("f", '{"a": "x\'y\\nz\'s", "b": null}'), ("f", '{"a": ""}')]),
        ("lfm2", "<|tool_call_start|>[f(a={'k': 'it's', 'l': true})]<|tool_call_end|>", "",
         [("f", '{"a": {"k": "it\'s", "l": true}}')]),
        ("gemma4", "<|tool_call>call:f{a:None,b:True,c:Oslo,d:New York,e:12:30}<tool_call|>", "",
         [("f", '{"a": null, "b": true, "c": "Oslo", "d": "New York", "e": "12:30"}')]),
        ("gemma4", "<|tool_call>call:f{a:'it's',b:[x, 2]}<tool_call|>", "", [("f", '{"a": "it\'s", "b": ["x", 2]}')]),
        ("functiongemma", "<start_function_call>call:f{a:None}<end_function_call>", "", [("f", '{"a": null}')]),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 'b\nc', 'd': True, 'e': [1, 2,],},}</tool_call>", "",
         [("f", '{"a": "b\\nc", "d": true, "e": [1, 2]}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": None, "b": "say \\\'x\\\'\t"}}</tool_call>', "",
         [("f", '{"a": null, "b": "say \'x\'\\t"}')]),
        ("hermes", '<tool_call>{"name": "f"}}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}\n</tool_call></tool_call>\n</tool_call>Bye', "Bye", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"} and so on</tool_call> Bye', " Bye", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"} and so on', " and so on", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>\n', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call> is a mark', "\n<tool_call> is a mark",
         [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}"), ("f", "{}")]),
        ("lfm2", "<|tool_call_start|>[f(a=1)]]<|tool_call_end|>)", "", [("f", '{"a": 1}')]),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}}<|tool_call_end|><|tool_call_end|>",
         "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": None}</tool_call>', "", [("f", "{}")]),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{'a': False,}<｜tool▁call▁end｜>", "",
         [("f", '{"a": false}')]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{'a': 'x\n'}", "", [("f", '{"a": "x\\n"}')]),
        ("granite", '<|tool_call|> [{"name": "f", "arguments": {}}, {"name": "f"}]\nBye.', "\nBye.",
         [("f", "{}"), ("f", "{}")]),
        ("json", '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', "", [("f", '{"a": 1}')]),
        ("json", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        ("json", '[{"name": "Anna", "arguments": {}}]', '[{"name": "Anna", "arguments": {}}]', []),
    ],
)  # fmt: skip
def test_calls_that_are_a_little_wrong(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    form = next(form for form in FORMATS if form.name == name)
    for cuts in ([], range(1, len(text))):
        message = read(reader_of(form), text, cuts)
        assert (message.content, [(call.name, call.arguments) for call in message.tool_calls]) == (content, calls)
