"""Drafts from predicted outputs, which clients send (OpenAI's API).

An answer follows its predicted output until another token comes. Then there are no drafts until the answer matches it
again: in two tokens, or in one at the place where it left.
"""

from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from kvern.request.request import Request

READ_AT_ONCE = 4096
"""The tokens of predicted outputs that are read between two steps: all requests wait for that."""


class PredictionProposer:
    """Drafts for requests with predicted outputs."""

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Request, FollowedPrediction] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """Returns drafts for requests with predicted outputs: see `Proposer`."""
        guesses, left = [], READ_AT_ONCE
        for request, count in zip(requests, most, strict=True):
            followed = self._followed.get(request)
            if followed is None:
                followed = self._followed[request] = FollowedPrediction(request.spec.predicted)
            left -= followed.read(left)
            followed.follow(request.token_ids, request.prompt_length)
            guesses.append(followed.continued(count))
        return guesses


class FollowedPrediction:
    """The position of an answer in its predicted output."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._predicted = token_ids
        self._places: dict[tuple[int, int], list[int]] = {}
        """For each pair of tokens, the positions after it, ascending."""
        self._read = 1
        self._place = 0
        """The next position; while the answer differs, the position where it left."""
        self._followed = 0
        """The number of tokens of the answer so far."""
        self._lost = 0
        """The number of its last tokens that are not in the predicted output."""

    def read(self, most: int) -> int:
        """Reads at most `most` tokens of the predicted output. Returns how many were read."""
        begin = self._read
        end = self._read = max(begin, min(len(self._predicted), begin + most))
        for place in range(begin, end):
            pair = (self._predicted[place - 1], self._predicted[place])
            self._places.setdefault(pair, []).append(place + 1)
        return end - begin

    def follow(self, token_ids: Sequence[int], first: int) -> None:
        """Follows the answer, which begins at token `first`, to its present end."""
        for position in range(first + self._followed, len(token_ids)):
            self._take(token_ids[position], token_ids[position - 1] if position > first else -1)
        self._followed = len(token_ids) - first

    def _take(self, token: int, before: int) -> None:
        if self._reads(self._place, token) and self._lost <= 1:  # nothing was left out, or one token was inserted
            self._place += 1
        elif self._lost == 1 and self._reads(self._place + 1, token):  # one token was replaced
            self._place += 2
        else:
            places = self._places.get((before, token))
            if not places:
                self._lost += 1
                return
            self._place = places[min(bisect_left(places, self._place), len(places) - 1)]
        self._lost = 0

    def _reads(self, place: int, token: int) -> bool:
        return place < len(self._predicted) and self._predicted[place] == token

    def continued(self, count: int) -> list[int]:
        """Returns `count` tokens that may follow; none while the answer differs."""
        return [] if self._lost else list(self._predicted[self._place : self._place + count])
