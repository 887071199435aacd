"""Token ids of prompts: a request's options for them, and conversations with a cache of the unchanged beginning.

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
from dataclasses import dataclass, replace

from kvern.text.tokenizer import Tokenizer

ROOM_FOR_ANSWER = -1
"""A value of `most`: as many tokens as the context holds beside the answer."""
LONGEST_TRUNCATED = 1 << 17
"""Tokens of a text that is to be cut, where the model's context is shorter."""


@dataclass(frozen=True)
class Encoding:
    """Options for tokenization.

    add_special_tokens  adds the special tokens that the tokenizer puts around a text
    most                limit of tokens; beyond it the last ones stay, or the first if `keeps_end` is false
    keeps_special       a text is cut between the special tokens that are put around it
    """

    add_special_tokens: bool
    most: int | None = None
    keeps_end: bool = True
    keeps_special: bool = False

    def within(self, room: int) -> "Encoding":
        """These options for texts without an answer, with a limit of `room` tokens."""
        return self if self.most is None else replace(self, most=room if self.most < 0 else min(self.most, room))

    def encode(self, tokenizer: Tokenizer, text: str, max_model_len: int, answer: int | None) -> list[int]:
        """The tokens of a prompt with room for `answer` tokens of its answer. Raises InvalidRequest."""
        longest = max_model_len if self.most is None else max(max_model_len, LONGEST_TRUNCATED)
        token_ids = tokenizer.encode(text, self.add_special_tokens, most_tokens=longest)
        if self.most is None or not self.keeps_special or len(token_ids) <= self.most:
            return self.cut(token_ids, max_model_len, answer)
        of_text = tokenizer.encode(text, add_special_tokens=False)
        added = len(token_ids) - len(of_text)
        before = next((at for at in range(added) if token_ids[at : at + len(of_text)] == of_text), added)
        within = replace(self, most=max(self.most - added, 0)).cut(of_text, max_model_len, answer)
        return [*token_ids[:before], *within, *token_ids[before + len(of_text) :]][: self.most]

    def cut(self, token_ids: list[int], max_model_len: int, answer: int | None) -> list[int]:
        """The tokens of a prompt that remain within the limit."""
        if self.most is None:
            return token_ids
        most = max(max_model_len - (answer or 1), 1) if self.most == ROOM_FOR_ANSWER else self.most
        return token_ids[max(len(token_ids) - most, 0) :] if self.keeps_end else token_ids[:most]


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
