"""Text to token ids and back, from the files of a checkpoint, without transformers.

``tokenizer.json`` has the algorithm; ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json``
name special and further tokens; ``generation_config.json`` and ``config.json`` name the tokens that end an answer. A
folder without ``tokenizer.json`` still gives a model that takes and returns token ids.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from kvern.errors import CorruptCheckpoint, InvalidRequest, PromptTooLong, half_pair, shown
from kvern.io.files import MEBIBYTE, read_object, read_whole, reason
from kvern.text.chat_template import ChatTemplate
from kvern.text.tokenizer_growth import read_growth

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

T = TypeVar("T")
Named = tuple[tokenizers.AddedToken, int | None]
"""A token, and the id that a file gives it."""


def add_named_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], added: Mapping[str, Any]
) -> None:
    """Adds the tokens that ``config`` names, and those of ``added_tokens.json`` with their ids if ``config`` has no
    ``added_tokens_decoder``.

    Raises CorruptCheckpoint for malformed files, and for a token that cannot have the id that they give it.
    """
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, Named] = {}
    try:
        for token, place in _named(config, added):
            if token.content not in present:
                missing.setdefault(token.content, (token, place))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"the added tokens that files in {folder} name cannot be read: {error!r:.200}"
        ) from None
    backend.add_tokens([token for token, _ in missing.values()])
    for token, place in missing.values():
        if place is not None and (found := backend.token_to_id(token.content)) != place:
            raise CorruptCheckpoint(
                f"{folder}: token {shown(token.content)} is to have id {place}, and its place in tokenizer.json is "
                f"{found}: download tokenizer.json again"
            )


def all_special(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``tokenizer_config.json`` with the model's own special tokens among its special tokens.

    If it has no ``added_tokens_decoder``, those of ``special_tokens_map.json`` are included, which old versions of
    transformers wrote.
    """
    if "added_tokens_decoder" not in config:
        config = {**config, **special_map, **{name: config[name] for name in EXTRA if config.get(name)}}
    return {**_own_names(config), **config}


def _own_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns special tokens with names that only this model has, such as image_token."""
    tables = (config.get(name) for name in ("model_specific_special_tokens", "extra_special_tokens"))
    found = {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    found |= {name: value for table in tables if isinstance(table, dict) for name, value in table.items()}
    return {name: value for name, value in found.items() if name not in NAMES}


def _named(config: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[Named]:
    """Yields all named tokens, first those with ids."""
    decoder = config.get("added_tokens_decoder")
    special = list(_special(config))
    contents = {token.content for token in special}
    if decoder is not None:
        for place, value in sorted((int(place), value) for place, value in decoder.items()):
            yield _token(value, value.get("special") is True or value["content"] in contents), place
    else:
        for content, place in sorted(added.items(), key=lambda entry: int(entry[1])):
            yield _token(content, content in contents), int(place)
    yield from ((token, None) for token in special)


def _special(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    more: Any = next((config[name] for name in EXTRA if config.get(name) and not isinstance(config[name], dict)), [])
    for value in (*(config.get(name) for name in NAMES), *_own_names(config).values(), *more):
        if value is not None:
            yield _token(value, special=True)


def _token(value: Any, special: bool) -> tokenizers.AddedToken:
    """Returns a token from its text, or from an object with its flags."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=special)
    flags = {name: value[name] for name in FLAGS if name in value}
    return tokenizers.AddedToken(value["content"], special=special, **flags)


MOST_TOKENIZER_BYTES = 256 * MEBIBYTE
SPECIAL_TOKENS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
OTHER_FORMS = {
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
    "continue_final_message", "chat_template", "tokenizer_kwargs",
}  # fmt: skip
"""Options of transformers' ``apply_chat_template`` that kvern's does not have."""
LOWERS = ("siglip", "siglip2")
"""Model types that were trained on texts in lower case; the tokenizer's file of some, which is Gemma's, does not say
so."""
MOST_GROWN = 1 << 22
"""The limit of characters that tokenizers which lengthen texts may make of the texts of one call."""


class MadeOnce(dict[int, T]):
    """The kept result of a function of token ids."""

    def __init__(self, tokenizer: Tokenizer, make: Callable[[Tokenizer, int], T]) -> None:
        self._tokenizer = tokenizer
        self._make = make

    def __missing__(self, token_id: int) -> T:
        made = self[token_id] = self._make(self._tokenizer, token_id)
        return made


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.id_to_bytes(token_id).decode("utf-8", errors="replace")


class Tokenizer:
    """The tokenizer of one checkpoint folder. ``variables`` are defaults of the chat template's variables.

    Attributes:
        bos_token, eos_token, pad_token: the special tokens as text, None if the checkpoint names none.
        bos_token_id, eos_token_id, pad_token_id: their ids, or None.
        eos_token_ids: all ids that end an answer, sorted: the tokenizer's own, and those of
            ``generation_config.json`` or, if it names none, of ``config.json``.
        fallback_bytes: the byte of each token that stands for one, in vocabularies that fall back to bytes.
        longest_token: the most characters of one token, None if there is no limit.

    Raises:
        CorruptCheckpoint: one of the files exists and cannot be read.
    """

    def __init__(self, folder: str | Path, variables: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self._variables = dict(variables or {})
        self._lowers = (
            read_json(self.folder / "sentence_bert_config.json").get("do_lower_case") is True
            or read_json(self.folder / "config.json").get("model_type") in LOWERS
        )
        self._config = all_special(*(read_json(self.folder / name) for name in SPECIAL_TOKENS_FILES))
        self._backend, self._growth = load_backend(self.folder / "tokenizer.json")
        self._special_tokens = special_tokens(self._config)
        if self._backend is not None:
            added = read_json(self.folder / "added_tokens.json")
            add_named_tokens(self._backend, self.folder, self._config, added)
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
        self.texts: Mapping[int, str] = MadeOnce(self, _text)
        """`id_to_token` of each token."""
        self._made: dict[object, MadeOnce[Any]] = {}
        self.is_byte_level = self._backend is not None and is_byte_level(self._backend)
        self.fallback_bytes = fallback_bytes(self._backend) if self._backend is not None else {}
        self.longest_token = longest_token(self._backend) if self._backend is not None else None

    @property
    def available(self) -> bool:
        """False if the folder has no ``tokenizer.json``: then only token ids are read and returned."""
        return self._backend is not None

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; 0 without a tokenizer. The model's own table may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True) if self._backend is not None else 0

    def encode(self, text: str, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Returns the token ids of ``text``; special tokens in the text are recognized.

        Raises:
            InvalidRequest: the text is not valid Unicode, is certainly too long for ``most_tokens``, or there is no
                tokenizer.
        """
        if most_tokens is not None:
            self.check_length(text, most_tokens)
        return self.encode_each([text], add_special_tokens)[0]

    def definition(self) -> str:
        """Returns ``tokenizer.json`` with all added tokens. Raises InvalidRequest without a tokenizer."""
        return str(self._require().to_str())

    def check_length(self, text: str, most_tokens: int) -> None:
        """Raises PromptTooLong for a text that certainly has more tokens."""
        if self.longest_token is not None and len(text) > (most := most_tokens * self.longest_token):
            message = (
                f"the prompt has {len(text)} characters, and the maximum context length of {most_tokens} tokens has "
                f"{most} at most: the prompt is too long; shorten it"
            )
            raise PromptTooLong(message, len(text) // self.longest_token, most_tokens)

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Returns the token ids of each text, which is made lower case if sentence_bert_config.json says so.

        Raises InvalidRequest.
        """
        with self._reading(texts) as backend:
            # this function of the library lets other threads run
            lowered = [text.lower() for text in texts] if self._lowers else list(texts)
            encodings = backend.encode_batch_fast(lowered, add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Returns the token ids of two texts that are encoded together, and the type of each token: 0, or 1 for the
        second.

        Raises InvalidRequest.
        """
        with self._reading((first, second)) as backend:
            (encoding,) = backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        return list(encoding.ids), list(encoding.type_ids)

    def cutting_tokens(self, template: str) -> list[str]:
        """Returns special tokens in ``template`` after which a text can be split: its parts, encoded without added
        special tokens, have the same ids as the whole.

        That requires that parts are encoded independently, and that no other added token contains this one or reaches
        over the split. SentencePiece encodes the beginning of a text differently, so it has none.
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
        """Returns the special tokens that ``encode`` puts before a text. Raises InvalidRequest without a tokenizer."""
        plain, full = self.encode("a", add_special_tokens=False), self.encode("a")
        places = range(len(full) - len(plain) + 1)
        return next((full[:place] for place in places if full[place : place + len(plain)] == plain), [])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ``ids``; bytes that form no character become U+FFFD."""
        return str(self._require().decode(ids, skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str | None) -> int | None:
        if token is None or self._backend is None:
            return None
        return self._backend.token_to_id(token)

    def named_token(self, name: str) -> str | None:
        """Returns the special token with a name such as bos_token."""
        return self._special_tokens.get(name)

    def id_to_token(self, token_id: int) -> str:
        """Returns the text of one token alone, U+FFFD if it is only part of a character."""
        return self.texts[token_id]

    def made_once(self, make: Callable[[Tokenizer, int], T]) -> Mapping[int, T]:
        """Returns what `make` makes of each token id, when it is asked for first."""
        if make not in self._made:
            self._made[make] = MadeOnce(self, make)
        return self._made[make]

    def id_to_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token adds to the text, in UTF-8; they may be part of a character.

        Ids without a token (tables padded beyond the vocabulary) give ``b""``, as decoding skips them.
        """
        if token_id not in self._bytes:
            token = self._backend.id_to_token(token_id) if self._backend is not None else None
            spelled = self._token_bytes(token) if token is not None else b""
            self._bytes[token_id] = self.fallback_bytes.get(token_id, spelled)
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
        """Returns the messages as one prompt, written by the model's chat template.

        System messages are moved if the template does not take them at their places.

        Raises:
            InvalidRequest: no template, malformed messages, or the template refuses them.
        """
        names = {**self._special_tokens, **self._variables, **variables}
        fitted = self.chat_template.fit_messages(messages, bool(tools), self._special_tokens)
        return self.chat_template.render(fitted, tools or None, add_generation_prompt, names)

    def lost_in_template(self, messages: Sequence[Mapping[str, Any]], tools: bool) -> list[str]:
        """Returns what the chat template leaves out of a conversation: tools, tool_calls, content_beside_tool_calls,
        tool_results."""
        return self.chat_template.forms(tools, self._special_tokens).lost(messages, tools)

    def chat_prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Returns ``chat_prompt`` as token ids; the template writes the special tokens itself, so none are added."""
        prompt = self.chat_prompt(messages, tools, add_generation_prompt, **variables)
        return self.encode(prompt, add_special_tokens=False)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Returns ``chat_prompt_ids``, or ``chat_prompt`` unless ``tokenize``: the name and the defaults are those of
        transformers' tokenizers.

        Raises:
            InvalidRequest: as ``chat_prompt``, and for options of transformers' that would give another form.
        """
        for name in OTHER_FORMS & variables.keys():
            if variables.pop(name):
                raise InvalidRequest(f"apply_chat_template has no {name}: it returns a text, or token ids as a list")
        write = self.chat_prompt_ids if tokenize else self.chat_prompt
        return write(conversation, tools, add_generation_prompt, **variables)

    def _require(self) -> tokenizers.Tokenizer:
        if self._backend is None:
            raise InvalidRequest(
                f"the model in {self.folder} has no tokenizer.json: send token ids instead of text, or add that file"
            )
        return self._backend

    @contextlib.contextmanager
    def _reading(self, texts: Sequence[str]) -> Iterator[tokenizers.Tokenizer]:
        """Yields the backend to encode these texts. Raises InvalidRequest for texts that it cannot encode."""
        backend = self._require()
        try:
            if self._growth > 1 and (made := self._growth * sum(map(len, texts))) > MOST_GROWN:
                raise InvalidRequest(
                    f"the model's tokenizer may make {made} characters of this text, {self._growth} of one: at most "
                    f"{MOST_GROWN}; shorten the prompt"
                )
            yield backend
        except (UnicodeEncodeError, TypeError) as error:  # the library raises TypeError for strings that it cannot take
            raise _not_text(texts) from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InvalidRequest(f"the model's tokenizer cannot read this text: {error}; write it otherwise") from error

    def _token_bytes(self, token: str) -> bytes:
        if self.is_byte_level:
            if all(character in BYTE_OF_CHARACTER for character in token):
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            return token.encode()
        return token.replace("\u2581", " ").encode()

    def _find_eos_token_ids(self) -> tuple[int, ...]:
        generation, config = (read_json(self.folder / name) for name in ("generation_config.json", "config.json"))
        text = config.get("text_config") or config.get("llm_config")
        files = (generation, config, text if isinstance(text, dict) else {})
        said: Any = next((file["eos_token_id"] for file in files if file.get("eos_token_id") is not None), [])
        try:
            found = {*end_token_ids(said), *(() if self.eos_token_id is None else (self.eos_token_id,))}
        except ValueError as error:
            raise CorruptCheckpoint(f"{self.folder}: {error}") from None
        return tuple(sorted(found))

    def _find_special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset()
        return frozenset(index for index, token in self._backend.get_added_tokens_decoder().items() if token.special)


def _not_text(texts: Sequence[object]) -> InvalidRequest:
    """Returns the error of texts that the tokenizer does not take."""
    for text in texts:
        if not isinstance(text, str):
            return InvalidRequest(f"the prompt is {shown(text)}: it must be a text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return InvalidRequest(f"the prompt holds {half_pair(error)}")
    return InvalidRequest(f"the prompt is not valid Unicode text: {shown(texts)}")


def byte_characters() -> dict[str, int]:
    """Returns the byte of each character in a byte-level vocabulary (GPT-2's table).

    Printable Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = byte_characters()


def reaches_into(other: str, token: str) -> bool:
    """True if ``other`` can end in the middle of ``token``."""
    return any(other.endswith(token[:end]) for end in range(1, len(token)))


def decoders_of(backend: tokenizers.Tokenizer) -> list[str]:
    """Returns the kinds of the decoders that turn tokens into text, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return {*decoders_of(backend)} - {"Fuse"} == {"ByteLevel"}


def fallback_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Returns the tokens that stand for one byte each, in vocabularies with byte fallback."""
    if "ByteFallback" not in decoders_of(backend):
        return {}
    names = {f"<0x{byte:{form}}>": bytes([byte]) for byte in range(256) for form in ("02X", "02x")}
    found = ((backend.token_to_id(name), byte) for name, byte in names.items())
    return {token_id: byte for token_id, byte in found if token_id is not None}


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """Returns the most characters of one token; None unless the vocabulary has all bytes, so that all text is
    encoded."""
    covers_bytes = is_byte_level(backend) or getattr(backend.model, "byte_fallback", False)
    if not covers_bytes or not isinstance(backend.model, tokenizers.models.BPE):
        return None
    longest = max((len(token.encode()) for token in backend.get_vocab(with_added_tokens=True)), default=1)
    return longest if backend.normalizer is None else 2 * longest  # composing characters makes texts shorter


def load_backend(path: Path) -> tuple[tokenizers.Tokenizer | None, int]:
    """Returns the tokenizer of a file, None if it is missing, and the most characters that it makes of one.

    Raises CorruptCheckpoint for a file that cannot be read, and for one that makes too many.
    """
    try:
        text = read_whole(path, MOST_TOKENIZER_BYTES)
    except FileNotFoundError:
        return None, 1
    try:
        growth = read_growth(path, text)
        backend = tokenizers.Tokenizer.from_buffer(text)
    except CorruptCheckpoint:
        raise
    except BaseException as error:  # the library raises bare Exception for everything
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise CorruptCheckpoint(f"{path} cannot be read as a tokenizer: {reason(error)}; download it again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend, growth


def is_panic(error: BaseException) -> bool:
    """True if the library gave up, for example on regular expressions that take too many steps."""
    return type(error).__name__ == "PanicException"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file, empty if there is no such file."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def end_token_ids(value: Any) -> tuple[int, ...]:
    """Returns the ids in an ``eos_token_id``, one or several. Raises ValueError for other values."""
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id is {shown(value)}: it must be a token id, or a list of some")
    return ids


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the text of each special token by name (``bos_token``, ...). A token is text or an object with
    ``content``."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
