"""OpenAI's /v1/embeddings: the handler."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.embeddings import KNOWN, embedding_answer, read_embedding
from kvern.api.fields import merge_extra
from kvern.engine.embedding import check_embeds
from kvern.request.sampling_params import SamplingParams
from kvern.server.apis import Apis
from kvern.server.handlers.whole_answers import whole_answer
from kvern.server.keys import ApiKey


class Embeddings:
    """Handler of embeddings."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def create(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        return await whole_answer(request, self.answer, lambda _: KNOWN)

    async def answer(
        self, body: dict[str, Any], key: ApiKey, has_read: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Returns the body of the answer. Once `body` is read, it is emptied and `has_read` is called.

        Raises HttpError, InvalidRequest or EngineDied.
        """
        merge_extra(body)
        service = self._service
        model = service.model(body)
        client = service.engine_of(model).client
        check_embeds(client.inputs.model, client.folder, model)
        asked = read_embedding(body)
        prompts = asked.prompts
        if asked.encoding is not None:
            encoding = asked.encoding.within(client.inputs.max_model_len - (not client.inputs.model.is_encoder))
            prompts = [await client.inputs.encoded(prompt, encoding, None) for prompt in prompts]
        ask = service.ask(model, asked.common, prompts, SamplingParams(), key, embed=True)
        body.clear()
        has_read()
        return embedding_answer(await service.run(ask), model, asked)
