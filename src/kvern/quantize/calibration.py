"""Texts to calibrate with: a file of the user's, or the conversations that come with kvern, as rows of token ids."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.errors import ConfigError, InvalidRequest, shown
from kvern.io.files import open_regular, read_at, reason
from kvern.text.tokenizer import Tokenizer

OWN_TEXT = Path(__file__).with_name("calibration.jsonl")
"""Conversations by the generators of the embedded models; none of them is used for measurements."""

MOST_BYTES = 256 << 20
LEAST_TOKENS = 16
CHARACTERS_A_TOKEN = 16
"""The number of characters of text that are read for each token."""


class Calibration(NamedTuple):
    """`rows [N, L]` int64 token ids, and where they come from."""

    rows: Tensor
    source: str


def calibration(tokenizer: Tokenizer, file: Path | None, rows: int, length: int) -> Calibration:
    """At most `rows` rows of `length` tokens, as many as the text has; a short text makes one shorter row.

    `file` holds text, or JSONL: a line is a conversation {"messages": [...]}, {"prompt" or "text": "..."} or a string.
    Raises ConfigError.
    """
    path = file or OWN_TEXT
    ids: list[int] = []
    for text in texts(path, rows * length * CHARACTERS_A_TOKEN):
        ids += encoded(tokenizer, text, path)
        if len(ids) >= rows * length:
            break
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(f"calibration file {path} has {len(ids)} tokens: give a text of some thousand")
    length = min(length, len(ids))
    count = min(rows, len(ids) // length)
    tensor = torch.tensor(ids[: count * length]).view(count, length)
    return Calibration(tensor, str(file) if file else "kvern's own conversations")


def texts(path: Path, most_characters: int) -> Iterator[str | list[Mapping[str, Any]]]:
    """Texts and conversations of a file. Raises ConfigError."""
    try:
        with open_regular(path.expanduser(), MOST_BYTES) as stream:
            data = bytes(read_at(stream, 0, path.expanduser().stat().st_size))
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration file {path} cannot be read: {reason(error)}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"calibration file {path} is not UTF-8 text: byte {error.start} is no part of one") from None
    if not text.strip() or "\0" in text:
        raise ConfigError(f"calibration file {path} {'is empty' if not text.strip() else 'is not text'}")
    if path.suffix != ".jsonl":
        yield text[:most_characters]
        return
    for number, line in enumerate(text.split("\n"), 1):  # JSON texts may contain other line ends
        if line.strip():
            yield item_of(line, f"calibration file {path}, line {number}")


def item_of(line: str, where: str) -> str | list[Mapping[str, Any]]:
    """The text or conversation in a line of JSONL."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {reason(error)}") from None
    if isinstance(value, dict):
        value = next((value[name] for name in ("messages", "text", "prompt", "content") if name in value), None)
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        return value
    raise ConfigError(f"{where} is {shown(value)}: it must be a string, or hold messages, text or prompt")


def encoded(tokenizer: Tokenizer, text: str | list[Mapping[str, Any]], path: Path) -> list[int]:
    """A text's tokens; conversations as the model's template writes them, without one message after message."""
    try:
        if isinstance(text, str):
            return tokenizer.encode(text)
        if tokenizer.chat_template:
            try:
                return tokenizer.chat_prompt_ids(text, add_generation_prompt=False)
            except InvalidRequest:
                if path != OWN_TEXT:
                    raise
        return tokenizer.encode("\n\n".join(str(message.get("content") or "") for message in text))
    except InvalidRequest as error:
        raise ConfigError(f"calibration file {path}: {error}") from None
