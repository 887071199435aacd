"""Routes that never stream: the answer is one object, for a client or for a row of a batch. /v1/embeddings is one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.embeddings import KNOWN, embedding_answer, read_embedding
from kvern.api.fields import merge_extra
from kvern.engine.embedding import check_embeds
from kvern.request.sampling_params import SamplingParams
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.http import strangers_header, whole_answer
from kvern.server.keys import ApiKey
from kvern.server.service import Ask

Body = dict[str, Any]


class WholeAnswers(ABC):
    """The base of handlers of one such route. `known` are the fields that have an effect."""

    known: Collection[str] = ()

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def create(self, request: Request) -> Response:
        """Answers POST to the route."""
        body = await read_object(request)
        merge_extra(body)
        headers = strangers_header(body, self.fields_of(body))
        work = self.answer(body, request.state.key, request.state.held.close)
        return await whole_answer(request, work, headers)

    def fields_of(self, body: Mapping[str, Any]) -> Collection[str]:
        """Returns the fields that have an effect in this body."""
        return self.known

    @abstractmethod
    async def answer(self, body: Body, key: ApiKey, has_read: Callable[[], None] = lambda: None) -> Body:
        """Returns the body of the answer. Once `body` is read, it is emptied and `has_read` is called.

        Raises HttpError, InvalidRequest, EngineDied or DeadlineExceeded.
        """


class Embeddings(WholeAnswers):
    """Handler of /v1/embeddings."""

    known = KNOWN

    async def answer(self, body: Body, key: ApiKey, has_read: Callable[[], None] = lambda: None) -> Body:
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
        ask = Ask(model, asked.common, prompts, SamplingParams(), key, embed=True)
        body.clear()
        has_read()
        return embedding_answer(await service.run(ask), model, asked)
