"""Grammars of structured answers: checked where requests are made, followed where tokens are sampled."""

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.errors import ConfigError, InvalidParameter, KvernError, in_a_line
from kvern.request.structured_output import StructuredOutput
from kvern.structured.backend import Backend, Matcher
from kvern.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

MOST_CHARACTERS = 1 << 20
"""Limit of a schema, expression or grammar."""
CACHED = 256
"""Limit of cached grammars and errors."""
CACHED_CHARACTERS = 32 << 20
"""Limit of all cached grammars together."""


class Setup(msgspec.Struct, frozen=True):
    """The constructor arguments of Grammars, for another process."""

    folder: str
    vocab_size: int
    backend: str


class NotCompiled(Exception):
    """The grammar of `form` (a StructuredOutput as JSON) is to be compiled by another process first."""

    def __init__(self, form: bytes) -> None:
        super().__init__("a grammar is to be compiled first")
        self.form = form


class Grammars:
    """Compiles grammars for one model's tokenizer, and makes matchers for them.

    The library's tokenizer is made at first use, which takes a moment for a large vocabulary. Raises ConfigError if the
    library is missing.
    """

    def __init__(self, folder: Path, vocab_size: int, backend: str, apart: bool = False) -> None:
        self.setup = Setup(str(folder), vocab_size, backend)
        self._apart = apart
        self._folder = folder
        self._vocab_size = vocab_size
        self._make_backend = _backend(backend)
        self._known: OrderedDict[bytes, str | InvalidParameter] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def load(self) -> None:
        """Make the library's form of the tokenizer now. Raises InvalidParameter if the model has none."""
        _ = self._backend

    def compile(self, structured: StructuredOutput) -> str:
        """Compiles a grammar for a matcher.

        Raises InvalidParameter for unsupported or too expensive parts; if compiled apart, NotCompiled for a new form.
        """
        try:
            form = msgspec.json.encode(structured)
        except RecursionError as error:
            raise InvalidParameter("structured: the schema is nested too deeply") from error
        if len(form) > MOST_CHARACTERS:
            raise InvalidParameter(f"structured has {len(form)} characters: at most {MOST_CHARACTERS}")
        known = self._find(form)
        if known is None:
            if self._apart:
                raise NotCompiled(form)
            known = self._checked(form)
            self.remember(form, known)
        if isinstance(known, str):
            return known
        raise InvalidParameter(str(known))

    def knows(self, form: bytes) -> bool:
        """`compile` has an answer to this form, a StructuredOutput as JSON."""
        return self._find(form) is not None

    def remember(self, form: bytes, known: str | InvalidParameter) -> None:
        """Caches an answer of `compile`."""
        digest = _digest(form)
        with self._lock:
            self._characters += len(str(known)) - len(str(self._known.pop(digest, "")))
            self._known[digest] = known
            while len(self._known) > 1 and (len(self._known) > CACHED or self._characters > CACHED_CHARACTERS):
                self._characters -= len(str(self._known.popitem(last=False)[1]))

    def _find(self, form: bytes) -> str | InvalidParameter | None:
        with self._lock:
            known = self._known.get(_digest(form))
            if known is not None:
                self._known.move_to_end(_digest(form))
            return known

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of an answer that follows a compiled grammar."""
        return self._backend.matcher(grammar)

    def fill(self, going: Sequence[tuple[Any, int]], masks: "torch.Tensor", side_by_side: bool) -> None:
        """Does `Backend.fill`."""
        if going:
            self._backend.fill(going, masks, side_by_side)

    def way_out(self, matcher: Matcher, most: int) -> list[int] | None:
        """Returns `Backend.way_out`."""
        return self._backend.way_out(matcher, most)

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens of the tokenizer that end an answer. Raises InvalidParameter if there are none."""
        tokenizer = Tokenizer(self._folder)
        found = tuple(token for token in tokenizer.eos_token_ids if token < min(self._vocab_size, tokenizer.vocab_size))
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
        try:
            return self._make_backend(self._folder, self._vocab_size, self.eos_token_ids)
        except (KvernError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            what = f"{self.setup.backend} cannot be used with this model's tokenizer"
            raise InvalidParameter(f"structured: {what}: {in_a_line(error)}") from error

    def _checked(self, form: bytes) -> str | InvalidParameter:
        try:
            return self._backend.compile(msgspec.json.decode(form, type=StructuredOutput))
        except InvalidParameter as error:
            return error
        except (ValueError, RecursionError) as error:
            return InvalidParameter(f"structured: {' '.join(str(error).split())[:500]}")


def _digest(form: bytes) -> bytes:
    return hashlib.sha256(form).digest()


@functools.cache
def grammars_of(folder: Path, vocab_size: int, backend: str = "llguidance", apart: bool = False) -> Grammars:
    """The grammars of one model, shared within this process. `apart`: other processes compile, see NotCompiled."""
    return Grammars(folder, vocab_size, backend, apart)


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
