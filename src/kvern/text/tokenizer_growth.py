"""The factor by which a tokenizer may lengthen a text, read from ``tokenizer.json`` before the tokenizer is used.

Normalizers and pre-tokenizers rewrite a text, post-processors repeat its tokens, decoders rewrite each token. A step
that writes two characters for one is harmless; twenty of them in a row make a million of one. Unicode's own forms (at
most 18 characters for one, once) do not count, nor does one mark in front of a text.
"""

import base64
import math
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvern.errors import CorruptCheckpoint, shown

MOST_GROWTH = 64
"""The limit of characters or tokens that all steps of a part together may make of one."""
MOST_STEPS = 64
"""The limit of steps of one part."""
MOST_WORD = 256
"""The limit of a word that WordPiece splits, in time cubic in its length, and of the affixes of BPE, in characters."""
COUNTED_ADDED = 16
"""The number of added tokens of a post-processor that count as one more."""
INNATE = {"ByteLevel": 4, "Precompiled": 18}
"""The growth of these steps that does not count the first time: bytes of UTF-8, and compatibility forms."""
SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
CONSUMING = re.compile(r"(?:\\[sdwnrt]|[^\\.^$*+?{}\[\]|()])(?:\+|\{[1-9]\d*,\d*\})?")
"""Regular expressions that clearly match at least one character."""


class ModelFields(msgspec.Struct):
    """Fields of a model that affect its time."""

    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int | None = None


class TokenizerFile(msgspec.Struct):
    """``tokenizer.json`` without its vocabulary."""

    model: ModelFields
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def read_growth(path: Path, content: bytes) -> int:
    """Returns the most characters or tokens that the tokenizer in the file makes of one; 1 for nearly all tokenizers.

    Raises CorruptCheckpoint for a tokenizer that makes too many, and errors of msgspec and base64 for a malformed file.
    """
    parts = msgspec.json.decode(content, type=TokenizerFile)
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word"):
        value = getattr(parts.model, name) or 0
        if (value if isinstance(value, int) else len(value)) > MOST_WORD:
            raise CorruptCheckpoint(
                f"{path}: model.{name} is {shown(value)}: at most {MOST_WORD}, as more takes too long; mend the file"
            )
    growth = math.prod(_growth(path, name, getattr(parts, name)) for name in ("normalizer", "pre_tokenizer"))
    growth *= _growth(path, "post_processor", parts.post_processor)
    _growth(path, "decoder", parts.decoder)
    if growth > MOST_GROWTH:
        raise CorruptCheckpoint(
            f"{path}: normalizer, pre_tokenizer and post_processor make {growth} tokens of one character: at most "
            f"{MOST_GROWTH}; mend the file"
        )
    return growth


def _growth(path: Path, name: str, part: Any) -> int:
    """Returns the most characters or tokens that the steps of one part make of one."""
    growth, innate = 1, dict(INNATE)
    for place, step in enumerate(_steps(part)):
        growth *= max(1, math.ceil(_made(step) / innate.pop(step.get("type", ""), 1)))
        if growth > MOST_GROWTH or place >= MOST_STEPS:
            raise CorruptCheckpoint(
                f"{path}: {name} makes {growth} characters or tokens of one by its step {place + 1}, "
                f"{shown(step.get('type') or step)}: at most {MOST_GROWTH}, in {MOST_STEPS} steps; mend the file"
            )
    return growth


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yields the steps of a part, which may be nested sequences."""
    if isinstance(part, dict):
        inner = [step for name in SEQUENCES if isinstance(part.get(name), list) for step in part[name]]
        if not inner:
            yield part
        for step in inner:
            yield from _steps(step)


def _made(step: dict[str, Any]) -> int:
    """Returns the most characters or tokens that a step makes of one. Old files leave out types, so fields identify
    steps."""
    match step:
        case {"pattern": {"String": str(pattern)}, "content": str(content)}:
            return math.ceil(_extent(content) / len(pattern)) if pattern else 1 + _extent(content)
        case {"pattern": {"Regex": str(pattern)}, "content": str(content)}:
            return _extent(content) + (CONSUMING.fullmatch(pattern) is None)
        case {"prepend": str(content)}:
            return _extent(content)
        case {"precompiled_charsmap": str(encoded)}:
            charsmap = base64.b64decode(encoded)
            texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
            return max(len(text.decode(errors="replace")) for text in texts.split(b"\0"))
        case {"suffix": ""} | {"word_delimiter_token": ""}:
            return 2  # a space between all characters
        case {"single": list(single), "pair": list(pair), "special_tokens": dict(special)}:
            return max(_templated(single, special), _templated(pair, special))
        case {"type": "ByteLevel"}:
            return INNATE["ByteLevel"]
    return 1


def _extent(content: str) -> int:
    """Returns the characters of a text after decomposition by a later step."""
    return len(unicodedata.normalize("NFKD", content))


def _templated(pieces: list[Any], special: dict[str, Any]) -> int:
    """Returns how often a template of a post-processor repeats a text, or the share of tokens that it adds."""
    texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    added = sum(len(special[piece["SpecialToken"]["id"]]["ids"]) for piece in pieces if "SpecialToken" in piece)
    return max(math.ceil(added / COUNTED_ADDED), *map(texts.count, ("A", "B")))
