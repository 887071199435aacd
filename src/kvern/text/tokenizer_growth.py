"""How much longer a tokenizer may make a text, found in ``tokenizer.json`` before anything of it runs.

Normalizers and pre-tokenizers rewrite a text, post-processors repeat its tokens, decoders rewrite each token. A step
that writes two characters for one is harmless; twenty of them in a row make a million of one. What Unicode's own forms
add (18 characters for one at most, once) does not count, nor does one mark in front of a text.
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
"""Characters or tokens that all steps of a part together may make of one."""
MOST_STEPS = 64
"""Of one part."""
MOST_WORD = 256
"""Characters of a word that WordPiece cuts, which takes their number cubed, and of what BPE puts around characters."""
COUNTED_ADDED = 16
"""Tokens that a post-processor adds count as one more for each so many."""
INNATE = {"ByteLevel": 4, "Precompiled": 18}
"""What these make of one character: the bytes of UTF-8, and compatibility forms. The first of each is free so far."""
SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
CONSUMING = re.compile(r"(?:\\[sdwnrt]|[^\\.^$*+?{}\[\]|()])(?:\+|\{[1-9]\d*,\d*\})?")
"""Regular expressions that match a character at least, told at a glance."""


class Model(msgspec.Struct):
    """What of a model takes time of its own."""

    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int | None = None


class Parts(msgspec.Struct):
    """``tokenizer.json`` without its vocabulary."""

    model: Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def read_growth(path: Path, content: bytes) -> int:
    """Return how many characters or tokens the tokenizer in the file may make of one; 1 for nearly all there are.

    Raises CorruptCheckpoint for what makes too much, and what msgspec and base64 raise for what they cannot read.
    """
    parts = msgspec.json.decode(content, type=Parts)
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
    """What the steps of one part make of one character or token."""
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
    """The steps of a part, whether one or a sequence of sequences."""
    if isinstance(part, dict):
        inner = [step for name in SEQUENCES if isinstance(part.get(name), list) for step in part[name]]
        if not inner:
            yield part
        for step in inner:
            yield from _steps(step)


def _made(step: dict[str, Any]) -> int:
    """Characters or tokens that a step makes of one. Steps are told by their fields: old files leave out the type."""
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
    """Characters of a text when a later step takes it apart."""
    return len(unicodedata.normalize("NFKD", content))


def _templated(pieces: list[Any], special: dict[str, Any]) -> int:
    """How often a template of a post-processor writes a text, or how many tokens it adds."""
    texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    added = sum(len(special[piece["SpecialToken"]["id"]]["ids"]) for piece in pieces if "SpecialToken" in piece)
    return max(math.ceil(added / COUNTED_ADDED), *map(texts.count, ("A", "B")))
