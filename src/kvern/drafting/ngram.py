"""Guesses that a text goes on as it did where it last read the same: for what is quoted, edited or said again.

Saxena, "Prompt Lookup Decoding", 2023.
"""

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from kvern.config import EngineConfig
from kvern.request.request import Request
from kvern.spec.model import ModelSpec

PLACES = 8
"""Where a text reads the same, of which the one is taken that reads the same for longest; of equals the last."""
LONGEST = 16
"""Tokens that are compared."""
AHEAD = 16
"""Tokens behind the place up to which a text was followed, in which one that differs is looked for."""
APART = 4
"""Tokens in a row that may be others until a place is given up."""
LEAST_CHANCE = 0.3
"""Of a draft to be right, below which it is left out."""
KEPT = 0.98
"""Of the weight of what became of all earlier guesses, by each other one."""
READ_AT_ONCE = 4096
"""Tokens of all texts between two steps: everybody waits while prompts are read for the first time."""
READ_OF_EACH = 32
"""Tokens of a text that are read in any case: one that was read goes on, whatever others begin."""
RESUMED, APART_BY_SOME = 0, 1
"""What speaks for a guess, beside how many tokens read the same: the last alone does, or none of the last few."""


class NgramProposer:
    """The tokens behind the last earlier place where a text has the two tokens, or more, that it now ends with.

    Where it has stood so for a while and one token is another, as in a text that is edited, it goes on there.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._texts: WeakKeyDictionary[Request, Followed] = WeakKeyDictionary()
        self._chances = Chances()

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
                text = self._texts[request] = Followed(self._chances)
            left -= text.read(request.token_ids, max(left, READ_OF_EACH))
            guesses.append(text.guess(request.token_ids, count))
        return guesses


class Chances:
    """How often a guess is right, by what speaks for it: learnt of all texts."""

    def __init__(self) -> None:
        self._right, self._wrong = [8.0] * 7, [1.0] * 7

    @staticmethod
    def kind(length: int) -> int:
        """What speaks for a guess where so many tokens, two at least, read the same."""
        return length.bit_length() + (length > 2)

    def of(self, kind: int) -> float:
        """That a token is right if those before it are."""
        return min(0.99, max(0.01, self._right[kind] / (self._right[kind] + self._wrong[kind])))

    def most(self, kind: int) -> int:
        """How many are right often enough."""
        return int(math.log(LEAST_CHANCE) / math.log(self.of(kind)))

    def learn(self, kind: int, guess: Sequence[int], new: Sequence[int]) -> None:
        """A text of which this was guessed has grown by these `new` tokens; without either, nothing is learnt."""
        right, compared = 0, min(len(guess), len(new))
        while right < compared and guess[right] == new[right]:
            right += 1
        if compared:
            self._right[kind] = KEPT * self._right[kind] + right
            self._wrong[kind] = KEPT * self._wrong[kind] + (right < compared)


def same(token_ids: Sequence[int], place: int, ending: Sequence[int]) -> int:
    """How many tokens up to a place, two at least, are those of a text's `ending`."""
    before = token_ids[max(0, place + 1 - len(ending)) : place + 1]
    if before == ending:
        return len(ending)
    length, most = 2, min(len(before), len(ending))
    while length < most and before[-1 - length] == ending[-1 - length]:
        length += 1
    return length


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


class Followed(Text):
    """A text, and the earlier place at which it goes on."""

    def __init__(self, chances: Chances) -> None:
        super().__init__()
        self._chances = chances
        self._place, self._apart, self._length = -1, 0, 0
        """Where the text stood last as it did before, -1: nowhere; the tokens since then, and of the text then."""
        self._guess: list[int] = []
        self._kind = RESUMED

    def guess(self, token_ids: Sequence[int], count: int) -> list[int]:
        """What `count` tokens may follow, as far as they are probable enough; none if the text is not read yet."""
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
        """The text has grown: how far as was guessed, and as it stood before."""
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
