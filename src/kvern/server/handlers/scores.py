"""/v1/score: the handler, for continuations and for pairs of texts."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api import text_pairs
from kvern.api.fields import merge_extra
from kvern.api.scores import KNOWN, read_score, score_answer
from kvern.api.text_pairs import has_pairs, pairs_answer, read_pairs
from kvern.server.apis import Apis
from kvern.server.handlers.relevance import Relevance
from kvern.server.handlers.whole_answers import whole_answer
from kvern.server.keys import ApiKey


class Scores:
    """Handler of /v1/score."""

    def __init__(self, apis: Apis) -> None:
        self._service, self._relevance = apis.service, apis.get(Relevance)

    async def create(self, request: Request) -> Response:
        """POST /v1/score."""
        return await whole_answer(request, self.answer, lambda body: text_pairs.KNOWN if has_pairs(body) else KNOWN)

    async def answer(
        self, body: dict[str, Any], key: ApiKey, has_read: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Returns the body of the answer. Once `body` is read, it is emptied and `has_read` is called.

        Raises HttpError, InvalidRequest, EngineDied or DeadlineExceeded, and what `Relevance.of` raises.
        """
        merge_extra(body)
        service = self._service
        model = service.model(body)
        if has_pairs(body):
            pairs = read_pairs(body)
            body.clear()
            has_read()
            return pairs_answer(await self._relevance.of(pairs, model, key), model)
        asked = read_score(body)
        logprobs, common = asked.logprobs, asked.common
        prompts = await service.engine_of(model).client.inputs.scored_prompts(asked.pairs, asked.add_special_tokens)
        del asked  # its texts are not needed while the pairs are scored
        params = [prompt.params for prompt in prompts]
        ask = service.ask(model, common, [prompt.token_ids for prompt in prompts], params, key)
        body.clear()
        has_read()
        return score_answer(await service.run(ask), prompts, model, logprobs)
