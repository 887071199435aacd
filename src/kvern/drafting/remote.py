"""Drafts of another server with a smaller model, which are valid as long as a text continues as they say.

    step, step, step, step ...      texts go on, with drafts or without
      |  ask       ^ fits?          an answer that comes two steps later begins with two tokens that are known by now:
      +------------+                if they are the same, those behind them are drafts
         draft server

Nobody waits: steps go on without drafts until an answer is there. While drafts are verified, the server is asked
already what follows them. An answer that has not come after as many steps as it has tokens is of no use any more and
given up. A server that fails is asked again after a pause, which doubles as long as it does.
"""

import asyncio
import hashlib
import logging
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from kvern.config import EngineConfig
from kvern.errors import in_a_line, shown
from kvern.models.folder import model_folder
from kvern.request.request import Request
from kvern.spec.model import ModelSpec
from kvern.text.tokenizer import Tokenizer

CONNECTING_SECONDS = 5.0
LONGEST_SAID = 200
"""The most characters of a server's refusal that are shown."""
BYTES_OF_ROW = 16_384
"""The most bytes of an answer for each text: a few tokens with JSON around them."""
MORE_TOKENS = 2
"""The factor by which a server with other tokens may make more of a text than the model's own."""
WINDOW = 3072
"""The tokens at the end of a text that are sent as text: they are decoded each time."""
TAIL = 8
"""The tokens before a text answer that are tokenized with it, as the answer alone may have other tokens."""


class BadDrafts(Exception):
    """A draft server answers something else than was asked."""


@dataclass(frozen=True)
class DraftedText:
    """A text to continue, as token ids; texts with equal `fields` share a body."""

    token_ids: Sequence[int]
    fields: Mapping[str, Any]
    """Fields of a body: sampling parameters and the cache salt."""


class Translation:
    """Translation between the tokens of a model and of a server with other tokens, by text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidRequest without a tokenizer's file."""
        self._tokenizer, self._leading = tokenizer, tokenizer.leading_special_tokens()

    def text(self, token_ids: Sequence[int], most: int) -> str:
        """Returns the text for the server: the last `most` tokens or up to a third fewer, without leading special
        tokens.

        The beginning of the text stays the same while it grows, so that the server may have it in its cache.
        """
        begins = len(self._leading) if list(token_ids[: len(self._leading)]) == self._leading else 0
        step = max(1, most // 3)
        begins = max(begins, -((most - len(token_ids)) // step) * step)
        return self._tokenizer.decode(token_ids[begins:], skip_special_tokens=False)

    def tokens(self, token_ids: Sequence[int], answer: str) -> list[int]:
        """Returns the tokens of an answer after these, without the last, which may be part of a longer one."""
        tail = list(token_ids[-TAIL:])
        known = self._tokenizer.decode(tail, skip_special_tokens=False)
        found = self._tokenizer.encode(known + answer, add_special_tokens=False)
        if found[: len(tail)] != tail:  # the known text was tokenized differently
            return self._tokenizer.encode(answer, add_special_tokens=False)[:-1]
        return found[len(tail) : -1]


class DraftServer:
    """The server at `url` with /v1/models and /v1/completions. It must be closed."""

    def __init__(self, url: str, vocab_size: int, translation: Translation | None = None) -> None:
        """`translation` is for a server with other tokens; None if it has the same token ids."""
        self._url, self._vocab_size = url.rstrip("/").removesuffix("/v1"), vocab_size
        self._translation = translation
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._model: tuple[str, int] | None = None
        """The model's name, and the tokens of its context; unlimited if a server with other tokens does not report
        it."""
        threading.Thread(target=self._run, name="kvern-drafts", daemon=True).start()

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)

    def _run(self) -> None:
        """Runs the thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closing.wait()
        if self._session is not None:
            await self._session.close()

    def ask(self, texts: Sequence[DraftedText], count: int) -> "Future[list[list[int]]]":
        """Returns for each text at most `count` tokens that follow it; none for a text that fills the model's context.

        Cancel the future to give up. It raises BadDrafts, aiohttp.ClientError or TimeoutError.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(texts, count), self._loop)

    async def _ask(self, texts: Sequence[DraftedText], count: int) -> list[list[int]]:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout)
        if self._model is None:
            unknown = None if self._translation is None else sys.maxsize
            self._model = _model_of(await self._read("GET", "/v1/models", None, 1), unknown)
        name, longest = self._model
        groups: dict[bytes, list[int]] = {}
        for place, text in enumerate(texts):
            if self._translation is not None or len(text.token_ids) < longest:
                groups.setdefault(msgspec.json.encode(text.fields), []).append(place)
        found = await asyncio.gather(
            *(self._ask_alike(name, [texts[i] for i in group], count, longest) for group in groups.values())
        )
        drafts: list[list[int]] = [[] for _ in texts]
        for group, answers in zip(groups.values(), found, strict=True):
            for place, answer in zip(group, answers, strict=True):
                drafts[place] = answer
        return drafts

    async def _ask_alike(self, model: str, texts: Sequence[DraftedText], count: int, longest: int) -> list[list[int]]:
        """Continues texts with equal fields."""
        translation = self._translation
        asked = {"model": model, "max_tokens": count, **texts[0].fields}
        prompt: list[Any]
        if translation is None:
            prompt = [list(text.token_ids) for text in texts]
            asked |= {"ignore_eos": True, "return_token_ids": True}
        else:  # only fields that every server of completions knows
            most = min(WINDOW, max(1, longest // MORE_TOKENS - count))
            prompt = [translation.text(text.token_ids, most) or "\n" for text in texts]  # none without a token
        asked["prompt"] = prompt
        choices = _choices(await self._read("POST", "/v1/completions", asked, len(texts)), len(texts))
        if translation is None:
            return [self._drafts(choice, count) for choice in choices]
        return [
            self._translated(translation, text, choice)[:count] for text, choice in zip(texts, choices, strict=True)
        ]

    async def _read(self, method: str, path: str, body: object, rows: int) -> Any:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        most = BYTES_OF_ROW * (rows + 1)
        async with self._session.request(
            method, self._url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            content = b""
            while len(content) <= most and (more := await response.content.read(most)):
                content += more
            if response.status != 200:
                said = content[:LONGEST_SAID].decode(errors="replace")
                raise BadDrafts(f"{method} {path} is answered by status {response.status}: {said!r}")
        if len(content) > most:
            raise BadDrafts(f"{method} {path} is answered by more than {most} bytes")
        try:
            return msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadDrafts(f"{method} {path} is answered by no JSON: {shown(content[:LONGEST_SAID])}") from error

    def _drafts(self, choice: Mapping[str, Any], count: int) -> list[int]:
        """Returns the token ids of a choice. Raises BadDrafts."""
        token_ids = choice.get("token_ids")
        if not isinstance(token_ids, list) or len(token_ids) > count:
            raise BadDrafts(f"a choice has token_ids {shown(token_ids)}: it must be a list of {count} at most")
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise BadDrafts(f"it guesses {shown(token)}: the model has token ids 0 to {self._vocab_size - 1}")
        return token_ids

    def _translated(self, translation: Translation, text: DraftedText, choice: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a choice's text. Raises BadDrafts."""
        said = choice.get("text")
        if not isinstance(said, str):
            raise BadDrafts(f"a choice has the text {shown(said)}: it must be a string")
        found = translation.tokens(text.token_ids, said)
        return found[: next((place for place, token in enumerate(found) if token >= self._vocab_size), None)]


def _choices(answer: object, rows: int) -> list[Mapping[str, Any]]:
    """Returns the choices of an answer in the order of the texts. Raises BadDrafts."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != rows:
        raise BadDrafts(f"{rows} texts are answered by {shown(choices)}: it must be a list of {rows} choices")
    found: dict[int, Mapping[str, Any]] = {}
    for choice in choices:
        if not isinstance(choice, dict):
            raise BadDrafts(f"a choice is {shown(choice)}: it must be an object")
        index = choice.get("index")
        if type(index) is not int or not 0 <= index < rows or index in found:
            raise BadDrafts(f"a choice has the index {shown(index)}: each from 0 to {rows - 1} must come once")
        found[index] = choice
    return [found[place] for place in range(rows)]


def _model_of(answer: object, unknown: int | None = None) -> tuple[str, int]:
    """Returns the name of the first listed model, and the tokens of its context, or `unknown`. Raises BadDrafts."""
    models = answer.get("data") if isinstance(answer, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name, longest = None, unknown
    if isinstance(first, dict):
        name, longest = first.get("id"), first.get("max_model_len", unknown)
    if not isinstance(name, str) or not isinstance(longest, int):
        raise BadDrafts(f"GET /v1/models is answered by {shown(answer)}: it must name a model and its max_model_len")
    return name, longest


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
