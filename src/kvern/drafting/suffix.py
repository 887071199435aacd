"""Drafts that continue a text as after the last places with the same tokens, in itself or in other answers.

    end of a text --> places that end in the same two tokens, the latest first --> those with the longest match
                                                                                   their likeliest continuation

Text that many answers share - a template, a form, a quoted document - is drafted from the second answer on. Oliaro et
al., "SuffixDecoding", 2024, keep a tree of all suffixes; here a chain of places for each pair of tokens gives the same
matches among the latest places, in a fixed amount of memory.
"""

import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from operator import itemgetter
from weakref import WeakKeyDictionary

from kvern.config import EngineConfig
from kvern.drafting.ngram import LONGEST, READ_AT_ONCE, READ_OF_EACH, Chances, Text, same
from kvern.request.request import Request
from kvern.spec.model import ModelSpec

KEPT = 1 << 17
"""The limit of kept tokens of answers in all namespaces together; the oldest are dropped first."""
PLACES = 8
"""The number of places in other answers that are compared; the longest matches decide."""
OF_PROMPT = 2
"""The number of tokens before an answer that are kept with it, so that its beginning is found."""
AGREEING = 0.5
"""The share of the places that must agree on a token for it to be drafted."""


class KeptAnswer:
    """The kept part of an answer, and the request's tokens that contain it."""

    __slots__ = ("namespace", "next", "source", "token_ids")

    def __init__(self, request: Request) -> None:
        self.namespace = request.cache_namespace
        self.source: Sequence[int] = request.token_ids
        self.next = max(0, request.prompt_length - OF_PROMPT)
        """The position in `source` of the next token to keep."""
        self.token_ids: list[int] = []


class KeptAnswers:
    """The positions of each pair of tokens in the last `most` tokens of answers.

    Answers of one namespace are never visible to another.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        """The number of tokens ever kept, which is the number of the next one."""
        self._last: dict[tuple[bytes, int, int], int] = {}
        """The number of the latest second token, by namespace and pair."""
        self._answers: list[KeptAnswer] = []
        self._places: list[int] = []
        self._before: list[int] = []
        """Answer, place in it, and the number of the pair's earlier place (-1: none), by number modulo `most`."""

    def __len__(self) -> int:
        """The number of places that can be found."""
        return len(self._answers)

    def keep(self, answer: KeptAnswer) -> None:
        """Keeps the new tokens of an answer."""
        source, token_ids = answer.source, answer.token_ids
        for position in range(answer.next, len(source)):
            token_ids.append(source[position])
            if len(token_ids) > 1:
                self._add(answer, len(token_ids) - 1)
        answer.next = len(source)

    def _add(self, answer: KeptAnswer, place: int) -> None:
        number, slot = self._count, self._count % self._most
        key = _key(answer, place)
        before = self._last.get(key, -1)
        if number < self._most:
            self._answers.append(answer)
            self._places.append(place)
            self._before.append(before)
        else:
            oldest = _key(self._answers[slot], self._places[slot])
            if self._last.get(oldest) == number - self._most:
                del self._last[oldest]
            self._answers[slot] = answer
            self._places[slot] = place
            self._before[slot] = before
        self._last[key] = number
        self._count += 1

    def places(self, answer: KeptAnswer) -> Iterator[tuple[list[int], int]]:
        """Yields other answers with places at which this answer's last pair occurs."""
        number = self._last.get(_key(answer, len(answer.token_ids) - 1), -1)
        for _ in range(2 * PLACES):
            if number < max(0, self._count - self._most):
                return
            slot = number % self._most
            if self._answers[slot] is not answer:
                yield self._answers[slot].token_ids, self._places[slot]
            number = self._before[slot]


def _key(answer: KeptAnswer, place: int) -> tuple[bytes, int, int]:
    return answer.namespace, answer.token_ids[place - 1], answer.token_ids[place]


class KnownText:
    """The state of a request: its text, the kept part of its answer, and matching places."""

    def __init__(self, request: Request) -> None:
        self.text, self.answer = Text(), KeptAnswer(request)
        self.places: list[tuple[Sequence[int], int]] = []
        """Texts with the places up to which they match this one when it had `length` tokens."""
        self.length, self.same = 0, 0
        """The number of tokens that match at least."""
        self.guess: list[int] = []

    def follow(self, new: Sequence[int]) -> None:
        """Drops the places after which texts continue differently."""
        count = len(new)
        self.places = [
            (tokens, place + count) for tokens, place in self.places if tokens[place + 1 : place + 1 + count] == new
        ]
        self.same = min(LONGEST, self.same + count)


class SuffixProposer:
    """Drafts from the continuation of the longest matches in other answers and in the text itself."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._kept, self._chances = KeptAnswers(KEPT), Chances()
        self._known: WeakKeyDictionary[Request, KnownText] = WeakKeyDictionary()
        self._ended: deque[KeptAnswer] = deque()
        """Answers whose last tokens are still to be kept."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """Returns drafts: see `Proposer`."""
        while self._ended:
            answer = self._ended.popleft()
            self._kept.keep(answer)
            answer.source = ()  # a prompt is not kept
        guesses: list[list[int]] = []
        left = READ_AT_ONCE
        for request, count in zip(requests, most, strict=True):
            known = self._known.get(request)
            if known is None:
                known = self._known[request] = KnownText(request)
                weakref.finalize(request, self._ended.append, known.answer).atexit = False
            self._kept.keep(known.answer)
            if not count:
                guesses.append([])
                continue
            left -= known.text.read(request.token_ids, max(left, READ_OF_EACH))
            guesses.append(self._guess(known, request.token_ids, count))
        return guesses

    def _guess(self, known: KnownText, token_ids: list[int], count: int) -> list[int]:
        new = token_ids[known.length :] if known.length else []
        self._chances.learn(Chances.kind(known.same), known.guess, new)
        known.length = len(token_ids)
        known.follow(new)
        if not known.places:
            self._look_up(known, token_ids)
        if not known.places:
            known.guess = []
            return []
        most = min(count, self._chances.most(Chances.kind(known.same)))
        guessed = max(1, most)
        continued = [
            known.text.continued_from(token_ids, place, guessed)
            if tokens is token_ids
            else tokens[place + 1 : place + 1 + guessed]
            for tokens, place in known.places
        ]
        known.guess = likeliest([tokens for tokens in continued if tokens], guessed)
        return known.guess[:most]

    def _look_up(self, known: KnownText, token_ids: list[int]) -> None:
        """Finds the places with the longest matches of the text's end."""
        found, known.same = known.text.match(token_ids)
        known.places = [(token_ids, found)] if found >= 0 else []
        ending, others = token_ids[-LONGEST:], 0
        for tokens, place in self._kept.places(known.answer):
            length = same(tokens, place, ending)
            if length < known.same or place + 1 == len(tokens):
                continue
            if length > known.same:
                known.same = length
                known.places = []
                others = 0
            known.places.append((tokens, place))
            others += 1
            if others == PLACES and length == LONGEST:
                break


def likeliest(continued: Sequence[Sequence[int]], count: int) -> list[int]:
    """Returns the tokens on which most continuations agree, one after another, while enough of them agree."""
    guess: list[int] = []
    while continued and len(guess) < count:
        ahead, first = len(guess), continued[0]
        if all(tokens == first for tokens in continued):
            return [*guess, *first[ahead:count]]
        votes = Counter([tokens[ahead] for tokens in continued if len(tokens) > ahead])
        if not votes:
            break
        token, agreeing = max(votes.items(), key=itemgetter(1))
        if agreeing < AGREEING * len(continued):
            break
        guess.append(token)
        continued = [tokens for tokens in continued if len(tokens) > ahead and tokens[ahead] == token]
    return guess
