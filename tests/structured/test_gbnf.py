"""Grammars in GBNF: every character and construct of the notation that llama.cpp documents."""

from typing import Any

import pytest

from kvern.errors import InvalidParameter
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.compiler import is_gbnf
from kvern.structured.grammar import Grammars, grammars_of
from kvern.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(resolve_model("kvern-1m"), 4096)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("kvern-1m"))


NAMES = 'root ::= a-b | a_b | aB | start\na-b ::= "x"\na_b ::= "y"\naB ::= "z"\nstart ::= "s"'
CASES: list[tuple[str, list[str], list[str]]] = [
    (r'root ::= "\u00fc"', ["ü"], ["u", "fc"]),
    (r'root ::= "\U0001F600"+', ["😀", "😀😀"], ["x"]),
    (r'root ::= "\x41" [\x30-\x39]{2,3}', ["A12", "A123"], ["A1", "A1234"]),
    (r'root ::= "\x41"{2} "\u0042"{1,}', ["AAB", "AABBB"], ["AB", "AA"]),
    (r"root ::= [\u00e0-\u00ff\x2d\x5d]", ["ü", "-", "]"], ["a", "\\"]),
    (r'root ::= "a\x01"+ [^\x00-\x1f"]', ["a\x01b", "a\x01a\x01é"], ['a\x01"', "a\x01\x02"]),
    ("root ::= [a-c-]+ [&~^]", ["a-c&", "-~", "b^"], ["d&", "a-"]),
    ("root ::= [^-a]", ["b", "^"], ["-", "a"]),
    (r'root ::= ("a\n" | "b\t")* "\r\"\\/" [/\]\[]', ['a\nb\t\r"\\/]', '\r"\\/['], ["\r"]),
    ('root ::= . "b" # a comment with "quotes" and [brackets\n# another', ["ab", "\nb", "éb"], ["b"]),
    (NAMES, ["x", "y", "z", "s"], ["a-b"]),
    ('start ::= "a"\nroot ::= start (\n  "b" |\n  start\n)?', ["a", "ab", "aa"], ["b"]),
]


@pytest.mark.parametrize(("grammar", "said", "unsaid"), CASES, ids=range(len(CASES)))
def test_what_a_grammar_derives(
    grammars: Grammars, tokenizer: Tokenizer, grammar: str, said: list[str], unsaid: list[str]
) -> None:
    compiled = grammars.compile(StructuredOutput(grammar=grammar))

    def derives(text: str) -> bool:
        matcher: Any = grammars.library.matcher(compiled)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [text for text in said if not derives(text)] == []
    assert [text for text in unsaid if derives(text)] == []


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("root ::= missing", "no rule 'missing'"),
        (r'root ::= "\q"', "is not known"),
        (r"root ::= [\u12]", "is not known"),
        (r'root ::= "\ud83d"', "names no character"),
        (r'root ::= "\U00110000"', "names no character"),
    ],
)
def test_what_cannot_be_read_is_named(grammars: Grammars, grammar: str, problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        grammars.compile(StructuredOutput(grammar=grammar))


def test_notations_are_told_apart() -> None:
    assert is_gbnf('start ::= "a"\nroot ::= start')
    assert not is_gbnf('start: "a" | "::="\n')
