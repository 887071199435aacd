"""The compiled grammars of structured answers, where requests are made; `matchers` follows them."""

import functools
import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvern.errors import InvalidParameter
from kvern.request.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from kvern.structured.matchers import GrammarLibrary

MOST_CHARACTERS = 1 << 20
"""Limit of a schema, expression or grammar."""
CACHED = 256
"""Limit of cached grammars and errors."""
CACHED_CHARACTERS = 32 << 20
"""Limit of all cached grammars together."""
MOST_SECONDS = 2.0
"""Limit of the computing time for one form, where processes compile."""
MOST_MEMORY = 1 << 30
"""Limit of the bytes that such a process may allocate."""


class GrammarSetup(msgspec.Struct, frozen=True):
    """The model whose grammars a process compiles."""

    folder: str
    vocab_size: int


class GrammarVerdict(msgspec.Struct, frozen=True):
    """A grammar for the matcher, or the reason why there is none."""

    grammar: str | None = None
    error: str = ""


class NotCompiled(Exception):
    """The grammar of `form` (a StructuredOutput as JSON) is to be compiled by another process first."""

    def __init__(self, form: bytes) -> None:
        super().__init__("a grammar is to be compiled first")
        self.form = form


class Grammars:
    """The compiled forms of one model's requests, which it compiles if they are not made `apart` by other processes."""

    def __init__(self, folder: Path, vocab_size: int, apart: bool = False) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self._apart = apart
        self._known: OrderedDict[bytes, str | InvalidParameter] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    @functools.cached_property
    def library(self) -> "GrammarLibrary":
        """The library that follows grammars, which is imported now."""
        from kvern.structured.matchers import library_of

        return library_of(self.folder, self.vocab_size)

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

    def _checked(self, form: bytes) -> str | InvalidParameter:
        from kvern.structured.compiler import compile_grammar

        try:
            return compile_grammar(msgspec.json.decode(form, type=StructuredOutput), self.library)
        except InvalidParameter as error:
            return error


def _digest(form: bytes) -> bytes:
    return hashlib.sha256(form).digest()


@functools.cache
def grammars_of(folder: Path, vocab_size: int, apart: bool = False) -> Grammars:
    """The grammars of one model, shared within this process. `apart`: other processes compile, see NotCompiled."""
    return Grammars(folder, vocab_size, apart)
