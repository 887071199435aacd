"""/v1/score: how likely continuations are after their contexts, by the model's own probabilities.

{"context": "2 + 2 =", "continuations": [" 4", " 5"]}
-> {"data": [{"index": 0, "logprob": -0.1, "tokens": 1, "is_greedy": true}, ...], "usage": {...}}
"""

import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.batch.openai_format import WITHOUT_EFFECT, finite
from kvern.engine.scoring import Pair, Score, score_of
from kvern.errors import shown
from kvern.server.bodies import read_object
from kvern.server.http import HttpError, ignored_header, json_response, until_gone
from kvern.server.keys import ApiKey
from kvern.server.openai import log_body, merge_extra, usage
from kvern.server.service import MOST_SEQUENCES, OWN_FIELDS, Service, typed

FIELDS = {"context", "continuations", "logprobs", "add_special_tokens"}


class Scores:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/score."""
        body = await read_object(request)
        if self._service.config.log_requests == "prompts":
            log_body(body, request.state.request_id)
        merge_extra(body)
        headers = ignored_header(body, FIELDS | WITHOUT_EFFECT | set(OWN_FIELDS))
        work = self.answer(body, request.state.key, request.state.held.close)
        return json_response(await until_gone(work, request.receive), headers=headers)

    async def answer(
        self, body: dict[str, Any], key: ApiKey, has_read: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The body of the answer; `body` is emptied and `has_read` called as soon as it is read.

        Raises HttpError, InvalidRequest, EngineDied or DeadlineExceeded.
        """
        merge_extra(body)
        service = self._service
        model = service.model(body)
        with_logprobs = typed(body, "logprobs", bool, False)
        special = typed(body, "add_special_tokens", bool, True)
        prompts = await service.client.scored_prompts(read_pairs(body), special)
        params = [prompt.params for prompt in prompts]
        ask = service.ask(body, [prompt.token_ids for prompt in prompts], params, key)
        body.clear()
        has_read()
        outputs = await service.run(ask)
        scores = [score_of(output, prompt) for output, prompt in zip(outputs, prompts, strict=True)]
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [_entry(index, score, with_logprobs) for index, score in enumerate(scores)],
            "usage": usage(outputs, 0),
        }


def _entry(index: int, score: Score, with_logprobs: bool) -> dict[str, Any]:
    entry = {
        "index": index,
        "object": "score",
        "logprob": finite(score.logprob),
        "tokens": len(score.token_ids),
        "is_greedy": score.is_greedy,
    }
    if with_logprobs:
        entry |= {"token_ids": score.token_ids, "token_logprobs": [finite(value) for value in score.token_logprobs]}
    return entry


def read_pairs(body: dict[str, Any]) -> list[Pair]:
    """The pairs of a body: one context for all continuations, or one for each. Raises HttpError."""
    for name in ("text_1", "text_2"):
        if name in body:
            message = (
                f"{name} is for models that compare two texts; this server says how likely texts are: send context "
                "and continuations"
            )
            raise HttpError(400, message, param=name)
    context: Any = body.get("context")
    continuations = typed(body, "continuations", list, [])
    if not continuations:
        raise HttpError(400, "continuations is empty: give a list of texts or of token ids", param="continuations")
    if len(continuations) > MOST_SEQUENCES:
        message = f"continuations holds {len(continuations)}: this server scores {MOST_SEQUENCES} at most at once"
        raise HttpError(400, message, param="continuations")
    several = isinstance(context, list) and context and isinstance(context[0], str | list)
    contexts = context if several else [context] * len(continuations)
    if len(contexts) != len(continuations):
        message = (
            f"context holds {len(contexts)} contexts for {len(continuations)} continuations: give one for all, or one "
            "for each"
        )
        raise HttpError(400, message, param="context")
    pairs = list(zip(contexts, continuations, strict=True))
    for index, pair in enumerate(pairs):
        for name, value in zip(("context", "continuations"), pair, strict=True):
            if not isinstance(value, str | list):
                message = f"{name} is {shown(value)} for continuation {index}: it must be a text or a list of token ids"
                raise HttpError(400, message, param=name)
    return pairs
