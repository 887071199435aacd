"""Grammars by xgrammar, limited to what it is known to enforce; other parts are refused by name."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from xgrammar import (
    BatchGrammarMatcher,
    CompiledGrammar,
    Grammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    VocabType,
)

from kvern.errors import InvalidParameter
from kvern.request.structured_output import StructuredOutput
from kvern.structured.gbnf import is_gbnf, plain_gbnf
from kvern.structured.references import check_references
from kvern.structured.schema import rewrite
from kvern.structured.xgrammar_patterns import plain_pattern
from kvern.structured.xgrammar_schema import narrow
from kvern.text.tokenizer import Tokenizer

MOST_BLANKS = 16
"""The most blanks between the tokens of JSON."""
CACHED = 256
"""Limit of cached grammars."""
MOST_CHARACTERS = 1 << 18
"""Limit of a serialized grammar, which the engine compiles before it continues."""
ITS_OWN_WORDS = re.compile(r"[A-Za-z]*(Token|TagDispatch|Regex|Tag)\s*\(|\(=")


class XgrammarMatcher:
    """A `Matcher`. `never`: tokens without a text, which xgrammar rejects."""

    def __init__(self, matcher: GrammarMatcher, never: frozenset[int], error: str = "") -> None:
        self.matcher = matcher
        self._never = never
        self.error = error

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def consume_token(self, token: int) -> bool:
        if not self.error and not self._accepts(token):
            self.error = f"token {token} does not follow it"
        return not self.error

    def try_consume_tokens(self, tokens: list[int]) -> int:
        count = 0
        while count < len(tokens) and not self.error and self._accepts(tokens[count]):
            count += 1
        return count

    def is_stopped(self) -> bool:
        return self.matcher.is_terminated()

    def is_accepting(self) -> bool:
        """True if the answer may end here."""
        return not self.error and self.matcher.is_completed()

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error

    def reset(self) -> bool:
        self.matcher.reset()
        self.error = ""
        return True

    def rollback(self, tokens: int) -> bool:
        try:
            self.matcher.rollback(tokens)
        except RuntimeError:
            self.error = self.error or f"{tokens} tokens cannot be taken back: it has not consumed so many"
        return not self.error

    def deep_copy(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self.matcher.fork(), self._never, self.error)

    def _accepts(self, token: int) -> bool:
        return token not in self._never and self.matcher.accept_token(token)


class XgrammarBackend:
    """Its grammars travel as xgrammar's own JSON; masks for all of their states are made at the first matcher."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        tokenizer = Tokenizer(folder)
        known = range(min(vocab_size, tokenizer.vocab_size))
        self.special_token_ids = frozenset(token for token in known if tokenizer.is_special(token))
        texts = [b"" if token in self.special_token_ids else tokenizer.id_to_bytes(token) for token in known]
        without = {token for token, text in enumerate(texts) if not text} | set(range(len(texts), vocab_size))
        self._never = frozenset(without - set(eos_token_ids))
        info = TokenizerInfo(texts, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))
        self._compiler = GrammarCompiler(info, cache_enabled=False)
        self._compiled = functools.lru_cache(CACHED)(self._compile)
        self._words = -(-vocab_size // 32)

    def compile(self, structured: StructuredOutput) -> str:
        try:
            grammar = _grammar(structured).serialize_json()
            if len(grammar) > MOST_CHARACTERS:
                raise _refusal(f"a form that makes a grammar of {len(grammar)} characters, more than {MOST_CHARACTERS}")
            matcher = self.matcher(grammar)
        except RuntimeError as error:
            message = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error))
            raise InvalidParameter(f"structured: {' '.join(message.split())[:500]}") from error
        self.fill([(matcher, 0)], torch.empty(1, self._words, dtype=torch.int32), side_by_side=False)
        if matcher.error:
            raise InvalidParameter("structured: no text has this form: its rules exclude each other or lead nowhere")
        return grammar

    def matcher(self, grammar: str) -> XgrammarMatcher:
        return XgrammarMatcher(GrammarMatcher(self._compiled(grammar)), self._never)

    def way_out(self, matcher: object, most: int) -> None:
        """No way out is known."""

    def fill(self, going: Sequence[tuple[XgrammarMatcher, int]], masks: torch.Tensor, side_by_side: bool) -> None:
        words = masks.numpy()
        rows = [row for _, row in going]
        if side_by_side:
            self._batch.batch_fill_next_token_bitmask([matcher.matcher for matcher, _ in going], words, rows)
        else:
            for matcher, row in going:
                matcher.matcher.fill_next_token_bitmask(words, row)
        for matcher, row in going:
            if not words[row].any():
                matcher.error = matcher.error or "no token continues it"
                masks[row] = -1

    @functools.cached_property
    def _batch(self) -> BatchGrammarMatcher:
        return BatchGrammarMatcher()

    def _compile(self, grammar: str) -> CompiledGrammar:
        return self._compiler.compile_grammar(Grammar.deserialize_json(grammar))


def _grammar(structured: StructuredOutput) -> Grammar:
    if structured.json is not None:
        schema: Mapping[str, Any] = {"type": "object"} if isinstance(structured.json, bool) else structured.json
        check_references(schema)
        narrowed = narrow(rewrite(schema))
        check_references(narrowed)
        return Grammar.from_json_schema(narrowed, strict_mode=False, max_whitespace_cnt=MOST_BLANKS)
    if structured.regex is not None:
        return Grammar.from_regex(plain_pattern(structured.regex, in_json=False))
    if structured.choice is not None:
        return Grammar.from_ebnf("root ::= " + " | ".join(f'"{_spelt(text)}"' for text in structured.choice))
    assert structured.grammar is not None
    if structured.parts:
        raise _refusal("grammars of parts, which tools, thinking and structural tags need")
    if not is_gbnf(structured.grammar):
        raise _refusal("grammars in Lark's notation: write it in GBNF (root ::= ...)")
    if found := ITS_OWN_WORDS.search(structured.grammar):
        raise _refusal(f"{found[0]!r} in a grammar")
    return Grammar.from_ebnf(plain_gbnf(structured.grammar, "\\u{:04x}"))


def _spelt(text: str) -> str:
    """A text between quotes."""
    plain = (character.isascii() and character.isalnum() for character in text)
    return "".join(each if ok else f"\\U{ord(each):08x}" for each, ok in zip(text, plain, strict=True))


def _refusal(what: str) -> InvalidParameter:
    return InvalidParameter(
        f"structured: the backend xgrammar does not do {what}; or start with grammar_backend llguidance"
    )
