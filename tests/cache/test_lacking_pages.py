"""What other engines cannot load of a prompt that was computed for them."""

from collections import deque
from typing import Any

import pytest

from kvern.cache.messages import Part
from kvern.cache.shared_prompt import OtherSaves, SharedPrompt

KEYS = [bytes([number]) for number in range(10)]


class Told:
    """A tier that has all parts of pages but some, and saves nothing more."""

    def __init__(self, lacking: set[tuple[bytes, Part]]) -> None:
        self.lacking = lacking

    def source(self, key: bytes, part: Part) -> str | None:
        return None if (key, part) in self.lacking else "host"

    def is_saving(self, key: bytes, part: Part) -> bool:
        return False


@pytest.mark.parametrize(
    ("lacking", "tokens"),
    [
        ([], 0),
        ([(9, Part.BLOCKS)], 64),
        ([(1, Part.BLOCKS)], 9 * 64),
        ([(4, Part.BLOCKS), (1, Part.BLOCKS)], 9 * 64),
        ([(9, Part.STATE)], 640),
        ([(9, Part.WINDOWS)], 64),
    ],
)
def test_tokens_behind_a_gap_are_lacking(lacking: list[tuple[int, Part]], tokens: int) -> None:
    """And all, if the state is."""
    awaited = deque((key, Part.BLOCKS) for key in KEYS)
    awaited += [(KEYS[-1], Part.WINDOWS), (KEYS[-1], Part.STATE)]
    tier: Any = Told({(KEYS[number], part) for number, part in lacking})
    shared = SharedPrompt(OtherSaves(tier), KEYS, awaited, 64, lambda key, part: False, lambda: None)
    assert shared.lacking_tokens == 640, "nothing is known yet"
    assert shared.has_ended() and shared.lacking_tokens == tokens
