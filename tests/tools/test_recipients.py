"""Functionary 3.2, whose answers are messages behind the names of their recipients."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.models.hub import resolve_model
from kvern.request.pieces import Message
from kvern.request.sampling_params import SamplingParams, StructuredOutput
from kvern.text.chat_template import ChatTemplate
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import Chat, ChatRequest, PromptOptions
from kvern.tools.checks import read_tools
from kvern.tools.definitions import NO_TOOLS, ToolUse
from kvern.tools.formats import format_of
from kvern.tools.recipients import Recipients
from kvern.tools.thinking import SPECIAL_TOKENS
from tests.support import call_templates
from tests.support.tool_calls import embedded_grammars

TEMPLATE = call_templates.NAMED["recipients"]
SCHEMA = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "all_of", "g")]
CALL = ("f", '{"a": ">>>g\\n{}"}')


def read(text: str, cuts: Sequence[int] = (), tools: Sequence[str] = ("f", "all_of", "g")) -> Message:
    parser, message = Recipients().parser(dict.fromkeys(tools, SCHEMA)), Message()
    places = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    for one, another in itertools.pairwise(places):
        message.add(parser.feed(text[one:another]))
    message.add(parser.finish())
    for call in message.tool_calls:
        call.call_id = ""
    return message


TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("all\nIt is so.", "It is so.", []),
    ('f\n{"a": ">>>g\\n{}"}', "", [CALL]),
    ('>>>f\n{"a": ">>>g\\n{}"}', "", [CALL]),
    ('all\nSo.>>>f\n{"a": ">>>g\\n{}"}>>>all_of\n{}', "So.", [CALL, ("all_of", "{}")]),
    ("all\nSo.>>>unknown\n{}", "So.", [("unknown", "{}")]),
    ("f\n{}}\n>>>all\nDone.", "Done.", [("f", "{}")]),
    ("all\nOne.>>>all\nTwo.", "One.\n\nTwo.", []),
    ("all\n>>> f\n{}, and >>>f(1)", ">>> f\n{}, and >>>f(1)", []),
    ("all", "", []),
    ("all\n", "", []),
    ("all_of", "all_of", []),
    ("unknown\n{}", "unknown\n{}", []),
    ("goes on, all\nof it", "goes on, all\nof it", []),
    ('f\n{"a": [1, ', "", [("f", '{"a": [1, ')]),
    ("f\nno object", "f\nno object", []),
    ("", "", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS, ids=range(len(TEXTS)))
@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(1, 60), max_size=8) | st.just(list(range(60))))
def test_messages_are_read(text: str, content: str, calls: list[tuple[str, str]], cuts: list[int]) -> None:
    message = read(text, cuts)
    assert message == read(text)
    assert (message.content, [(call.name, call.arguments) for call in message.tool_calls]) == (content, calls)


def test_a_tool_named_all_and_no_tools() -> None:
    assert [call.name for call in read("all\n{}", tools=["all"]).tool_calls] == ["all"]
    assert read("all\nf", tools=["all"]).content == "f"
    assert read("all\n{}").content == "{}"
    assert read("all\nsee >>>f\n{}", tools=[]) == Message("see >>>f\n{}")


def request(folder: Path, use: ToolUse = NO_TOOLS, form: StructuredOutput | None = None, **options: Any) -> ChatRequest:
    tokenizer, grammars = Tokenizer(folder), embedded_grammars()[1]
    tokenizer.chat_template = ChatTemplate({"default": TEMPLATE})
    chat = Chat(tokenizer, grammars, "auto", "auto", 512)
    return chat.request(
        [{"role": "user", "content": "Hm?"}], SamplingParams(structured=form), use, PromptOptions(**options)
    )


def allows(asked: ChatRequest, text: str) -> bool:
    tokenizer, grammars = embedded_grammars()
    assert asked.params.structured is not None
    matcher = grammars.library.matcher(grammars.compile(asked.params.structured))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_what_is_asked_of_an_answer_is_asked_of_its_messages() -> None:
    folder, choice = resolve_model("kvern-1m"), StructuredOutput(choice=["so", "not so"])
    plain = request(folder)
    assert plain.params.structured is None
    assert plain.message("all\nIt is so.") == Message("It is so.")
    formed = request(folder, form=choice)
    assert allows(formed, "all\nnot so")
    assert not allows(formed, "not so")
    demanded = request(folder, read_tools(TOOLS, "required"))
    assert allows(demanded, 'f\n{"a": 1}>>>all_of\n{}')
    assert not allows(demanded, "all\nf")
    one = request(folder, read_tools(TOOLS, None, False))
    assert allows(one, "all\nSo, >> f.") and allows(one, "all\nSo.>>>f\n{}") and allows(one, "f\n{}")
    assert not allows(one, "f\n{}>>>f\n{}") and not allows(one, 'all\nSo.>>>f\n{"b": 1}')
    either = request(folder, read_tools(TOOLS), choice)
    assert allows(either, "all\nso") and allows(either, "f\n{}")
    assert not allows(either, "so")


def test_calls_are_sent_back_where_the_template_joins_arguments_to_a_text() -> None:
    """As Functionary's own does."""
    joined = TEMPLATE.replace("{{ f.name }}\n{{ f.arguments | tojson }}", "{{ f.name + '\\n' + f.arguments }}")
    template = ChatTemplate({"default": joined})
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "So.", "tool_calls": calls}]
    text = template.render(template.fit_messages(messages, True, SPECIAL_TOKENS), TOOLS, False, SPECIAL_TOKENS)
    assert text.endswith('>>>all\nSo.>>>f\n{"a": 1}<|over|>')
    form = format_of(joined, "auto")
    assert form is not None and form.name == "functionary_v32"
