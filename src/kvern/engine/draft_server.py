"""Asks another server how texts go on, by OpenAI's API, in a thread of its own: nobody waits for it."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvern.errors import shown

CONNECTING_SECONDS = 5.0
LONGEST_SAID = 200
"""Characters of what a server says to a refusal."""
BYTES_OF_ROW = 16_384
"""Of an answer, for each text: it names a few tokens, and has words around them."""


class BadDrafts(Exception):
    """A draft server answers, but not what it was asked."""


@dataclass(frozen=True)
class DraftedText:
    """A text of which it is asked how it goes on, by token ids; those of equal `fields` share a body."""

    token_ids: Sequence[int]
    fields: Mapping[str, Any]
    """Of a body: how tokens are to be drawn, and with whom what is cached is shared."""


class DraftServer:
    """The server at `url`, which has /v1/models and /v1/completions, and the same token ids. To be closed."""

    def __init__(self, url: str, vocab_size: int) -> None:
        self._url, self._vocab_size = url.rstrip("/").removesuffix("/v1"), vocab_size
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._model: tuple[str, int] | None = None
        """Its name, and tokens of its context."""
        threading.Thread(target=self._run, name="kvern-drafts", daemon=True).start()

    def close(self) -> None:
        """Give up what was asked, and end the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)

    def _run(self) -> None:
        """The thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closing.wait()
        if self._session is not None:
            await self._session.close()

    def ask(self, texts: Sequence[DraftedText], count: int) -> "Future[list[list[int]]]":
        """For each text the `count` tokens that follow it; none behind one that fills the model's context.

        Cancel the future to give up. It raises BadDrafts, aiohttp.ClientError or TimeoutError.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(texts, count), self._loop)

    async def _ask(self, texts: Sequence[DraftedText], count: int) -> list[list[int]]:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout)
        if self._model is None:
            self._model = _model_of(await self._read("GET", "/v1/models", None, 1))
        name, longest = self._model
        groups: dict[bytes, list[int]] = {}
        for place, text in enumerate(texts):
            if len(text.token_ids) < longest:
                groups.setdefault(msgspec.json.encode(text.fields), []).append(place)
        found = await asyncio.gather(
            *(self._ask_alike(name, [texts[i] for i in group], count) for group in groups.values())
        )
        drafts: list[list[int]] = [[] for _ in texts]
        for group, answers in zip(groups.values(), found, strict=True):
            for place, answer in zip(group, answers, strict=True):
                drafts[place] = answer
        return drafts

    async def _ask_alike(self, model: str, texts: Sequence[DraftedText], count: int) -> list[list[int]]:
        """Of texts whose fields are equal."""
        body = {
            "model": model,
            "prompt": [list(text.token_ids) for text in texts],
            "max_tokens": count,
            "ignore_eos": True,
            "return_token_ids": True,
            **texts[0].fields,
        }
        return self._drafts(await self._read("POST", "/v1/completions", body, len(texts)), len(texts), count)

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

    def _drafts(self, answer: object, rows: int, count: int) -> list[list[int]]:
        """The tokens that an answer names, in the order of the texts. Raises BadDrafts."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != rows:
            raise BadDrafts(f"{rows} texts are answered by {shown(choices)}: it must be a list of {rows} choices")
        found: dict[int, list[int]] = {}
        for choice in choices:
            if not isinstance(choice, dict):
                raise BadDrafts(f"a choice is {shown(choice)}: it must be an object")
            index, token_ids = choice.get("index"), choice.get("token_ids")
            if type(index) is not int or not 0 <= index < rows or index in found:
                raise BadDrafts(f"a choice has the index {shown(index)}: each from 0 to {rows - 1} must come once")
            if not isinstance(token_ids, list) or len(token_ids) > count:
                raise BadDrafts(f"a choice has token_ids {shown(token_ids)}: it must be a list of {count} at most")
            for token in token_ids:
                if type(token) is not int or not 0 <= token < self._vocab_size:
                    raise BadDrafts(f"it guesses {shown(token)}: the model has token ids 0 to {self._vocab_size - 1}")
            found[index] = token_ids
        return [found[place] for place in range(rows)]


def _model_of(answer: object) -> tuple[str, int]:
    """The name of the first model in a list of them, and tokens of its context. Raises BadDrafts."""
    models = answer.get("data") if isinstance(answer, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name, longest = (first.get("id"), first.get("max_model_len")) if isinstance(first, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(longest, int):
        raise BadDrafts(f"GET /v1/models is answered by {shown(answer)}: it must name a model and its max_model_len")
    return name, longest
