"""Token ids of conversations, with a cache of the unchanged beginning.

A tokenizer splits a text at its special tokens first, so the ids up to such a token do not depend on the text after it.
A conversation is cut after some of them, at the same positions as long as its text is the same, and the ids of these
pieces are kept. An agent's long prompt then costs only its new part:

    <|im_start|>system ... <|im_end|>...|<|im_start|>user ... <|im_end|>...|<|im_start|>assistant
    kept                                |kept                              |tokenized, never kept
"""

import re
import threading
from array import array
from collections import OrderedDict

from kvern.text.tokenizer import Tokenizer

SHORTEST_PIECE = 2048
"""The shortest kept piece in characters; shorter ones would save nothing."""
MOST_CHARACTERS = 1 << 23
"""Limit for all kept pieces, at about 8 bytes per character; the least recently used go first."""


class ConversationEncoder:
    """Tokenizes conversations for any number of threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts: dict[bool, re.Pattern[str] | None] = {}
        self._kept: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str, tools: bool, namespace: bytes, most_tokens: int) -> list[int]:
        """Returns `Tokenizer.encode` of a text that the chat template, with or without tools, has rendered.

        Its duration reveals nothing about the texts of another namespace. Raises InvalidRequest.
        """
        self._tokenizer.check_length(text, most_tokens)
        pieces = self._pieces(text, tools)
        with self._lock:
            known = [self._find((namespace, piece)) for piece in pieces]
        missing = [piece for piece, ids in zip(pieces, known, strict=True) if ids is None]
        fresh = iter(self._tokenizer.encode_each(missing))
        encoded = [next(fresh) if ids is None else ids for ids in known]
        new = {
            (namespace, piece): array("I", part)
            for piece, ids, part in zip(pieces[:-1], known, encoded, strict=False)
            if ids is None
        }
        with self._lock:
            for key, part in new.items():
                self._keep(key, part)
        return [token for part in encoded for token in part]

    def _pieces(self, text: str, tools: bool) -> list[str]:
        """The pieces of a text: it is cut after the first special token that follows SHORTEST_PIECE characters."""
        pattern = self._pattern(tools) if len(text) > SHORTEST_PIECE else None
        pieces, start = [], 0
        while pattern is not None and (found := pattern.search(text, start + SHORTEST_PIECE)) is not None:
            pieces.append(text[start : found.end()])
            start = found.end()
        return [*pieces, text[start:]]

    def _pattern(self, tools: bool) -> re.Pattern[str] | None:
        if tools not in self._cuts:
            marks = self._tokenizer.cutting_tokens(self._tokenizer.chat_template.source(tools))
            self._cuts[tools] = re.compile("|".join(map(re.escape, marks))) if marks else None
        return self._cuts[tools]

    def _find(self, key: tuple[bytes, str]) -> "array[int] | None":
        ids = self._kept.get(key)
        if ids is not None:
            self._kept.move_to_end(key)
        return ids

    def _keep(self, key: tuple[bytes, str], ids: "array[int]") -> None:
        if key in self._kept or len(key[1]) > MOST_CHARACTERS:
            return
        self._kept[key] = ids
        self._characters += len(key[1])
        while self._characters > MOST_CHARACTERS:
            (_, piece), _ = self._kept.popitem(last=False)
            self._characters -= len(piece)
