"""From the texts that DRY's repetitions do not reach over to tokens."""

import functools
from collections.abc import Sequence

import numpy as np

from kvern.request.request import Breakers
from kvern.text.tokenizer import Tokenizer

DEFAULT = ("\n", ":", '"', "*")
BETWEEN = b"\xff"
"""Stands in no text in UTF-8."""
REMEMBERED = 16
"""Lists of texts whose tokens are known: a byte for eight tokens of the vocabulary each."""


class BreakerFinder:
    """Knows the tokens of one vocabulary by their text; threads ask it at the same time."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._remembered = functools.lru_cache(REMEMBERED)(self._find)

    def __call__(self, texts: Sequence[str] | None) -> Breakers:
        """All tokens in which one of the texts is; of a text that is in none, or also, the tokens that spell it.

        None: the usual texts, if there is a tokenizer. Raises InvalidRequest if a text is no Unicode.
        """
        if texts is None:
            texts = DEFAULT if self._tokenizer.available else ()
        return self._remembered(tuple(sorted(set(texts))))

    def _find(self, texts: tuple[str, ...]) -> Breakers:
        breaks = np.zeros(self._vocab_size, dtype=bool)
        sequences = []
        for text in texts:
            for spelling in (text, " " + text):
                ids = tuple(self._tokenizer.encode(spelling, add_special_tokens=False))
                sequences += [ids] if len(ids) > 1 else []
            breaks[self._tokens_with(text.encode())] = True
        own = tuple(ids for ids in dict.fromkeys(sequences) if not breaks[ids[-1]])
        return Breakers(np.packbits(breaks, bitorder="little").tobytes(), own)

    def _tokens_with(self, text: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        vocabulary, ends = self._vocabulary
        places = np.flatnonzero(vocabulary[: len(vocabulary) - len(text) + 1] == text[0])
        for offset, byte in enumerate(text):
            places = places[vocabulary[places + offset] == byte]
        return np.searchsorted(ends, places, side="right")

    @functools.cached_property
    def _vocabulary(
        self,
    ) -> "tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.int64]]]":
        """The texts of all tokens, one behind the other, and where each ends."""
        texts = [self._tokenizer.id_to_bytes(token) + BETWEEN for token in range(self._vocab_size)]
        return np.frombuffer(b"".join(texts), dtype=np.uint8), np.cumsum([len(text) for text in texts])
