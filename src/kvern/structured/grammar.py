"""Grammars of structured answers: checked where requests are made, followed where tokens are sampled."""

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvern.errors import InvalidParameter
from kvern.structured.output import StructuredOutput
from kvern.structured.references import check_references
from kvern.structured.schema import rewrite
from kvern.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MOST_CHARACTERS = 1 << 20
"""Of a schema, expression or grammar."""
LONGEST_MASK_SECONDS = 0.25
CACHED = 256
"""Compiled grammars that are remembered."""
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
"""Between the tokens of JSON; bounded, so that no model can go on with blanks for ever."""


class Grammars:
    """Compiles grammars for one model's tokenizer, and makes what follows them token by token.

    The library's form of the tokenizer is made at first use: it takes a moment for a large vocabulary.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._model_eos = eos_token_ids
        self._compile = functools.lru_cache(CACHED)(self._checked)

    def compile(self, structured: StructuredOutput) -> str:
        """The grammar as the matcher takes it. Raises InvalidParameter with what cannot be expressed."""
        try:
            return self._compile(msgspec.json.encode(structured))
        except RecursionError as error:
            raise InvalidParameter("structured: the schema is nested too deeply") from error

    def matcher(self, grammar: str) -> "LLMatcher":
        """At the beginning of an answer that follows a compiled grammar."""
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens of the tokenizer that end an answer. Raises InvalidParameter if there are none."""
        tokenizer = Tokenizer(self._folder)
        named = {*tokenizer.eos_token_ids, *self._model_eos}
        found = tuple(sorted(token for token in named if token < tokenizer.vocab_size))
        if not found:
            raise InvalidParameter("structured needs an end-of-sequence token, and this model names none")
        return found

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that no text of a grammar matches, only their ids; entries of the table without a token among them."""
        known, padding = range(self._tokenizer.vocab_size), range(Tokenizer(self._folder).vocab_size, self._vocab_size)
        return frozenset(token for token in known if self._tokenizer.is_special_token(token)) | frozenset(padding)

    @functools.cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidParameter(f"structured needs a tokenizer, and {self._folder} has no tokenizer.json")
        eos = list(self.eos_token_ids)
        return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=self._vocab_size, eos_token=eos)

    def _checked(self, encoded: bytes) -> str:
        if len(encoded) > MOST_CHARACTERS:
            raise InvalidParameter(f"structured has {len(encoded)} characters: at most {MOST_CHARACTERS}")
        try:
            grammar = _grammar(msgspec.json.decode(encoded, type=StructuredOutput))
            matcher = self.matcher(grammar)
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidParameter):
                raise
            raise InvalidParameter(f"structured: {_one_line(str(error))}") from error
        problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if problem:
            raise InvalidParameter(f"structured: {_one_line(problem)}")
        start = time.thread_time()
        matcher.compute_bitmask()
        seconds = time.thread_time() - start
        if seconds > LONGEST_MASK_SECONDS:
            raise InvalidParameter(
                f"structured: it takes {seconds:.1f} s to find the tokens that an answer may begin with, and all that "
                f"run would wait: at most {LONGEST_MASK_SECONDS} s; use fewer or smaller repetitions"
            )
        problem = matcher.get_error()
        if problem.startswith("NoExtensionBias"):
            problem = "no text has this form: its rules exclude each other or lead nowhere"
        if problem:
            raise InvalidParameter(f"structured: {_one_line(problem)}")
        return grammar


@functools.cache
def grammars_of(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """Those of one model, shared by all who need them in this process."""
    return Grammars(folder, vocab_size, eos_token_ids)


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=100_000, max_grammar_size=200_000)


def _grammar(structured: StructuredOutput) -> str:
    if not structured.parts:
        return _lone_grammar(structured)
    grammars = [{"lark_grammar": structured.grammar}]
    for name, part in structured.parts.items():
        written = _lone_grammar(part)
        is_lark = part.json is None and part.regex is None
        held = {"lark_grammar": written} if is_lark else msgspec.json.decode(written)["grammars"][0]
        grammars.append({**held, "name": name})
    return msgspec.json.encode({"grammars": grammars}).decode()


def _lone_grammar(structured: StructuredOutput) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if structured.json is not None:
        schema = {"type": "object"} if structured.json is True else structured.json
        check_references(schema)
        return LLMatcher.grammar_from_json_schema(rewrite(schema), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        texts = " | ".join(msgspec.json.encode(text).decode() for text in structured.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    assert structured.grammar is not None
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(structured.grammar))
    except RecursionError as error:
        raise InvalidParameter("structured: grammar is nested too deeply: name its parts in rules") from error
    except Exception as error:  # what the converter of GBNF raises for unknown rules
        raise InvalidParameter(f"structured: grammar: {_one_line(str(error))}") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
