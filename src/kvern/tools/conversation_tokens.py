"""Token ids of conversations, of which what came before is tokenized once.

A tokenizer takes a text apart at its special tokens before anything else, so that up to such a token the ids are the
same whatever follows. A conversation is cut behind some of them, each time at the same places as far as it is the same,
and the ids of its pieces are kept. An agent's long prompt then costs what is new in it:

    <|im_start|>system ... <|im_end|>...|<|im_start|>user ... <|im_end|>...|<|im_start|>assistant
    kept                                |kept                              |tokenized, never kept
"""

import re
import threading
from array import array
from collections import OrderedDict

from kvern.text.tokenizer import Tokenizer

SHORTEST_PIECE = 2048
"""Characters: keeping less would save nothing."""
MOST_CHARACTERS = 1 << 23
"""Of all pieces that are kept, some 8 bytes each; those that were not used for the longest time go first."""


class ConversationEncoder:
    """Tokenizes conversations for any number of threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts: dict[bool, re.Pattern[str] | None] = {}
        self._kept: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str, tools: bool, namespace: bytes, most_tokens: int) -> list[int]:
        """`Tokenizer.encode` of what the chat template, with or without tools, has written.

        Nobody can tell from the time it takes what was asked in another namespace. Raises InvalidRequest.
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
        """The text, cut behind the first special token after each so many characters."""
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
