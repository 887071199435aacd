"""The matchers of grammars: where answers end, copies, tokens taken back, and errors."""

import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.grammar import Grammars, grammars_of
from kvern.text.tokenizer import Tokenizer

VOCABULARY = 4096 + 100
"""Wider than the tokenizer's, as padded models have it."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(resolve_model("kvern-1m"), VOCABULARY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("kvern-1m"))


def allowed(grammars: Grammars, *matchers: Any, side_by_side: bool = False) -> list[set[int]]:
    masks = torch.zeros(len(matchers), -(-VOCABULARY // 32), dtype=torch.int32)
    grammars.library.fill([(matcher, row) for row, matcher in enumerate(matchers)], masks, side_by_side)
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    return [set(row.flatten().nonzero().flatten().tolist()) for row in bits]


def test_answers_end_only_where_the_grammar_ends(grammars: Grammars, tokenizer: Tokenizer) -> None:
    eos = set(grammars.library.eos_token_ids)
    matcher = grammars.library.matcher(grammars.compile(StructuredOutput(regex="[ab]{2,3}")))
    [a] = tokenizer.encode("a", add_special_tokens=False)
    for ending in (False, False, True):
        [tokens] = allowed(grammars, matcher)
        assert (eos <= tokens) == ending and a in tokens
        assert max(tokens) < tokenizer.vocab_size and not (tokens - eos) & grammars.library.special_token_ids
        assert matcher.try_consume_tokens([a]) == 1
    assert matcher.is_stopped() or allowed(grammars, matcher) == [eos]
    assert matcher.reset() and eos.isdisjoint(*allowed(grammars, matcher))


def test_copies_go_their_own_way(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = grammars.compile(StructuredOutput(choice=["abc", "xyz"]))
    matcher = grammars.library.matcher(grammar)
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
        matcher, states, said = grammars.library.matcher(grammar), [], []
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
    matcher = grammars.library.matcher(grammars.compile(StructuredOutput(choice=["abc"])))
    [x] = tokenizer.encode("x", add_special_tokens=False)
    assert matcher.try_consume_tokens([x]) == 0 and not matcher.is_error()
    matcher.consume_token(x)
    assert matcher.is_error() and matcher.get_error()


def test_following_grammars_imports_nothing_that_compiles_them() -> None:
    """The engine's process imports the library for its first grammar, and no compiler; the server's imports neither."""
    code = (
        "import kvern.structured.{0}, sys\n"
        "print([name for name in ('llguidance', 'referencing', 'kvern.structured.schema') if name in sys.modules])"
    )
    found = {}
    for module in ("masks", "apart"):
        command = [sys.executable, "-c", code.format(module)]
        found[module] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert found == {"masks": "['llguidance']", "apart": "[]"}
