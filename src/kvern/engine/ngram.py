"""Guesses that a text goes on as it did where it last read the same: for what is quoted, edited or said again.

Saxena, "Prompt Lookup Decoding", 2023.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from kvern.config import EngineConfig
from kvern.engine.proposer import PROPOSERS
from kvern.model_spec import ModelSpec
from kvern.request import Request

PLACES = 8
"""Where a text reads the same, of which the one is taken that reads the same for longest; of equals the last."""
LONGEST = 16
"""Tokens that are compared."""
READ_AT_ONCE = 4096
"""Tokens of all texts between two steps: everybody waits while prompts are read for the first time."""
READ_OF_EACH = 32
"""Tokens of a text that are read in any case: one that was read goes on, whatever others begin."""


def same(token_ids: Sequence[int], place: int, ending: Sequence[int]) -> int:
    """How many tokens up to a place, two at least, are those of a text's `ending`."""
    before = token_ids[max(0, place + 1 - len(ending)) : place + 1]
    if before == ending:
        return len(ending)
    length, most = 2, min(len(before), len(ending))
    while length < most and before[-1 - length] == ending[-1 - length]:
        length += 1
    return length


@PROPOSERS.register("ngram")
class NgramProposer:
    """The tokens behind the last earlier place where a text has the two tokens, or more, that it now ends with."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._texts: WeakKeyDictionary[Request, Text] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """What `Proposer` wants."""
        guesses: list[list[int]] = []
        left = READ_AT_ONCE
        for request, count in zip(requests, most, strict=True):
            if not count:
                guesses.append([])
                continue
            text = self._texts.get(request)
            if text is None:
                text = self._texts[request] = Text()
            left -= text.read(request.token_ids, max(left, READ_OF_EACH))
            guesses.append(text.continued(request.token_ids, count))
        return guesses


class Text:
    """Where each pair of tokens stands in a text that grows."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        """Where the second token of a pair stands, at the end of what was read."""
        self._before: list[int] = [-1]
        """By place: where the pair that ends there stood before; -1: nowhere."""

    def read(self, token_ids: Sequence[int], most: int) -> int:
        """Go on reading the text, which has grown to these tokens, by so many at most; how many are read."""
        begin = len(self._before)
        end = min(len(token_ids), begin + most)
        for place in range(begin, end):
            pair = (token_ids[place - 1], token_ids[place])
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place
        return end - begin

    def continued(self, token_ids: Sequence[int], count: int) -> list[int]:
        """What `count` tokens may follow; none if the text's end stands nowhere else, or is not read yet."""
        found, _ = self.match(token_ids)
        return [] if found < 0 else self.continued_from(token_ids, found, count)

    def match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The place before its end at which the text reads the same for longest, and for how many tokens; -1: none."""
        end = len(token_ids) - 1
        if len(self._before) <= end:
            return -1, 0
        found, longest, place = -1, 0, self._before[end]
        if place < 0:
            return found, longest
        ending = token_ids[-LONGEST:]
        for _ in range(PLACES):
            if place < 0 or longest == LONGEST:
                break
            length = same(token_ids, place, ending)
            if length > longest:
                found, longest = place, length
            place = self._before[place]
        return found, longest

    @staticmethod
    def continued_from(token_ids: Sequence[int], found: int, count: int) -> list[int]:
        """What `count` tokens follow if the text goes on as it does behind place `found`."""
        period = len(token_ids) - 1 - found  # what is guessed may go on with itself
        return [token_ids[found + 1 + ahead % period] for ahead in range(count)]
