"""Forms in which an answer can go on for ever: what is cut off by max_tokens is whole nevertheless."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvern import LLM, SamplingParams
from kvern.request.sampling_params import StructuredOutput

RECURSIVE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}
ENDLESS: list[Any] = [
    {},
    {"type": "object"},
    {"type": "array"},
    {"type": "string"},
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}, "x": {}}, "required": ["colour", "x"]},
]
MESSAGES = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_model_len=400, max_batch_requests=16, threads=1, tool_parser="hermes") as llm:
        yield llm


def asked(llm: LLM, schemas: list[Any], **options: Any) -> list[Any]:
    params = [
        SamplingParams(seed=seed, structured=StructuredOutput(json=schema), **options)
        for seed, schema in enumerate(schemas)
    ]
    return [output.outputs[0] for output in llm.generate(["the fox"] * len(params), params)]


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.2, "top_p": 0.95}, {"temperature": 2}], ids=str
)
def test_answers_are_valid_whether_they_end_or_are_cut(llm: LLM, options: dict[str, Any]) -> None:
    """Of a model that has no notion of an end; the client is told that there was no more room."""
    answers = asked(llm, ENDLESS * 3, max_tokens=90, **options)
    for schema, answer in zip(ENDLESS * 3, answers, strict=True):
        jsonschema.validate(json.loads(answer.text), schema)
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    assert cut
    assert all(len(answer.token_ids) <= 90 for answer in cut)


def test_what_has_no_end_is_cut_as_before(llm: LLM) -> None:
    [answer] = asked(llm, [RECURSIVE], max_tokens=60)
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 60


def test_answers_that_end_by_themselves_are_left_alone(llm: LLM) -> None:
    """However few tokens there are: an answer that fits is not another one than with room."""
    schema = {"enum": ["a", "b", "fox"]}
    roomy = asked(llm, [schema] * 6, max_tokens=60)
    for count in range(4, 7):
        short = asked(llm, [schema] * 6, max_tokens=count)
        assert [answer.text for answer in short if answer.finish_reason == "stop"] == [
            wide.text for answer, wide in zip(short, roomy, strict=True) if answer.finish_reason == "stop"
        ]


def test_calls_that_are_cut_are_whole(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    params = [SamplingParams(seed=seed, max_tokens=100, temperature=1.5) for seed in range(6)]
    outputs = llm.chat([MESSAGES] * 6, params, tools=[tool], tool_choice="required")
    for output in outputs:
        assert all(isinstance(json.loads(call.arguments), dict) for call in output.outputs[0].message.tool_calls)
    assert any(output.outputs[0].finish_reason == "length" for output in outputs)


def test_preemption_changes_no_ending(tiny_model: Path, llm: LLM) -> None:
    expected = asked(llm, ENDLESS, max_tokens=60)
    with LLM(str(tiny_model), max_model_len=100, threads=1, kv_cache_tokens=104, block_size=4) as small:
        answers = asked(small, ENDLESS, max_tokens=60)
        assert small.statistics().preemptions
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
