"""Drafts that continue a text as after the last place with the same tokens: for quoted, edited or repeated text.

Saxena, "Prompt Lookup Decoding", 2023.
"""

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from kvern.config import EngineConfig
from kvern.request.request import Request
from kvern.spec.model import ModelSpec

PLACES = 8
"""The number of places with the same tokens that are compared; the longest match counts, the latest of equal ones."""
LONGEST = 16
"""The number of tokens that are compared."""
AHEAD = 16
"""The number of tokens after a followed place in which a differing token is searched."""
APART = 4
"""The number of differing tokens in a row after which a place is given up."""
LEAST_CHANCE = 0.3
"""The least acceptance of a draft; less probable ones are left out."""
KEPT = 0.98
"""The weight that the counts of earlier drafts keep at each further one."""
READ_AT_ONCE = 4096
"""The tokens of all texts that are read between two steps: all requests wait while prompts are read."""
READ_OF_EACH = 32
"""The tokens of a text that are read in any case, however many others begin."""
RESUMED, APART_BY_SOME = 0, 1
"""Kinds of drafts without a match: the last token alone continues the followed place, or none of the last few does."""


class NgramProposer:
    """Drafts from the tokens after the last earlier place with the text's last two or more tokens.

    A text that has followed a place for a while and differs in one token, such as edited text, continues to follow it.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._texts: WeakKeyDictionary[Request, Followed] = WeakKeyDictionary()
        self._chances = Chances()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """Returns drafts: see `Proposer`."""
        guesses: list[list[int]] = []
        left = READ_AT_ONCE
        for request, count in zip(requests, most, strict=True):
            if not count:
                guesses.append([])
                continue
            text = self._texts.get(request)
            if text is None:
                text = self._texts[request] = Followed(self._chances)
            left -= text.read(request.token_ids, max(left, READ_OF_EACH))
            guesses.append(text.guess(request.token_ids, count))
        return guesses


class Chances:
    """Acceptance of drafts by kind, learnt from all texts."""

    def __init__(self) -> None:
        self._right, self._wrong = [8.0] * 7, [1.0] * 7

    @staticmethod
    def kind(length: int) -> int:
        """Returns the kind of a draft after a match of so many tokens, two at least."""
        return length.bit_length() + (length > 2)

    def of(self, kind: int) -> float:
        """Returns the probability that a token is accepted if those before it are."""
        return min(0.99, max(0.01, self._right[kind] / (self._right[kind] + self._wrong[kind])))

    def most(self, kind: int) -> int:
        """Returns the number of drafts that are probable enough."""
        return int(math.log(LEAST_CHANCE) / math.log(self.of(kind)))

    def learn(self, kind: int, guess: Sequence[int], new: Sequence[int]) -> None:
        """Learns from the `new` tokens of a text with these drafts; nothing without either."""
        right, compared = 0, min(len(guess), len(new))
        while right < compared and guess[right] == new[right]:
            right += 1
        if compared:
            self._right[kind] = KEPT * self._right[kind] + right
            self._wrong[kind] = KEPT * self._wrong[kind] + (right < compared)


def same(token_ids: Sequence[int], place: int, ending: Sequence[int]) -> int:
    """Returns how many tokens up to a place, two at least, equal a text's `ending`."""
    before = token_ids[max(0, place + 1 - len(ending)) : place + 1]
    if before == ending:
        return len(ending)
    length, most = 2, min(len(before), len(ending))
    while length < most and before[-1 - length] == ending[-1 - length]:
        length += 1
    return length


class Text:
    """Places of each pair of tokens in a growing text."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        """The place of each pair's second token, in the text that was read."""
        self._before: list[int] = [-1]
        """For each place, the earlier place of the pair that ends there; -1 if there is none."""

    def read(self, token_ids: Sequence[int], most: int) -> int:
        """Reads on in the text, which has grown to these tokens, by at most `most`. Returns how many were read."""
        begin = len(self._before)
        end = min(len(token_ids), begin + most)
        for place in range(begin, end):
            pair = (token_ids[place - 1], token_ids[place])
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place
        return end - begin

    def continued(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Returns `count` tokens that may follow; none if the text's end occurs nowhere else, or is not read yet."""
        found, _ = self.match(token_ids)
        return [] if found < 0 else self.continued_from(token_ids, found, count)

    def match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Returns the place before its end with the longest match, and the length of the match; -1 if there is none."""
        end = len(token_ids) - 1
        if len(self._before) <= end:
            return -1, 0
        found = -1
        longest = 0
        place = self._before[end]
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
        """Returns `count` tokens that follow if the text continues as after place `found`."""
        period = len(token_ids) - 1 - found  # drafts may repeat themselves
        return [token_ids[found + 1 + ahead % period] for ahead in range(count)]


class Followed(Text):
    """A text, and the earlier place that it follows."""

    def __init__(self, chances: Chances) -> None:
        super().__init__()
        self._chances = chances
        self._place = -1
        self._apart = 0
        self._length = 0
        """The followed place, -1 for none; the differing tokens since then; the length of the text then."""
        self._guess: list[int] = []
        self._kind = RESUMED

    def guess(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Returns up to `count` probable tokens that may follow; none if the text is not read yet."""
        if self._length:
            self._learn(token_ids)
        self._length, self._guess = len(token_ids), []
        found, length = self.match(token_ids)
        kind = Chances.kind(length)
        if self._place >= 0 and self._place + self._apart != found:
            followed = APART_BY_SOME if self._apart else RESUMED
            if found < 0 or self._chances.of(followed) > self._chances.of(kind):
                found, kind = self._place + self._apart, followed
            else:
                self._place, self._apart = found, 0
        else:
            self._place, self._apart = found, 0
        if found < 0:
            return []
        self._kind = kind
        most = min(count, self._chances.most(kind))
        self._guess = self.continued_from(token_ids, found, max(1, most))
        return self._guess[:most]

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Learns from the growth of the text: accepted drafts, and whether it still follows its place."""
        new = token_ids[self._length :]
        self._chances.learn(self._kind, self._guess, new)
        if self._place < 0:
            return
        for place, token in enumerate(new, self._length):
            if not self._apart and token_ids[self._place + 1] == token:
                self._place += 1
                continue
            ahead = token_ids[self._place + 1 : min(self._place + 1 + AHEAD, place)]
            if token in ahead:
                self._place, self._apart = self._place + 1 + ahead.index(token), 0
            else:
                self._apart += 1
        if self._apart > APART or self._place + self._apart >= len(token_ids) - 1:
            self._place, self._apart = -1, 0
