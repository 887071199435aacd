"""Seeded random choices, and the split between training and held-out combinations.

A task names the combination that makes an example what it is (the operands of a sum, the values of a record) as a key.
One key in twenty, chosen by its hash, is held out: a training draw never makes it and a held-out draw makes nothing else.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Message = dict[str, Any]
Tool = dict[str, Any]

HELD_OUT_SHARE = 20  # one key in this many


def is_held_out(*key: object) -> bool:
    """Whether the combination `key` belongs to the held-out slice. Stable across processes and Python versions."""
    text = "\x1f".join(str(part) for part in key)
    return zlib.crc32(text.encode()) * 2654435761 % 2**32 % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Example:
    """One conversation. The last message is the assistant's and is what evaluation compares.

    `key` is the combination that decided the split; `text` holds a raw document instead of messages.
    """

    task: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    key: tuple[object, ...] = ()
    text: str | None = None


class Draw(random.Random):
    """A `random.Random` that knows which side of the split it draws for."""

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        super().__init__(seed)
        self.held_out = held_out

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def some(self, items: Sequence[T], low: int, high: int) -> list[T]:
        """Between `low` and `high` distinct items (at most all of them), in random order."""
        return self.sample(items, min(self.randint(low, high), len(items)))

    def split(self, make: Callable[[], T], key: Callable[[T], tuple[object, ...]]) -> T:
        """Draws with `make` until the key of what it made is on this draw's side of the split."""
        while True:
            value = make()
            if is_held_out(*key(value)) == self.held_out:
                return value


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def article(word: str) -> str:
    """`word` behind its indefinite article: "an owl", "a fox"."""
    return ("an " if word[0].lower() in "aeiou" else "a ") + word
