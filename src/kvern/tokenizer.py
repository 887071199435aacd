"""Text to token ids and back, from the files of a checkpoint, without transformers.

``tokenizer.json`` holds the algorithm, ``tokenizer_config.json`` and ``special_tokens_map.json`` name the special
tokens, ``generation_config.json`` and ``config.json`` the tokens that end an answer. A folder without
``tokenizer.json`` still gives a model that takes and returns token ids.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvern.chat_template import ChatTemplate
from kvern.errors import CorruptCheckpoint, InvalidRequest, PromptTooLong, shown
from kvern.files import MEBIBYTE, read_object, read_whole, reason

MOST_TOKENIZER_BYTES = 256 * MEBIBYTE
REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8, so at most as many tokens
PROMPT_CONTEXT = 8  # prompt tokens that decide how the first generated token is written
Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Tokenizer:
    """The tokenizer of one checkpoint folder. ``variables`` are names that its chat template sees by default.

    Attributes:
        bos_token, eos_token, pad_token: the special tokens as text, ``None`` where the checkpoint names none.
        bos_token_id, eos_token_id, pad_token_id: their ids, ``None`` likewise.
        eos_token_ids: every id that ends an answer: the tokenizer's own and those of ``generation_config.json``.

        longest_token: characters of a text that one token stands for at most, ``None`` where that has no bound.

    Raises:
        CorruptCheckpoint: one of the files is there but cannot be read.
    """

    def __init__(self, folder: str | Path, variables: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self._variables = dict(variables or {})
        self._lowers = read_json(self.folder / "sentence_bert_config.json").get("do_lower_case") is True
        self._config = read_json(self.folder / "tokenizer_config.json")
        self._backend = load_backend(self.folder / "tokenizer.json")
        self._special_tokens = special_tokens(self._config, read_json(self.folder / "special_tokens_map.json"))
        self.chat_template = ChatTemplate.from_folder(self.folder, self._config)
        self.bos_token = self._special_tokens.get("bos_token")
        self.eos_token = self._special_tokens.get("eos_token")
        self.pad_token = self._special_tokens.get("pad_token")
        self.bos_token_id = self.token_to_id(self.bos_token)
        self.eos_token_id = self.token_to_id(self.eos_token)
        self.pad_token_id = self.token_to_id(self.pad_token)
        self.eos_token_ids = self._find_eos_token_ids()
        self._special_ids = self._find_special_ids()
        self._bytes: dict[int, bytes] = {}
        self.is_byte_level = self._backend is not None and is_byte_level(self._backend)
        self.longest_token = longest_token(self._backend) if self._backend is not None else None

    @property
    def available(self) -> bool:
        """False where the folder has no ``tokenizer.json``: token ids in, token ids out."""
        return self._backend is not None

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; 0 without a tokenizer. The model's own table may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True) if self._backend is not None else 0

    def encode(self, text: str, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Return the token ids of ``text``; special tokens written out in it are recognised.

        Raises:
            InvalidRequest: the text is not valid Unicode, or too long for ``most_tokens`` whatever it says, or there is
                no tokenizer.
        """
        if most_tokens is not None:
            self.check_length(text, most_tokens)
        return self.encode_each([text], add_special_tokens)[0]

    def check_length(self, text: str, most_tokens: int) -> None:
        """Raises PromptTooLong for a text that has more tokens than that whatever it says."""
        if self.longest_token is not None and len(text) > (most := most_tokens * self.longest_token):
            message = (
                f"the prompt has {len(text)} characters, and the maximum context length of {most_tokens} tokens has "
                f"{most} at most: the prompt is too long; shorten it"
            )
            raise PromptTooLong(message, len(text) // self.longest_token, most_tokens)

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Return the token ids of each text, in small letters if sentence-transformers' file says so.

        Raises InvalidRequest.
        """
        backend = self._require()
        try:
            # of the library's ways to encode, this one lets other threads run meanwhile
            lowered = [text.lower() for text in texts] if self._lowers else list(texts)
            encodings = backend.encode_batch_fast(lowered, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # the library calls a string it cannot take a TypeError
            raise InvalidRequest(f"the prompt is not valid Unicode text: {shown(''.join(texts))}") from error
        return [list(encoding.ids) for encoding in encodings]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts that are read together, and the kind of each token: 0, or 1 of the second,
        as the tokenizer tells them apart. Raises InvalidRequest."""
        try:
            (encoding,) = self._require().encode_batch_fast([(first, second)], add_special_tokens=True)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"the texts are not valid Unicode: {shown(first + second)}") from error
        return list(encoding.ids), list(encoding.type_ids)

    def cutting_tokens(self, template: str) -> list[str]:
        """Return the special tokens named in ``template`` behind which a text can be cut: its parts, encoded without
        special tokens around them, have the same ids as the whole.

        That is so where every part is encoded by itself, and where no other added token can hide this one or reach
        over the cut. SentencePiece writes the beginning of a text differently, so it has none.
        """
        added = [] if self._backend is None else list(self._backend.get_added_tokens_decoder().values())
        texts = [token.content for token in added]
        if not self.is_byte_level or any(token.single_word for token in added):
            return []
        return [
            token.content
            for token in added
            if token.special and not (token.normalized or token.lstrip or token.rstrip) and token.content in template
            if not any(reaches_into(text, token.content) for text in texts)
            if sum(token.content in text for text in texts) == 1
        ]

    def leading_special_tokens(self) -> list[int]:
        """Return the special tokens that ``encode`` puts before a text. Raises InvalidRequest without a tokenizer."""
        plain, full = self.encode("a", add_special_tokens=False), self.encode("a")
        places = range(len(full) - len(plain) + 1)
        return next((full[:place] for place in places if full[place : place + len(plain)] == plain), [])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that form no character become U+FFFD."""
        return str(self._require().decode(ids, skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str | None) -> int | None:
        if token is None or self._backend is None:
            return None
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        """Return the text of one token by itself, U+FFFD where it is only part of a character."""
        return self.id_to_bytes(token_id).decode("utf-8", errors="replace")

    def id_to_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to the text, in UTF-8: half a character where the token is half a character.

        Ids without a token (tables padded beyond the vocabulary) give ``b""``, as decoding skips them.
        """
        if token_id not in self._bytes:
            token = self._backend.id_to_token(token_id) if self._backend is not None else None
            self._bytes[token_id] = self._token_bytes(token) if token is not None else b""
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """True for tokens that ``skip_special_tokens`` leaves out of the text."""
        return token_id in self._special_ids

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the messages as one prompt, written by the model's chat template.

        System messages where the template takes none go where it does.

        Raises:
            InvalidRequest: no template, malformed messages, or the template refuses them.
        """
        names = {**self._special_tokens, **self._variables, **variables}
        fitted = self.chat_template.fit_messages(messages, bool(tools), self._special_tokens)
        return self.chat_template.render(fitted, tools or None, add_generation_prompt, names)

    def chat_prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """``chat_prompt`` as token ids; the template writes the special tokens itself, so none are added."""
        prompt = self.chat_prompt(messages, tools, add_generation_prompt, **variables)
        return self.encode(prompt, add_special_tokens=False)

    def _require(self) -> tokenizers.Tokenizer:
        if self._backend is None:
            raise InvalidRequest(
                f"the model in {self.folder} has no tokenizer.json: send token ids instead of text, or add that file"
            )
        return self._backend

    def _token_bytes(self, token: str) -> bytes:
        if self.is_byte_level:
            if all(character in BYTE_OF_CHARACTER for character in token):
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def _find_eos_token_ids(self) -> tuple[int, ...]:
        found = {self.eos_token_id} - {None}
        configured = read_json(self.folder / "generation_config.json").get("eos_token_id")
        if configured is None:
            configured = read_json(self.folder / "config.json").get("eos_token_id")
        found.update(configured if isinstance(configured, list) else [configured])
        return tuple(sorted(token_id for token_id in found if isinstance(token_id, int)))

    def _find_special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset()
        return frozenset(index for index, token in self._backend.get_added_tokens_decoder().items() if token.special)


class IncrementalDetokenizer:
    """Turns the token ids of one answer into text piece by piece, never decoding what is already written.

    ``append`` returns only whole characters: the bytes of a character split over several tokens wait for the rest.
    With a byte-level vocabulary all pieces plus ``flush()`` are exactly ``tokenizer.decode(ids)``. With other
    vocabularies, where a token's spelling depends on its left neighbour (SentencePiece), they are what ``ids`` add to
    the text of ``prompt_ids``. Without a tokenizer every piece is empty.
    ``kept`` are special tokens that are not skipped.
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
        """Take the next ids of the answer and return the text that is now certain."""
        return self._stream.append(ids)

    def flush(self) -> str:
        """Return what waited for a character's end that never came, as U+FFFD; call once, after the last token."""
        return self._stream.flush()

    def fork(self) -> IncrementalDetokenizer:
        """One more, of an answer that goes on from here in another way."""
        other = copy.copy(self)
        other._stream = self._stream.fork()
        return other


class ByteStream:
    """Each token is a fixed run of bytes; a UTF-8 decoder keeps the unfinished character."""

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
    """Decodes a short window: tokens already written, for their spelling's sake, and those still waiting."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], is_skipped: Callable[[int], bool]) -> None:
        self._tokenizer = tokenizer
        self._is_skipped = is_skipped
        self._written, self._waiting = self._split(self._visible(prompt_ids[-PROMPT_CONTEXT:]))

    def append(self, ids: Iterable[int]) -> str:
        pieces = []
        for token_id in self._visible(ids):
            self._waiting.append(token_id)
            piece = self._new_text()
            if piece and (not piece.endswith(REPLACEMENT) or len(self._waiting) > LONGEST_CHARACTER):
                self._written, self._waiting = self._waiting, []
                pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        piece = self._new_text() if self._waiting else ""
        self._written, self._waiting = self._written + self._waiting, []
        return piece

    def fork(self) -> WindowStream:
        other = copy.copy(self)
        other._waiting = list(self._waiting)
        return other

    def _split(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Return the longest end of the prompt in whole characters, and the tokens of an unfinished one after it."""
        for end in range(len(prompt), max(len(prompt) - LONGEST_CHARACTER, 0), -1):
            for start in range(end):
                if REPLACEMENT not in self._decode(prompt[start:end]):
                    return prompt[start:end], prompt[end:]
        return [], []

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if not self._is_skipped(token_id)]

    def _new_text(self) -> str:
        before = self._decode(self._written)
        text = self._decode(self._written + self._waiting)
        return text[len(before) :] if text.startswith(before) else self._decode(self._waiting)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def byte_characters() -> dict[str, int]:
    """Return the byte behind each character of a byte-level vocabulary (GPT-2's table): printable Latin-1 characters
    stand for themselves, the other bytes for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = byte_characters()


def reaches_into(other: str, token: str) -> bool:
    """Whether ``other`` can end in the middle of ``token``."""
    return any(other.endswith(token[:end]) for end in range(1, len(token)))


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return isinstance(backend.decoder, tokenizers.decoders.ByteLevel)


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """Every character of a text becomes bytes, and every byte a part of a token, if the vocabulary holds all bytes."""
    covers_bytes = is_byte_level(backend) or getattr(backend.model, "byte_fallback", False)
    if not covers_bytes or not isinstance(backend.model, tokenizers.models.BPE):
        return None
    longest = max((len(token.encode()) for token in backend.get_vocab(with_added_tokens=True)), default=1)
    return longest if backend.normalizer is None else 2 * longest  # composing characters makes texts shorter


def load_backend(path: Path) -> tokenizers.Tokenizer | None:
    try:
        text = read_whole(path, MOST_TOKENIZER_BYTES)
    except FileNotFoundError:
        return None
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises bare Exception for everything
        raise CorruptCheckpoint(f"{path} cannot be read as a tokenizer: {reason(error)}; download it again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, ``{}`` where there is no such file."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def special_tokens(*files: Mapping[str, Any]) -> dict[str, str]:
    """Return name (``bos_token``, ...) to text; earlier files win. A token is text or an object with ``content``."""
    found: dict[str, str] = {}
    for file in reversed(files):
        for name, value in file.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found
