"""Drafts of another server with a smaller model, which are valid as long as a text continues as they say.

    step, step, step, step ...      texts go on, with drafts or without
      |  ask       ^ fits?          an answer that comes two steps later begins with two tokens that are known by now:
      +------------+                if they are the same, those behind them are drafts
         draft server

Nobody waits: steps go on without drafts until an answer is there. While drafts are verified, the server is asked
already what follows them. An answer that has not come after as many steps as it has tokens is of no use any more and
given up. A server that fails is asked again after a pause, which doubles as long as it does.
"""

import hashlib
import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from kvern.config import EngineConfig
from kvern.drafting.server import DraftedText, DraftServer, Translation
from kvern.errors import in_a_line
from kvern.models.folder import model_folder
from kvern.request.request import Request
from kvern.spec.model import ModelSpec
from kvern.text.tokenizer import Tokenizer

logger = logging.getLogger("kvern")

MOST_TEXTS = 256
"""The most texts of one step: servers take no more prompts in a body."""
MOST_ASKED = 32
"""The most tokens that are requested after a text."""
LONGEST_PAUSE = 1 << 14
"""The most steps in which a failing server is not asked."""
KEPT_OF_DELAY = 0.9
"""The weight of earlier delays when a new one is learnt."""


@dataclass
class Asked:
    """A request to the server, and the steps since."""

    answer: "Future[list[list[int]]]"
    rows: "list[tuple[weakref.ref[Request], int, list[int]]]"
    """Each text's request, its length, and the drafts after it that were assumed to be accepted."""
    count: int
    steps: int = 0


class RemoteProposer:
    """Asks the server at `draft_url` for all rows at once, and never waits for it."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        assert config.draft_url is not None
        self._url = config.draft_url
        translation = Translation(Tokenizer(model_folder(config))) if config.draft_as_text else None
        self._as_text = config.draft_as_text
        self._server = DraftServer(config.draft_url, spec.vocab_size, translation)
        weakref.finalize(self, self._server.close)
        self._guesses: WeakKeyDictionary[Request, tuple[int, list[int]]] = WeakKeyDictionary()
        """Drafts that follow a text from a position on."""
        self._asked: Asked | None = None
        self._delay = 1.0
        """The number of tokens by which a text grows before an answer comes."""
        self._pause = self._paused = 0
        """Steps until the server is asked again, and their number after its last failure."""
        self._said: set[str] = set()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """Returns drafts: see `Proposer`."""
        self._take_answer()
        fitting = [self._fitting(request) for request in requests]
        if self._pause:
            self._pause -= 1
        elif self._asked is None:
            self._ask(requests, most, fitting)
        return [guess[:count] for guess, count in zip(fitting, most, strict=True)]

    def _fitting(self, request: Request) -> list[int]:
        """Returns the drafts that still follow the text; none if it continued differently."""
        position, guess = self._guesses.get(request, (0, []))
        known = len(request.token_ids) - position
        if known >= len(guess) or request.token_ids[position:] != guess[:known]:
            self._guesses.pop(request, None)
            return []
        return guess[known:]

    def _ask(self, requests: Sequence[Request], most: Sequence[int], fitting: Sequence[list[int]]) -> None:
        count = min(MOST_ASKED, max(most, default=0) + round(self._delay) + 1)
        rows: list[tuple[weakref.ref[Request], int, list[int]]] = []
        texts: list[DraftedText] = []
        for request, wanted, guess in zip(requests, most, fitting, strict=True):
            if wanted and len(guess) < count and len(rows) < MOST_TEXTS:
                drafts = guess[:wanted]
                rows.append((weakref.ref(request), len(request.token_ids), drafts))
                texts.append(DraftedText([*request.token_ids, *drafts], fields_of(request, drawn=not self._as_text)))
        if texts:
            self._asked = Asked(self._server.ask(texts, count), rows, count)

    def _take_answer(self) -> None:
        """Takes an answer that has come, or gives up one that is too late."""
        asked = self._asked
        if asked is None:
            return
        asked.steps += 1
        if not asked.answer.done():
            if asked.steps > asked.count:
                asked.answer.cancel()
                self._fails("late", f"has not answered within {asked.count} steps")
            return
        self._asked = None
        try:
            answers = asked.answer.result()
        except (Exception, CancelledError) as error:
            self._fails(type(error).__name__, f"fails: {in_a_line(error)}")
            return
        self._paused = 0
        for (reference, position, drafts), answer in zip(asked.rows, answers, strict=True):
            request = reference()
            if request is not None:
                self._guesses[request] = position, drafts + answer
                grown = len(request.token_ids) - position
                self._delay = KEPT_OF_DELAY * self._delay + (1 - KEPT_OF_DELAY) * min(grown, asked.count)

    def _fails(self, kind: str, what: str) -> None:
        """Logs the failure once, and pauses."""
        self._asked = None
        self._pause = self._paused = min(max(1, 2 * self._paused), LONGEST_PAUSE)
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(
                "the draft server %s %s; answers go on without its drafts, and it is asked again now and then",
                self._url,
                what,
            )


def fields_of(request: Request, *, drawn: bool = True) -> dict[str, Any]:
    """Returns the body's fields for a text: sampling parameters with the same seed and positions, and a cache salt.

    Without `drawn` the most probable tokens are requested, as other tokens cannot be sampled alike.
    """
    params = request.params
    fields: dict[str, Any] = {"temperature": 0}
    if drawn:
        fields = {"temperature": params.temperature, "repetition_penalty": 1}
    if drawn and params.temperature:
        fields |= {"seed": request.seed, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    if request.cache_namespace:
        fields["cache_salt"] = hashlib.blake2b(request.cache_namespace, digest_size=16).hexdigest()
    return fields
