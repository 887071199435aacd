"""Incremental conversion of token ids to text."""

from __future__ import annotations

import codecs
import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Sequence

from kvern.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8, so at most as many tokens
PROMPT_CONTEXT = 8  # prompt tokens that decide how the first generated token is written
Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns the token ids of one answer into text piece by piece, without decoding earlier tokens again.

    ``append`` returns only whole characters: the bytes of a character in several tokens wait for the rest. With a
    byte-level vocabulary, all pieces with ``flush()`` are exactly ``tokenizer.decode(ids)``. With other vocabularies
    (SentencePiece), where the text of a token depends on its left neighbour, they are what ``ids`` add to the text of
    ``prompt_ids``. Without a tokenizer every piece is empty. ``kept`` are special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
    ) -> None:
        def is_skipped(token_id: int) -> bool:
            return skip_special_tokens and tokenizer.is_special(token_id) and token_id not in kept

        self._stream: ByteStream | WindowStream
        if tokenizer.is_byte_level or not tokenizer.available:
            self._stream = ByteStream(tokenizer, is_skipped)
        else:
            self._stream = WindowStream(tokenizer, prompt_ids, is_skipped)

    def append(self, ids: Iterable[int]) -> str:
        """Takes the next ids of the answer and returns the text that is certain now."""
        return self._stream.append(ids)

    def flush(self) -> str:
        """Returns an incomplete character as U+FFFD; call once, after the last token."""
        return self._stream.flush()

    def fork(self) -> IncrementalDetokenizer:
        """Returns a copy for an answer that continues differently from here."""
        other = copy.copy(self)
        other._stream = self._stream.fork()
        return other


class ByteStream:
    """A stream for vocabularies whose tokens are fixed bytes; a UTF-8 decoder keeps the incomplete character."""

    def __init__(self, tokenizer: Tokenizer, is_skipped: Callable[[int], bool]) -> None:
        self._tokenizer = tokenizer
        self._is_skipped = is_skipped
        self._decoder = Utf8Decoder(errors="replace")

    def append(self, ids: Iterable[int]) -> str:
        pieces = [self._tokenizer.id_to_bytes(token_id) for token_id in ids if not self._is_skipped(token_id)]
        return self._decoder.decode(b"".join(pieces))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def fork(self) -> ByteStream:
        other = ByteStream(self._tokenizer, self._is_skipped)
        other._decoder.setstate(self._decoder.getstate())
        return other


class WindowStream:
    """A stream that decodes a short window: tokens already written, which affect the text, and waiting ones.

    The decoder of a vocabulary with byte fallback decodes consecutive byte tokens as one run: UTF-8 as text, anything
    else as a U+FFFD for each byte. So a run waits until it ends, or until it cannot be UTF-8 any more.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], is_skipped: Callable[[int], bool]) -> None:
        self._tokenizer = tokenizer
        self._is_skipped = is_skipped
        self._run = Utf8Decoder()
        self._is_garbage = False
        self._written, self._waiting = self._split(self._visible(prompt_ids[-PROMPT_CONTEXT:]))

    def append(self, ids: Iterable[int]) -> str:
        return "".join(map(self._next, self._visible(ids)))

    def flush(self) -> str:
        piece = self._new_text() if self._waiting else ""
        self._written, self._waiting = self._written + self._waiting, []
        return piece

    def fork(self) -> WindowStream:
        other = copy.copy(self)
        other._waiting = list(self._waiting)
        other._run = Utf8Decoder()
        other._run.setstate(self._run.getstate())
        return other

    def _next(self, token_id: int) -> str:
        """Takes a token and returns the text that is certain now."""
        byte = self._tokenizer.fallback_bytes.get(token_id)
        if byte is not None and self._is_garbage:
            self._written = [token_id]
            return REPLACEMENT
        self._waiting.append(token_id)
        if byte is None:
            self._run.reset()
            self._is_garbage = False
        elif self._begins_text(byte):
            return ""
        if not (piece := self._new_text()):
            return ""
        self._written, self._waiting = self._waiting, []
        return piece

    def _begins_text(self, byte: bytes) -> bool:
        """True if the run can be UTF-8 with this byte at its end."""
        try:
            self._run.decode(byte)
        except UnicodeDecodeError:
            self._is_garbage = True
        return not self._is_garbage

    def _split(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Returns the end of the prompt in whole characters, and the byte tokens of an incomplete one after it."""
        pieces = [self._tokenizer.fallback_bytes.get(token_id) for token_id in prompt]
        start = next((place for place, byte in enumerate(pieces) if byte is None or not is_continuation(byte)), 0)
        for end in range(len(prompt) - 1, max(len(prompt) - LONGEST_CHARACTER, -1), -1):
            byte = pieces[end]
            if byte is None:
                break
            if not is_continuation(byte):
                with contextlib.suppress(UnicodeDecodeError):
                    if not self._run.decode(b"".join(filter(None, pieces[end:]))):
                        return prompt[start:end], prompt[end:]
                self._run.reset()
                break
        return prompt[start:], []

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if not self._is_skipped(token_id)]

    def _new_text(self) -> str:
        before = self._decode(self._written)
        text = self._decode(self._written + self._waiting)
        return text[len(before) :] if text.startswith(before) else self._decode(self._waiting)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def is_continuation(byte: bytes) -> bool:
    """True if a byte of UTF-8 continues a character."""
    return 0x80 <= byte[0] < 0xC0
