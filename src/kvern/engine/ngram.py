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
"""Tokens between two steps: everybody waits while a prompt is read for the first time."""


@PROPOSERS.register("ngram")
class NgramProposer:
    """The tokens behind the last earlier place where a text has the two tokens, or more, that it now ends with."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._texts: WeakKeyDictionary[Request, Text] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """What `Proposer` wants."""
        return [self._guess(request, count) if count else [] for request, count in zip(requests, most, strict=True)]

    def _guess(self, request: Request, count: int) -> list[int]:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = Text()
        return text.continued(request.token_ids, count)


class Text:
    """Where each pair of tokens stands in a text that grows."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        """Where the second token of a pair stands, at the end of what was read."""
        self._before: list[int] = [-1]
        """By place: where the pair that ends there stood before; -1: nowhere."""

    def continued(self, token_ids: Sequence[int], count: int) -> list[int]:
        """What `count` tokens may follow; none if the text's end stands nowhere else, or is not read yet."""
        for place in range(len(self._before), min(len(token_ids), len(self._before) + READ_AT_ONCE)):
            pair = (token_ids[place - 1], token_ids[place])
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place
        end = len(token_ids) - 1
        if len(self._before) <= end:
            return []
        found, longest, place = -1, 0, self._before[end]
        for _ in range(PLACES):
            if place < 0:
                break
            length = 2
            while length < min(LONGEST, place + 1) and token_ids[place - length] == token_ids[end - length]:
                length += 1
            if length > longest:
                found, longest = place, length
            place = self._before[place]
        if found < 0:
            return []
        period = end - found  # what is guessed may go on with itself
        return [token_ids[found + 1 + ahead % period] for ahead in range(count)]
