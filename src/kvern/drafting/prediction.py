"""Guesses that an answer goes on as its client has predicted: OpenAI's predicted outputs.

An answer follows its prediction until another token comes. From there on nothing is guessed until the answer reads as
the prediction does at some place again: for two tokens, or for one where it left the prediction.
"""

from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from kvern.request.request import Request

READ_AT_ONCE = 4096
"""Tokens of predictions between two steps: everybody waits while they are read."""


class PredictionProposer:
    """Guesses for requests whose clients said what they expect."""

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Request, FollowedPrediction] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """What `Proposer` wants, for requests that have predictions."""
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
    """Where an answer stands in its prediction."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._predicted = token_ids
        self._places: dict[tuple[int, int], list[int]] = {}
        """By pair of tokens: behind which places it stands, ascending."""
        self._read = 1
        self._place = 0
        """What is predicted next; while the answer is elsewhere, where it left the prediction."""
        self._followed = 0
        """Tokens of the answer."""
        self._lost = 0
        """Of them the last that are not in the prediction."""

    def read(self, most: int) -> int:
        """Go on looking where each pair of tokens stands, in so many tokens at most; how many were read."""
        begin = self._read
        end = self._read = max(begin, min(len(self._predicted), begin + most))
        for place in range(begin, end):
            pair = (self._predicted[place - 1], self._predicted[place])
            self._places.setdefault(pair, []).append(place + 1)
        return end - begin

    def follow(self, token_ids: Sequence[int], first: int) -> None:
        """The answer, from token `first` on, has grown to this."""
        for position in range(first + self._followed, len(token_ids)):
            self._take(token_ids[position], token_ids[position - 1] if position > first else -1)
        self._followed = len(token_ids) - first

    def _take(self, token: int, before: int) -> None:
        if self._reads(self._place, token) and self._lost <= 1:  # nothing was left out, or one token was put in
            self._place += 1
        elif self._lost == 1 and self._reads(self._place + 1, token):  # one token stands for another
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
        """What `count` tokens may follow; none where the answer is not in the prediction."""
        return [] if self._lost else list(self._predicted[self._place : self._place + count])
