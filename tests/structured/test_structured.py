"""Structured answers: whatever the model, every answer has the form that was asked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from llguidance import LLParserLimits

import kvern.structured.compiler
import kvern.structured.matchers
from kvern import LLM, SamplingParams
from kvern.api.forms import response_format
from kvern.errors import InvalidParameter
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.tags import StructuralTag, structural_tags
from tests.support.idle import is_idle
from tests.support.served import Served, eventually

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST: dict[str, Any] = {
    "type": "array",
    "items": {"$ref": "#/$defs/item"},
    "minItems": 1,
    "maxItems": 3,
    "$defs": {"item": {"enum": ["red", "green", 7, None]}},
}
FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"json": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON)),
    ({"json": LIST}, lambda text: jsonschema.validate(json.loads(text), LIST)),
    ({"regex": r"[0-9]{3}-[a-f]{2,5}"}, lambda text: expect(re.fullmatch(r"[0-9]{3}-[a-f]{2,5}", text))),
    (
        {"choice": ["yes", 'no, "never"', "vielleicht\n"]},
        lambda text: expect(text in ("yes", 'no, "never"', "vielleicht\n")),
    ),
    ({"grammar": 'start: "a" b+\nb: /[xyz]{2}/ "!"'}, lambda text: expect(re.fullmatch("a([xyz]{2}!)+", text))),
    ({"grammar": 'root ::= "foo" | "bar" root'}, lambda text: expect(re.fullmatch("(bar)*foo", text))),
]


EXPRESSIONS = 'start: "then " e\ne: e e | "a" | "ab" | e "a" e e | "b" e e'


def expect(value: object) -> None:
    assert value


def params(form: dict[str, Any], **options: Any) -> SamplingParams:
    return SamplingParams(structured=StructuredOutput(**form), **({"max_tokens": 200, "temperature": 1.0} | options))


def engine(model: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {"max_model_len": 256, "max_batch_requests": 16, "threads": 1} | options
    return LLM(str(model), **settings)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model) as llm:
        yield llm


@pytest.mark.parametrize(("form", "check"), FORMS, ids=range(len(FORMS)))
def test_a_random_model_keeps_the_form(tiny: LLM, form: dict[str, Any], check: Any) -> None:
    """Its weights mean nothing, so that every part of the form is the grammar's doing."""
    prompts = [[5 + number, 6, 7] for number in range(12)]
    for seed, output in enumerate(tiny.generate(prompts, [params(form, seed=seed) for seed in range(12)])):
        [answer] = output.outputs
        if answer.finish_reason == "stop":
            check(answer.text)
        else:
            assert len(answer.token_ids) == 200, seed
    assert any(output.outputs[0].finish_reason == "stop" for output in tiny.generate(prompts[:3], params(form, seed=1)))


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "seed": 1},
        {"logprobs": 3},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"top_k": 3, "min_p": 0.1},
        {"temperature": 0},
        {"typical_p": 0.5},
        {"min_tokens": 3},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_combined_with_other_parameters(tiny: LLM, options: dict[str, Any]) -> None:
    [output] = tiny.generate([[5, 6, 7]], params({"json": LIST}, **options))
    for answer in output.outputs:
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), LIST)
    assert is_idle(tiny)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_tokens": 96, "block_size": 4, "max_model_len": 96},
        {"batching": "static"},
        {"prefix_cache": False},
    ],
    ids=str,
)
def test_switches_and_preemption_change_nothing(tiny_model: Path, options: dict[str, Any]) -> None:
    """Constrained and free requests side by side, each as alone."""
    settings: dict[str, Any] = {"max_model_len": 96, "kv_cache_tokens": 4096, "max_batch_requests": None}
    wanted = []
    for number in range(10):
        form, _ = FORMS[number % len(FORMS)]
        own = params(form, seed=number, max_tokens=40)
        wanted.append(own if number % 3 else SamplingParams(seed=number, max_tokens=40))
    prompts = [[5 + number, *range(20, 40)] for number in range(10)]
    with engine(tiny_model, **settings) as llm:
        expected = [llm.generate([prompt], own)[0].outputs[0].text for prompt, own in zip(prompts, wanted, strict=True)]
    with engine(tiny_model, **(settings | options)) as llm:
        assert [output.outputs[0].text for output in llm.generate(prompts, wanted)] == expected
        assert (llm.statistics().preemptions > 0) == (options.get("kv_cache_tokens") == 96)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": {"type": "bogus"}}, "Invalid type: bogus"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {"json": {"type": "object", "properties": {"a": {"not": {"pattern": "a"}}}, "required": ["a"]}},
            "not pattern cannot be expressed",
        ),
        ({"json": {"$ref": "http://127.0.0.1/schema"}}, "never fetched"),
        ({"json": {"$ref": "#/nowhere"}}, "#/$ref '#/nowhere' names nothing"),
        ({"json": {"$ref": "#"}}, "leads back to itself"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"json": False}, "allows no value"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(a{1000}){1000}"}, "use fewer properties"),
        ({"json": {"oneOf": [{"minProperties": number} for number in range(300)]}}, "make it smaller"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": "x" * (2 << 20)}, "characters: at most"),
        ({"choice": []}, "choice has 0 texts"),
        ({"choice": [""]}, "empty text"),
        ({}, "structured has nothing"),
        ({"regex": "a", "choice": ["b"]}, "structured has regex, choice"),
    ],
    ids=range(17),
)
def test_what_cannot_be_followed_is_refused(tiny: LLM, form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(said)) as refused:
        tiny.generate([[5, 6]], params(form))
    assert "\n" not in str(refused.value)
    assert is_idle(tiny)


def test_a_grammar_that_becomes_too_expensive_ends_its_request(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits as small as no real grammar meets, found only on the way; others go on."""
    monkeypatch.setattr(kvern.structured.compiler, "FIRST_STEPS", 0)
    monkeypatch.setattr(kvern.structured.matchers, "_limits", lambda: LLParserLimits(step_max_items=5))
    wanted = [params({"grammar": EXPRESSIONS}, seed=1), SamplingParams(seed=1, max_tokens=30)]
    broken, other = tiny.generate([[5, 6], [7, 8]], wanted, on_error="return")
    assert broken.outputs[0].finish_reason == "abort"
    assert "the grammar cannot be followed" in str(broken.outputs[0].stop_reason)
    assert len(other.outputs[0].token_ids) > 5 or other.outputs[0].finish_reason == "stop"
    assert is_idle(tiny)


def test_where_nothing_can_follow_an_answer_is_broken_off_with_the_reason(tiny: LLM) -> None:
    """It has not ended: what stands there is no whole answer."""
    form = {"grammar": 'start: A (X "b")\nA: /[a-c]{50} {1,4}/\nX: /d/ & /e/'}
    [output] = tiny.generate([[5, 6]], [params(form, seed=1, max_tokens=90)], on_error="return")
    assert output.outputs[0].finish_reason == "abort"
    assert "the grammar cannot be followed" in str(output.outputs[0].stop_reason)


def test_blanks_are_bounded(tiny: LLM) -> None:
    """A model that loves blanks cannot go on with them."""
    blank = tiny.tokenizer.encode(" ")[0]
    form = {"json": {"type": "array", "maxItems": 1, "items": {"type": "boolean"}}}
    [output] = tiny.generate([[5, 6]], params(form, logit_bias={blank: 1000.0}))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text.count(" ") <= 64


@pytest.fixture(scope="module")
def server(talking_server: Served) -> Served:
    return talking_server


EXTRACT = [{"role": "user", "content": "Extract name and age as JSON: Anna is 31 years old."}]


def test_every_spelling_of_the_apis(server: Served) -> None:
    client = server.client()
    options: dict[str, Any] = {"model": "kvern-12m", "messages": EXTRACT, "temperature": 0, "max_tokens": 100}
    schema = {"name": "person", "schema": PERSON, "strict": True}
    spellings: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"extra_body": {"structured_outputs": {"json": PERSON}}},
        {"extra_body": {"guided_json": PERSON}},
        {"extra_body": {"guided_json": json.dumps(PERSON)}},
        {"extra_body": {"structured": {"json": PERSON}}},
    ]
    texts = {client.chat.completions.create(**options, **each).choices[0].message.content for each in spellings}
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    texts.add(client.responses.create(model="kvern-12m", input=EXTRACT, temperature=0, text=form).output_text)
    stream = client.chat.completions.create(**options, **spellings[0], stream=True)
    texts.add("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    [text] = texts
    assert json.loads(text) == {"name": "Anna", "age": 31}
    answer = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    for extra in ({"guided_choice": ["a", "b"]}, {"guided_regex": "a|b"}, {"guided_grammar": 'start: "a" | "b"'}):
        given = client.completions.create(model="kvern-12m", prompt="x", temperature=0, extra_body=extra)
        assert given.choices[0].text in ("a", "b")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format is"),
        ({"response_format": {"type": "json_schema"}}, "needs a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "bogus"}}}}, "Invalid type"),
        ({"guided_regex": "(", "guided_choice": ["a"]}, "give one of them"),
        ({"structured_outputs": {"jsn": {}}}, "unknown field"),
        ({"guided_grammar": "x" * (10 << 20)}, "characters"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos is true"),
    ],
    ids=range(7),
)
def test_bad_forms_hurt_nobody(server: Served, extra: dict[str, Any], said: str) -> None:
    client = server.client()
    with client.completions.create(model="kvern-12m", prompt="Once", max_tokens=300, stream=True) as other:
        with pytest.raises(openai.BadRequestError, match=said):
            client.completions.create(model="kvern-12m", prompt="a", extra_body=extra)
        assert list(other)[-1].choices[0].finish_reason


@pytest.mark.nightly
def test_a_form_survives_the_death_of_the_engine(server: Served) -> None:
    """The next engine goes on in the middle of the grammar."""
    client = server.client()
    schema = {"type": "array", "items": PERSON, "minItems": 6, "maxItems": 6}
    options: dict[str, Any] = {
        "model": "kvern-12m",
        "prompt": "Names:",
        "seed": 4,
        "max_tokens": 400,
        "temperature": 1.0,
    }
    options["extra_body"] = {"guided_json": schema}
    expected = client.completions.create(**options).choices[0].text
    stream = client.completions.create(**options, stream=True)
    text = "".join(next(stream).choices[0].text for _ in range(20))
    before = server.figure("engine_restarts_total")
    server.kill_engine()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected
    jsonschema.validate(json.loads(text), schema)
    eventually(lambda: server.figure("engine_restarts_total") == before + 1)


def test_structural_tags(tiny: LLM) -> None:
    """Free text, in which each trigger begins a span that follows its schema."""
    color = {"enum": ["red", "green"]}
    tags = [StructuralTag(begin="#a(", schema=PERSON, end=")"), StructuralTag(begin="#b(", schema=color, end=")")]
    [trigger] = tiny.tokenizer.encode("#", add_special_tokens=False)
    free = SamplingParams(temperature=1.0, max_tokens=250, logit_bias={trigger: 4.0})
    params = [free.replace(seed=seed, structured=structural_tags(tags, ["#"])) for seed in range(12)]
    spans = 0
    for output in tiny.generate([[5, 6, 7]] * 12, params):
        text = output.outputs[0].text
        whole = output.outputs[0].finish_reason == "stop"
        place = text.find("#")
        while place >= 0:
            try:
                value, end = json.JSONDecoder().raw_decode(text, place + 3)
            except json.JSONDecodeError:
                assert not whole  # cut off in the middle
                break
            jsonschema.validate(value, {"#a(": PERSON, "#b(": color}[text[place : place + 3]])
            assert text[end : end + 1] in ")"
            spans += 1
            place = text.find("#", end)
    assert spans > 10


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b"]}, "no structure begins with"),
        ({"structures": [{"begin": "<a>", "schema": {}}, {"begin": "b", "schema": {}}], "triggers": ["<a"]}, "none of"),
        ({"structures": [], "triggers": ["<a"]}, "0 structures"),
        ({"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<", "<a"]}, "a part of another trigger"),
        ({"structures": [{"schema": {}}], "triggers": ["<"]}, "begin"),
        ({}, "structures"),
    ],
)
def test_structural_tags_that_mean_nothing(value: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(said)):
        response_format({"type": "structural_tag", **value})
