"""OpenAI's /v1/embeddings: the last token's last hidden state, scaled to length 1."""

import base64
from array import array
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.engine.embedding import check_pooling, embedding_of
from kvern.errors import shown
from kvern.sampling_params import SamplingParams
from kvern.server.bodies import read_object
from kvern.server.http import HttpError, json_response, until_gone
from kvern.server.keys import ApiKey
from kvern.server.openai import read_prompts
from kvern.server.service import Service, typed


class Embeddings:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        body = await read_object(request)
        work = self.answer(body, request.state.key, request.state.held.close)
        return json_response(await until_gone(work, request.receive))

    async def answer(
        self, body: dict[str, Any], key: ApiKey, has_read: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The body of the answer; `body` is emptied and `has_read` called as soon as it is read.

        Raises HttpError, InvalidRequest or EngineDied.
        """
        service = self._service
        model = service.model(body)
        check_pooling(service.client.folder, model)
        encoding = typed(body, "encoding_format", str, "float")
        if encoding not in ("float", "base64"):
            message = f"encoding_format is {shown(encoding)}: it must be float or base64"
            raise HttpError(400, message, param="encoding_format")
        dimensions = typed(body, "dimensions", int, None)
        if "input" not in body:
            raise HttpError(400, "input is missing: a text, a list of token ids, or a list of these", param="input")
        prompts = read_prompts({"prompt": body["input"]})
        ask = service.ask(body, prompts, SamplingParams(), key, embed=True)
        body.clear()
        has_read()
        outputs = await service.run(ask)
        data = []
        for index, output in enumerate(outputs):
            vector = embedding_of(output.embedding or b"", dimensions)
            value = vector if encoding == "float" else base64.b64encode(array("f", vector).tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": value})
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}
