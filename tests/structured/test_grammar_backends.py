"""What the backends of structured answers have to do alike, and what xgrammar is not trusted with."""

import itertools
import json
import random
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.errors import ConfigError, InvalidParameter
from kvern.models.hub import resolve_model
from kvern.request.structured_output import StructuredOutput
from kvern.structured.grammar import Grammars, grammars_of
from kvern.structured.tags import StructuralTag, structural_tags
from kvern.text.tokenizer import Tokenizer

VOCABULARY = 4096 + 100
"""Wider than the tokenizer's, as padded models have it."""


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar", exc_type=ImportError)
    return grammars_of(resolve_model("kvern-1m"), VOCABULARY, request.param)


@pytest.fixture(scope="module")
def xgrammar() -> Grammars:
    pytest.importorskip("xgrammar", exc_type=ImportError)
    return grammars_of(resolve_model("kvern-1m"), VOCABULARY, "xgrammar")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("kvern-1m"))


def allowed(grammars: Grammars, *matchers: Any, side_by_side: bool = False) -> list[set[int]]:
    masks = torch.zeros(len(matchers), -(-VOCABULARY // 32), dtype=torch.int32)
    grammars.fill([(matcher, row) for row, matcher in enumerate(matchers)], masks, side_by_side)
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    return [set(row.flatten().nonzero().flatten().tolist()) for row in bits]


def says(grammars: Grammars, grammar: str, text: str | bytes, tokenizer: Tokenizer) -> bool:
    """Whether a text is a whole answer."""
    matcher: Any = grammars.matcher(grammar)
    tokens = tokenizer.encode(text, add_special_tokens=False)  # type: ignore[arg-type]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_answers_end_only_where_the_grammar_ends(grammars: Grammars, tokenizer: Tokenizer) -> None:
    eos = set(grammars.eos_token_ids)
    matcher = grammars.matcher(grammars.compile(StructuredOutput(regex="[ab]{2,3}")))
    [a] = tokenizer.encode("a", add_special_tokens=False)
    for ending in (False, False, True):
        [tokens] = allowed(grammars, matcher)
        assert (eos <= tokens) == ending and a in tokens
        assert max(tokens) < tokenizer.vocab_size and not (tokens - eos) & grammars.special_token_ids
        assert matcher.try_consume_tokens([a]) == 1
    assert matcher.is_stopped() or allowed(grammars, matcher) == [eos]
    assert matcher.reset() and eos.isdisjoint(*allowed(grammars, matcher))


def test_copies_go_their_own_way(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = grammars.compile(StructuredOutput(choice=["abc", "xyz"]))
    matcher = grammars.matcher(grammar)
    [a], [x] = (tokenizer.encode(text, add_special_tokens=False) for text in "ax")
    copy = matcher.deep_copy()
    assert matcher.consume_token(a) and copy.consume_token(x)
    one, other = allowed(grammars, matcher, copy)
    assert one and other and not one & other
    assert allowed(grammars, matcher, copy, side_by_side=True) == [one, other]
    assert allowed(grammars, side_by_side=True) == []


@pytest.mark.parametrize(
    "form",
    [{"regex": "[ab]{2,6}c?"}, {"choice": ["abc", "abx", "xyz"]}, {"json": {"type": "array", "maxItems": 3}}],
    ids=str,
)
def test_tokens_are_taken_back(grammars: Grammars, form: dict[str, Any]) -> None:
    """As if they had never come, also the one that ended the answer."""
    grammar, rng = grammars.compile(StructuredOutput(**form)), random.Random(5)
    for _ in range(4):
        matcher, states, said = grammars.matcher(grammar), [], []
        while not matcher.is_stopped() and len(said) < 12:
            states += allowed(grammars, matcher)
            said.append(rng.choice(sorted(states[-1])))
            assert matcher.consume_token(said[-1])
        for back in range(1, len(said) + 1):
            copy = matcher.deep_copy()
            assert copy.rollback(back) and not copy.is_stopped()
            assert allowed(grammars, copy) == [states[-back]], f"{back} of {said} taken back"
            assert copy.consume_tokens(said[-back:]) and copy.is_stopped() == matcher.is_stopped()
        assert not matcher.rollback(len(said) + 1) and matcher.is_error() and matcher.get_error()


def test_a_token_that_does_not_follow_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(grammars.compile(StructuredOutput(choice=["abc"])))
    [x] = tokenizer.encode("x", add_special_tokens=False)
    assert matcher.try_consume_tokens([x]) == 0 and not matcher.is_error()
    matcher.consume_token(x)
    assert matcher.is_error() and matcher.get_error()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"grammar": 'start: "a"'}, "Lark's notation"),
        ({"grammar": "root ::= Token(5)"}, "'Token('"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "root ::= root"}, "no text has this form"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "structured"),
        ({"regex": "(?=a)b"}, "'(?=a)b'"),
        ({"regex": r"a\b"}, r"'\\b'"),
        ({"regex": "a^b"}, "'^b'"),
        ({"regex": "(a"}, "structured"),
        ({"regex": r"[^\--a]"}, "--a"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "number", "multipleOf": 3}}, "multipleOf"),
        ({"json": {"type": "string", "format": "date"}}, "(?:(?:[0-9]"),
        ({"json": {"type": "string", "format": "email"}}, "format"),
        ({"json": {"type": "string", "pattern": "^a+$", "minLength": 3}}, "pattern beside minLength"),
        ({"json": {"type": "string", "pattern": "^a(b[0-9]+)?$"}}, "(b[0-9]+)?"),
        ({"json": {"type": "string", "pattern": '"'}}, "a character that JSON escapes"),
        ({"json": {"type": "number", "minimum": 0.00001}}, "bound"),
        ({"json": {"enum": [0.1]}}, "0.1"),
        ({"json": {"type": "object", "minProperties": 2}}, "minProperties"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "no value"),
        ({"json": {"type": "bogus"}}, "Invalid type: bogus"),
    ],
    ids=range(22),
)
def test_what_xgrammar_would_loosen_is_refused(xgrammar: Grammars, form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(said)) as refused:
        xgrammar.compile(StructuredOutput(**form))
    assert "\n" not in str(refused.value)


def test_grammars_of_parts_are_refused(xgrammar: Grammars) -> None:
    with pytest.raises(InvalidParameter, match="tools, thinking and structural tags"):
        xgrammar.compile(structural_tags([StructuralTag(begin="<a>", schema={})], ["<a>"]))


NAMED = {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (NAMED, '{"b":null}', r'{"\u0061":1}'),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"abc"', '"a\t"'),
        ({"type": "string", "minLength": 2}, '"ab"', r'"\ud83d\ude00"'),
        ({"type": "string", "pattern": "^.[^b]$"}, '"ac"', '"a""'),
        ({"allOf": [NAMED, {"required": ["b"]}]}, '{"b":null}', "{}"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, **NAMED}, '{"a":null,"b":null}', '{"a":null}'),
        ({"not": {"type": "object"}}, "[1]", "{}"),
        ({"allOf": [{"minimum": 3}, {"type": "integer"}]}, "3", "2"),
        ({"anyOf": [{"type": "null"}, {"type": "string"}], "type": "null"}, "null", '"a"'),
        ({"$ref": "#/$defs/a1", "$defs": {"a1": {"items": {"$ref": "#/$defs/a2"}}, "a2": False}}, "[]", "[1]"),
    ],
    ids=range(10),
)
def test_keywords_that_xgrammar_alone_would_loosen(
    xgrammar: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], yes: str, no: str
) -> None:
    grammar = xgrammar.compile(StructuredOutput(json=schema))
    assert says(xgrammar, grammar, yes, tokenizer) and not says(xgrammar, grammar, no, tokenizer)


def test_bounds_of_numbers_are_kept(xgrammar: Grammars, tokenizer: Tokenizer) -> None:
    """Random ones, with texts of numbers around them."""
    chance, said = random.Random(0), 0
    for _ in range(60):
        low = round(chance.uniform(-1, 1) * 10 ** chance.randint(-3, 4), chance.randint(0, 4))
        high = round(low + chance.random() * 10 ** chance.randint(-2, 3), 4) + 1
        for least, most in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            schema = {"type": chance.choice(["number", "integer"]), least: low, most: round(high, 4)}
            grammar = xgrammar.compile(StructuredOutput(json=schema))
            for value in (low, high, low - 0.1, low + 0.1, high - 0.1, high + 0.1, 0, (low + high) / 2, high * 10):
                for text in (f"{value:.0f}", f"{value:.2f}", f"{value:.4f}", f"{value:.2e}"):
                    if says(xgrammar, grammar, text, tokenizer):
                        number, said = Decimal(text), said + 1
                        below, above = Decimal(str(low)), Decimal(str(schema[most]))
                        assert number > below or (number == below and least == "minimum"), (schema, text)
                        assert number < above or (number == above and most == "maximum"), (schema, text)
    assert said > 500


def test_texts_are_spelt_as_they_are(xgrammar: Grammars, tokenizer: Tokenizer) -> None:
    texts = ['a"b', "\\", "\n\t\0", "é😀", "{}[]|()", "a'b/*"]
    choice = xgrammar.compile(StructuredOutput(choice=texts))
    enum = xgrammar.compile(StructuredOutput(json={"enum": texts}))
    names = xgrammar.compile(StructuredOutput(json={"properties": {text: {"type": "null"} for text in texts}}))
    for text in texts:
        assert says(xgrammar, choice, text, tokenizer)
        assert says(xgrammar, enum, json.dumps(text, ensure_ascii=False), tokenizer)
        assert says(xgrammar, names, json.dumps({text: None}, ensure_ascii=False), tokenizer)


def test_without_the_package(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "kvern.structured.xgrammar_backend"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    grammars_of.cache_clear()
    with pytest.raises(ConfigError, match=re.escape("pip install 'kvern[xgrammar]'")):
        LLM(str(tiny_model), grammar_backend="xgrammar", max_model_len=64)


def test_beams_follow_xgrammar(tiny_model: Path) -> None:
    pytest.importorskip("xgrammar", exc_type=ImportError)
    params = SamplingParams(
        beam_width=4, n=4, max_tokens=20, structured=StructuredOutput(choice=["the fox", "the dog"])
    )
    with LLM(str(tiny_model), grammar_backend="xgrammar", max_model_len=64, max_batch_requests=8, threads=1) as llm:
        [output] = llm.generate([[5, 6]], params)
    texts = [answer.text for answer in output.outputs if answer.finish_reason == "stop"]
    assert texts and set(texts) <= {"the fox", "the dog"}
