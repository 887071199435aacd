"""Grammars of structured answers: checked where requests are made, followed where tokens are sampled."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.errors import ConfigError, InvalidParameter
from kvern.structured.backend import Backend, Matcher
from kvern.structured.output import StructuredOutput
from kvern.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

MOST_CHARACTERS = 1 << 20
"""Of a schema, expression or grammar."""
CACHED = 256
"""Compiled grammars that are remembered."""


class Grammars:
    """Compiles grammars for one model's tokenizer, and makes what follows them token by token.

    The library's form of the tokenizer is made at first use: it takes a moment for a large vocabulary. Raises
    ConfigError if the library is not there.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], backend: str) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._model_eos = eos_token_ids
        self._make_backend = _backend(backend)
        self._compile = functools.lru_cache(CACHED)(self._checked)

    def compile(self, structured: StructuredOutput) -> str:
        """The grammar as the matcher takes it. Raises InvalidParameter with what cannot be expressed."""
        try:
            return self._compile(msgspec.json.encode(structured))
        except RecursionError as error:
            raise InvalidParameter("structured: the schema is nested too deeply") from error

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of an answer that follows a compiled grammar."""
        return self._backend.matcher(grammar)

    def fill(self, going: Sequence[tuple[Any, int]], masks: "torch.Tensor", side_by_side: bool) -> None:
        """As `Backend.fill`."""
        self._backend.fill(going, masks, side_by_side)

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
        padding = range(Tokenizer(self._folder).vocab_size, self._vocab_size)
        return self._backend.special_token_ids | frozenset(padding)

    @functools.cached_property
    def _backend(self) -> Backend:
        if not (self._folder / "tokenizer.json").is_file():
            raise InvalidParameter(f"structured needs a tokenizer, and {self._folder} has no tokenizer.json")
        return self._make_backend(self._folder, self._vocab_size, self.eos_token_ids)

    def _checked(self, encoded: bytes) -> str:
        if len(encoded) > MOST_CHARACTERS:
            raise InvalidParameter(f"structured has {len(encoded)} characters: at most {MOST_CHARACTERS}")
        try:
            return self._backend.compile(msgspec.json.decode(encoded, type=StructuredOutput))
        except InvalidParameter:
            raise
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"structured: {' '.join(str(error).split())[:500]}") from error


@functools.cache
def grammars_of(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], backend: str = "llguidance") -> Grammars:
    """Those of one model, shared by all who need them in this process."""
    return Grammars(folder, vocab_size, eos_token_ids, backend)


def _backend(name: str) -> Callable[[Path, int, Sequence[int]], Backend]:
    if name == "llguidance":
        from kvern.structured.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend
    try:
        from kvern.structured.xgrammar_backend import XgrammarBackend
    except ImportError as error:
        raise ConfigError(
            f"grammar_backend is xgrammar, which cannot be loaded ({error}): install it with pip install "
            "'kvern[xgrammar]', or leave grammar_backend at llguidance"
        ) from error
    return XgrammarBackend
