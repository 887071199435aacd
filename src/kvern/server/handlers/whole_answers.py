"""Routes that never stream: the answer is one object, for a client or for a row of a batch. /v1/embeddings is one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.embeddings import KNOWN, EmbeddingBody, embedding_answer, read_embedding
from kvern.api.fields import merge_extra
from kvern.engine.embedding import check_embeds
from kvern.engine.inputs import Prompt
from kvern.request.sampling_params import SamplingParams
from kvern.server.apis import Apis
from kvern.server.bodies import read_object
from kvern.server.http import strangers_header, whole_answer
from kvern.server.keys import ApiKey
from kvern.server.service import Ask
from kvern.serving.client_inputs import ClientInputs
from kvern.text.content import MediaPart

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
        model = await service.model(body, key)
        client = service.engine_of(model).client
        check_embeds(client.inputs.model, client.folder, model)
        facts = client.inputs.model
        asked = read_embedding(body, facts.is_encoder and facts.reads_images)
        prompts = await self._prompts(asked, client.inputs, key)
        ask = Ask(model, asked.common, prompts, SamplingParams(), key, embed=True)
        body.clear()
        has_read()
        return embedding_answer(await service.run(ask), model, asked)

    async def _prompts(self, asked: EmbeddingBody, inputs: ClientInputs, key: ApiKey) -> list[Prompt]:
        """The inputs of a body as prompts, images as files."""
        encoding = asked.encoding
        if encoding is not None:
            encoding = encoding.within(inputs.max_model_len - (not inputs.model.is_encoder))
        place = "input[{part}]"
        async with self._service.media.read([{"role": "user", "content": asked.inputs}], key, place) as [message]:
            found: list[Prompt] = []
            for number, one in enumerate(message["content"]):
                if isinstance(one, MediaPart):
                    found.append(await inputs.picture(one.sent, place.format(part=number)))
                else:
                    found.append(one if encoding is None else await inputs.encoded(one, encoding, None))
            return found
