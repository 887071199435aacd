"""What clients send in the messages of a conversation, and of thinking, as chat templates get it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern import LLM
from kvern.api.chat_fields import read_thinking
from kvern.api.conversation import plain_messages, template_variables
from kvern.tools.encoding import Encoding
from kvern.tools.thinking import THINKING
from kvern.tools.thinking_splitter import ThoughtTokens


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_what_was_thought_stands_under_every_name(name: str) -> None:
    said = {"role": "assistant", "content": "b", name: "a", "reasoning_details": [{"type": "reasoning.text"}]}
    [plain] = plain_messages([said])
    every = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "a")
    assert plain == {"role": "assistant", "content": "b", **every}
    [nothing] = plain_messages([{"role": "assistant", name: {"a": 1}, "refusal": "no"}])
    assert nothing == {"role": "assistant", "content": "no", "refusal": "no"}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ('{"a": ', {"unparsed_arguments": '{"a": '}),
        ("[1]", {"unparsed_arguments": "[1]"}),
        ("[" * 5000, {"unparsed_arguments": "[" * 5000}),
        (None, {}),
    ],
    ids=range(8),
)
def test_calls_that_a_model_broke_do_not_end_a_conversation(arguments: str | None, seen: dict[str, Any]) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [plain] = plain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert plain["content"] == ""
    assert plain["tool_calls"][0]["function"]["arguments"] == seen


def test_parts_of_results_and_refusals() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    found = plain_messages([{"role": "tool", "tool_call_id": "x", "content": parts}, {"role": "user"}])
    assert [message["content"] for message in found] == ["a\nb", ""]


BOTH = ("enable_thinking", "thinking")


@pytest.mark.parametrize(
    ("body", "budget", "on", "variables"),
    [
        ({}, None, None, {}),
        ({"thinking_budget": 5}, 5, None, {}),
        ({"thinking_token_budget": 5, "thinking_budget": 5}, 5, None, {}),
        ({"thinking_token_budget": -1}, None, None, {}),
        ({"reasoning_effort": "none"}, None, False, {"reasoning_effort": "none"}),
        ({"reasoning_effort": "minimal"}, None, True, {"reasoning_effort": "minimal"}),
        ({"reasoning": {"effort": "high", "max_tokens": 7}}, 7, True, {"reasoning_effort": "high"}),
        ({"reasoning": {"enabled": False}}, None, False, {}),
        ({"reasoning": {"effort": "high"}, "enable_thinking": False}, None, False, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, None, False, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 3, "clear_thinking": False}}, 3, True,
         {"clear_thinking": False}),
        ({"thinking": True}, None, True, {}),
    ],
    ids=range(12),
)  # fmt: skip
def test_thinking_under_all_its_names(
    body: dict[str, Any], budget: int | None, on: bool | None, variables: dict[str, Any]
) -> None:
    found = read_thinking(body)
    assert found.budget == budget
    assert found.variables == variables | ({} if on is None else dict.fromkeys(BOTH, on))
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}, "documents": [{"text": "a"}]}
    template = template_variables({**body, **kwargs})
    assert (template["enable_thinking"], template["documents"]) == (True, [{"text": "a"}])


def test_thinking_that_is_not_shown() -> None:
    for body in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        assert not read_thinking(body).include
    assert read_thinking({"include_reasoning": None, "reasoning": {"exclude": None}}).include


WORDS = ["a", " ", "<think>", "</think>", "<th", "ink>", "</", "think", ">", "é", "", "`", "```\n"]


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=20), st.data(), st.sampled_from(["possible", "inside", "over"])
)
def test_thought_tokens_are_those_between_the_marks(token_ids: list[int], data: st.DataObject, beginning: Any) -> None:
    """However the answer grows, whether marks are one token or several, and how often the model thinks."""
    form = THINKING[0]
    spelled = [word.encode() for word in WORDS]
    text = b"".join(spelled[token] for token in token_ids)
    spans, place, segment, fences = [], 0, 0, 0
    if beginning == "possible" and text.lstrip().startswith(b"<think>"):
        beginning, place = "inside", text.find(b"<think>") + len(b"<think>")
        beginning_in_text = "possible"
    else:
        beginning_in_text = beginning
    inside = beginning == "inside"
    while inside or (found := text.find(b"<think>", place)) >= 0:
        if inside:
            end = text.find(b"</think>", place)
            spans.append((place, len(text) if end < 0 else end))
            place = segment = len(text) if end < 0 else end + len(b"</think>")
        else:
            fences += text.count(b"```", segment, found)
            segment, place = found, found + len(b"<think>")
        inside = not inside and fences % 2 == 0 and text[found - 1 : found] != b"`"
    places = [sum(len(spelled[token]) for token in token_ids[:place]) for place in range(len(token_ids))]
    expected = sum(any(start <= place < end for start, end in spans) for place in places)
    beginning = beginning_in_text
    assert ThoughtTokens(form, beginning, spelled.__getitem__).count(token_ids) == expected
    growing = ThoughtTokens(form, beginning, spelled.__getitem__)
    for cut in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4))):
        growing.count(token_ids[:cut])
    assert growing.count(token_ids) == expected


def test_special_tokens_before_a_prompt() -> None:
    with LLM("kvern-1m", threads=1, max_model_len=64) as llm:
        begun = llm.tokenizer.encode("The fox")
        assert Encoding(False).encode(llm.tokenizer, "The fox", 64, None) == begun[1:]
        assert Encoding(True, 2).encode(llm.tokenizer, "The fox", 64, None) == begun[-2:]
