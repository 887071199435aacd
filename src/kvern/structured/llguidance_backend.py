"""Grammars by llguidance, which refuses unsupported ones."""

import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvern.errors import InvalidParameter
from kvern.request.structured_output import StructuredOutput
from kvern.structured.far_numbers import Unsaid, rules_of
from kvern.structured.gbnf import is_gbnf, plain_gbnf
from kvern.structured.llguidance_schema import held
from kvern.structured.references import check_references
from kvern.structured.schema import rewrite
from kvern.structured.vocabulary import within
from kvern.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

LONGEST_MAKING_SECONDS = 0.25
"""Limit of the computing time for a new matcher."""
FIRST_STEPS = 32
"""The number of tokens of a sample answer that are followed when a grammar is compiled."""
LONGEST_STEPS_SECONDS = 0.2
"""Limit of the computing time for these tokens; less than `kvern.structured.masks` allows an answer."""
REMEDY = "use fewer properties, patterns, alternatives or repetitions"
MOST_ITEMS = 4000
"""Alternatives that are open at one place; with more, following them takes a time that grows as their square."""
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
"""Whitespace between the tokens of JSON; bounded, so that a model cannot write blanks forever."""

BETWEEN, WITHIN = '}]":0123456789-tnf,{[', '"}]:0123456789-tnf,{['
"""Signs by which JSON ends soon, the best first: between its tokens, where line breaks may be, and within one."""


class LLGuidanceBackend:
    """Its grammars are texts in Lark's notation or in JSON; its matchers the library's own."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        text = within(vocab_size, Tokenizer(folder).definition())
        self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._ending = sum(1 << token for token in set(eos_token_ids))

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        known = range(self._tokenizer.vocab_size)
        return frozenset(token for token in known if self._tokenizer.is_special_token(token))

    def compile(self, structured: StructuredOutput) -> str:
        grammar = self._grammar(structured)
        start = time.thread_time()
        matcher = self.matcher(grammar)
        _check_time("to begin the answer", time.thread_time() - start, LONGEST_MAKING_SECONDS)
        problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if problem:
            raise ValueError(problem)
        _follow_first(matcher, self._ending)
        return grammar

    def matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())

    def fill(self, going: Sequence[tuple[LLMatcher, int]], masks: "torch.Tensor", side_by_side: bool) -> None:
        row_bytes = 4 * masks.shape[1]
        if side_by_side:
            self._executor.unsafe_compute_mask_ptr(list(going), masks.data_ptr(), row_bytes, len(masks))
            return
        for matcher, row in going:
            matcher.unsafe_compute_mask_ptr(masks[row].data_ptr(), row_bytes)

    def way_out(self, matcher: LLMatcher, most: int) -> list[int] | None:
        copy, way = matcher.deep_copy(), list[int]()
        while len(way) <= most and not copy.is_error():
            if copy.is_stopped() or copy.is_accepting():
                return way
            signs = BETWEEN if copy.validate_tokens(self._signs["\n"]) else WITHIN
            step = next((self._signs[sign] for sign in signs if copy.validate_tokens(self._signs[sign])), None)
            step = step or self._tokenizer.tokenize_bytes(copy.compute_ff_bytes())
            step = step or [_some_token(copy.compute_bitmask(), self._ending, 0)]
            taken = copy.try_consume_tokens(step)
            if not taken:
                return None
            way += step[:taken]
        return None

    def _grammar(self, structured: StructuredOutput) -> str:
        if not structured.parts:
            return self._lone_grammar(structured)
        grammars = [{"lark_grammar": structured.grammar}]
        for name, part in structured.parts.items():
            written = self._lone_grammar(part)
            is_json = written.startswith("{")
            grammar = msgspec.json.decode(written)["grammars"][0] if is_json else {"lark_grammar": written}
            grammars.append({**grammar, "name": name})
        return msgspec.json.encode({"grammars": grammars}).decode()

    def _lone_grammar(self, structured: StructuredOutput) -> str:
        if structured.json is not None:
            schema: Mapping[str, Any] = {"type": "object"} if isinstance(structured.json, bool) else structured.json
            check_references(schema)
            rewritten = rewrite(schema)
            for exact in (True, False):
                with suppress(Unsaid):
                    return rules_of(rewritten, self._part, exact)
            return _schema_grammar(held(rewritten, self._has_text))
        if structured.regex is not None:
            return LLMatcher.grammar_from_regex(structured.regex)
        if structured.choice is not None:
            texts = " | ".join(msgspec.json.encode(text).decode() for text in structured.choice)
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
        assert structured.grammar is not None
        try:
            grammar = structured.grammar
            return LLMatcher.grammar_from_lark(
                gbnf_to_lark(plain_gbnf(grammar, "\\x{:02x}")) if is_gbnf(grammar) else grammar
            )
        except InvalidParameter:
            raise
        except RecursionError as error:
            raise InvalidParameter("structured: grammar is nested too deeply: name its parts in rules") from error
        except Exception as error:  # what the converter of GBNF raises for unknown rules
            raise ValueError(f"grammar: {error}") from error

    def _part(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """A part of a schema in the library's words; None if it allows no value."""
        made = held(schema, self._has_text)
        problem = LLMatcher.validate_grammar(_schema_grammar(made), self._tokenizer)
        return None if "nsatisfiable" in problem else {**made, "x-guidance": JSON_OPTIONS}

    def _has_text(self, schema: dict[str, Any]) -> bool:
        """True if a schema of strings allows at least one."""
        return not LLMatcher.validate_grammar(_schema_grammar(schema), self._tokenizer)

    @functools.cached_property
    def _signs(self) -> dict[str, list[int]]:
        return {sign: self._tokenizer.tokenize_str(sign) for sign in f"{BETWEEN}\n"}

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_lexer_states=100_000, max_grammar_size=200_000, max_items_in_row=MOST_ITEMS, verbose_errors=False
    )


def _follow_first(matcher: LLMatcher, ending: int) -> None:
    """Follows the first tokens of a sample answer; `ending` has the bits of the tokens that end it.

    Raises InvalidParameter or ValueError if there is no answer, or if it takes too long.
    """
    start = time.thread_time()
    for place in range(FIRST_STEPS):
        mask = matcher.compute_bitmask()
        _check_time(f"to follow {place + 1} tokens", time.thread_time() - start, LONGEST_STEPS_SECONDS)
        problem = matcher.get_error()
        if problem.startswith("NoExtensionBias") and not place:
            raise ValueError("no text has this form: its rules exclude each other or lead nowhere")
        if problem:
            raise ValueError(f"after {place} tokens the form cannot be followed ({problem:.200}): {REMEDY}")
        if matcher.is_stopped():
            return
        matcher.consume_token(_some_token(mask, ending, place))


def _some_token(mask: bytes, ending: int, place: int) -> int:
    """An allowed token, a different one at each place; a token that ends the answer only if it must end."""
    allowed = int.from_bytes(mask, "little")
    mask = ((allowed & ~ending) or allowed).to_bytes(len(mask), "little")
    first = place * 41 % len(mask)
    turned = mask[first:] + mask[:first]
    byte = len(turned) - len(turned.lstrip(b"\0"))
    return 8 * ((first + byte) % len(mask)) + (turned[byte] & -turned[byte]).bit_length() - 1


def _check_time(what: str, seconds: float, most: float) -> None:
    if seconds > most:
        raise InvalidParameter(
            f"structured: it takes {seconds:.2f} s {what}, and all that run would wait: at most {most} s: {REMEDY}"
        )


def _schema_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
