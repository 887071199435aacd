"""Records from 500 held-out sentences: the embedded model, constrained to each record's schema."""

import json
from typing import Any

import jsonschema
import pytest
from training.exam import is_right, questions, wanted

from kvern import LLM, SamplingParams
from kvern.request.sampling_params import StructuredOutput

TYPES = {str: {"type": "string", "maxLength": 80}, int: {"type": "integer"}, float: {"type": "number"}}


def schema_of(record: Any) -> dict[str, Any]:
    """Records like this one: lists of them, objects with these keys, and values that may be null."""
    if isinstance(record, list):
        return {"type": "array", "items": {"anyOf": [schema_of(item) for item in record]}, "maxItems": 8}
    if not isinstance(record, dict):
        return {"anyOf": [TYPES.get(type(record), TYPES[str]), {"type": "null"}]}
    fields = {key: schema_of(value) for key, value in record.items()}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("temperature", "count"),
    [(0.0, 120), (1.5, 40), *(pytest.param(heat, 500, marks=pytest.mark.nightly) for heat in (0.0, 1.5))],
)
def test_every_record_parses_and_validates(temperature: float, count: int) -> None:
    examples = questions("extraction", count)
    assert len(examples) == count
    schemas = [schema_of(json.loads(wanted(example))) for example in examples]
    with LLM("kvern-1m", threads=1, max_model_len=1024) as llm:
        outputs = llm.chat(
            [example.messages[:-1] for example in examples],
            [
                SamplingParams(
                    temperature=temperature, max_tokens=400, seed=1, structured=StructuredOutput(json=schema)
                )
                for schema in schemas
            ],
        )
    answers = [output.outputs[0] for output in outputs]
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), schema)
    right = sum(is_right(example, answer.text) for example, answer in zip(examples, answers, strict=True))
    print(f"\ntemperature {temperature}: {right} of {count} records are right to the letter")
    assert right > (0.95 * count if temperature == 0 else 0)
