"""Marks of thinking: found by what a chat template writes, and taken out of answers wherever they stand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.tools.chat import AnswerReader, PlainParser
from kvern.tools.json_calls import HERMES
from kvern.tools.thinking import THINKING, thinking_of
from kvern.tools.thinking_splitter import Thought, beginning_of

CALL = '<tool_call>{"name": "f", "arguments": {"text": "a <think>b</think>"}}</tool_call>'
BY_NAME = {form.name: form for form in THINKING}


def template(thought: str, said: str = "{{ m.content }}", prompt: str = "", user: str = "{{ m.content }}") -> str:
    """Writes a message's thought, what it said, and the end of a prompt so."""
    assistant = "{% if m.reasoning_content %}" + thought + "{% endif %}" + said
    message = f"{{% if m.role == 'assistant' %}}{assistant}{{% else %}}{user}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}<|assistant|>{prompt}{{% endif %}}"
    return f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{message}{{% endfor %}}{prompt}"


THOUGHT = "{{ m.reasoning_content }}"
SUFFIX = "{% set name = 'think:own' %}"
TAGS = "{% macro tag(how, what) %}<|{{ how }}|>{{ what }}<|sep|>{% endmacro %}"
KIMI = TAGS + template(
    f"{{{{ tag('open', 'think') }}}}{THOUGHT}{{{{ tag('close', 'think') }}}}",
    "{{ tag('open', 'response') + m.content + tag('close', 'response') }}",
)


@pytest.mark.parametrize(
    ("source", "begin", "end", "wraps"),
    [
        (template(f"<mm:think>{THOUGHT}</mm:think>"), "<mm:think>", "</mm:think>", ()),
        (SUFFIX + template(f"<{{{{ name }}}}>{THOUGHT}</{{{{ name }}}}>\n"), "<think:own>", "</think:own>", ()),
        (template(f"[MIND]\n{THOUGHT}\n[/MIND]"), "[MIND]", "[/MIND]", ()),
        (template(f"<|begin_thought|>{THOUGHT}<|end_thought|>"), "<|begin_thought|>", "<|end_thought|>", ()),
        (template(f"<|muse|>{THOUGHT}<|/muse|>"), "<|muse|>", "<|/muse|>", ()),
        (template(f"<|X_START|>{THOUGHT}<|X_END|>", "<|SAY_START|>{{ m.content }}<|SAY_END|>"), "<|X_START|>",
         "<|X_END|>", ("<|SAY_START|>", "<|SAY_END|>")),
        (KIMI, "<|open|>think<|sep|>", "<|close|>think<|sep|>", BY_NAME["kimi_k3"].wraps),
        (template(f"{THOUGHT}\n[BEGIN FINAL RESPONSE]\n"), BY_NAME["apriel"].begin, "[BEGIN FINAL RESPONSE]",
         BY_NAME["apriel"].wraps),
        (template("", prompt="<|inner_thought|>"), None, None, ()),
        (template("", prompt="<thinking>\n"), "<thinking>", "</thinking>", ()),
        (template("", prompt="<|START_THINKING|><|END_THINKING|>"), "<|START_THINKING|>", "<|END_THINKING|>",
         BY_NAME["cohere"].wraps),
        (template("", user="Never write <|think|>. {{ m.content }}<|end|>"), None, None, ()),
        (template(THOUGHT), None, None, ()),
        ("{{ raise_exception('no') }}", None, None, ()),
        ("{% if", None, None, ()),
    ],
    ids=range(15),
)  # fmt: skip
def test_marks_are_learnt(source: str, begin: str | None, end: str | None, wraps: tuple[str, ...]) -> None:
    form = thinking_of(source, "auto")
    found = (None, None, ()) if form is None else (form.begin, form.end, form.wraps)
    assert found == (begin, end, wraps)
    assert thinking_of(source, "none") is None


def test_marks_that_are_several_tokens_stay_visible() -> None:
    form = thinking_of(KIMI, "auto")
    assert form is not None
    assert {"<|open|>", "<|close|>", "<|sep|>"} <= set(form.markers)


TEXTS: list[tuple[str, Any, str, str, str]] = [
    ("think", "inside", "a</think>b<think>c</think>d", "a\n\nc", "bd"),
    ("think", "possible", "<think>a</think>\n\n<think>\nc\n</think>\n\nd", "a\n\nc", "d"),
    ("think", "over", "<think>a</think>b", "a", "b"),
    ("think", "possible", "b <think>never closed", "never closed", "b "),
    ("think", "inside", "never closed", "never closed", ""),
    ("think", "inside", "\n<think>\n<think>opened again</think>b", "opened again", "b"),
    ("think", "possible", "<think>" * 3000 + "a</think>b", "a", "b"),
    ("think", "over", "</think>\n\nb", "", "b"),
    ("think", "inside", "a<think>b</think>c</think>d", "a<think>b", "cd"),
    ("think", "possible", 'Write `<think>`, "</think>".', "", 'Write `<think>`, "</think>".'),
    ("think", "possible", "```\n<think>a</think>\n```\n<think>b</think>c", "b", "```\n<think>a</think>\n```\nc"),
    ("think", "possible", "1 <thi", "", "1 <thi"),
    ("minimax_m3", "possible", "<mm:think>a</mm:think>b", "a", "b"),
    ("cohere", "inside", "a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>", "a", "b"),
    ("cohere", "over", "<|START_RESPONSE|>b<|END_RESPONSE|>", "", "b"),
    ("kimi_k3", "inside",
     "a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|>", "a", "b"),
    ("kimi_k3", "over", "b<|close|>response<|sep|>", "", "b"),
    ("solar", "possible", "<|think|>a<|end|><|begin|>assistant<|content|>b", "a", "b"),
    ("solar", "possible", "<|content|>b", "", "b"),
    ("muse", "possible", " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b", "a", "b"),
    ("muse", "possible", " to=user<|message|>b", "", "b"),
    ("apertus", "possible", "<|inner_prefix|>a<|inner_suffix|>b", "a", "b"),
    ("apriel", "inside", "Here are my reasoning steps:\na\n[BEGIN FINAL RESPONSE]\nb[END FINAL RESPONSE]", "a", "b"),
    ("apriel", "inside", "a\n<tool_calls>[]", "a", "<tool_calls>[]"),
]  # fmt: skip


def read(reader: AnswerReader, text: str, cuts: list[int]) -> AnswerReader:
    for cut in sorted(cuts):
        reader.read(text[:cut], False)
    reader.read(text, True)
    return reader


@pytest.mark.parametrize(("name", "beginning", "text", "reasoning", "content"), TEXTS, ids=range(len(TEXTS)))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_thinking_is_found_wherever_it_stands(
    name: str, beginning: Any, text: str, reasoning: str, content: str, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12) | st.just(list(range(min(len(text), 200)))))
    found = read(AnswerReader(PlainParser(), Thought(BY_NAME[name], beginning)), text, cuts).message
    assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_arguments_and_forms_keep_what_looks_like_marks(step: int) -> None:
    think = BY_NAME["think"]
    text = f"<think>a</think>b<think>c</think>{CALL}"
    reader = AnswerReader(HERMES.parser({"f": {"type": "object"}}), Thought(think, "possible"))
    message = read(reader, text, list(range(0, len(text), step))).message
    assert (message.reasoning, message.content) == ("a\n\nc", "b")
    assert message.tool_calls[0].arguments == '{"text": "a <think>b</think>"}'
    form = '{"a": "b <think>c</think>"}'
    for name, opener in (("think", ""), ("kimi_k3", "<|open|>response<|sep|>")):
        text = f"a{BY_NAME[name].end}\n{opener}{form}"
        reader = AnswerReader(PlainParser(), Thought(BY_NAME[name], "inside"), exact=True)
        message = read(reader, text, list(range(0, len(text), step))).message
        assert (message.reasoning, message.content) == ("a", form)


def test_prompts_tell_where_the_answer_begins() -> None:
    kimi, cohere, apriel = (BY_NAME[name] for name in ("kimi_k3", "cohere", "apriel"))
    assert beginning_of("<|open|>think<|sep|>", kimi) == "inside"
    assert beginning_of("<|open|>response<|sep|>", kimi) == "over"
    assert beginning_of("<|START_THINKING|><|END_THINKING|>", cohere) == "over"
    assert beginning_of("<|begin_assistant|>", apriel) == "inside"
