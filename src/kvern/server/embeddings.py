"""OpenAI's /v1/embeddings: the last token's last hidden state, scaled to length 1."""

import base64
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from kvern.batch.openai_format import COMPLETIONS
from kvern.errors import InvalidRequest
from kvern.sampling_params import SamplingParams
from kvern.server.http import HttpError, json_response, read_object, until_gone
from kvern.server.keys import ApiKey
from kvern.server.openai import read_prompts
from kvern.server.service import Service, typed
from kvern.tokenizer import read_json

POOLING_FILE = "1_Pooling/config.json"
"""Where checkpoints trained for embeddings say how the states of a text become one, as sentence-transformers does."""


class Embeddings:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        work = self.answer(await read_object(request), request.state.key)
        return json_response(await until_gone(work, request.receive))

    async def answer(self, body: dict[str, Any], key: ApiKey) -> dict[str, Any]:
        """The body of the answer. Raises HttpError, InvalidRequest or EngineDied."""
        service = self._service
        model = service.model(body)
        check_pooling(service.client.folder, model)
        encoding = typed(body, "encoding_format", str, "float")
        if encoding not in ("float", "base64"):
            message = f"encoding_format is {encoding!r:.40}: it must be float or base64"
            raise HttpError(400, message, param="encoding_format")
        dimensions = typed(body, "dimensions", int, None)
        if "input" not in body:
            raise HttpError(400, "input is missing: a text, a list of token ids, or a list of these", param="input")
        prompts = await read_prompts({"prompt": body["input"]}, COMPLETIONS, service)
        ask = service.ask(body, prompts, SamplingParams(), key, embed=True)
        outputs = await service.run(ask)
        data = []
        for index, output in enumerate(outputs):
            assert output.embedding is not None
            vector = scaled(numpy.frombuffer(output.embedding, "<f4"), dimensions)
            value = vector.tolist() if encoding == "float" else base64.b64encode(vector.tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": value})
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}


def check_pooling(folder: Path, model: str) -> None:
    """Refuse models whose hidden states mean nothing by themselves. Raises InvalidRequest."""
    if not (folder / POOLING_FILE).is_file():
        raise InvalidRequest(
            f"{model} gives no embeddings: it was not trained for that (its folder has no {POOLING_FILE}); serve a "
            "model that was"
        )
    pooling = read_json(folder / POOLING_FILE)
    if not pooling.get("pooling_mode_lasttoken"):
        modes = [name for name, value in pooling.items() if name.startswith("pooling_mode") and value]
        raise InvalidRequest(
            f"{model} pools by {', '.join(modes) or 'nothing'}: only pooling_mode_lasttoken is supported"
        )


def scaled(vector: NDArray[numpy.float32], dimensions: int | None) -> NDArray[numpy.float32]:
    """The first `dimensions` of a vector, scaled to length 1. Raises HttpError."""
    if dimensions is not None:
        if not 0 < dimensions <= len(vector):
            message = f"dimensions is {dimensions}: it must be at least 1 and at most {len(vector)}, the model's"
            raise HttpError(400, message, param="dimensions")
        vector = vector[:dimensions]
    return vector / max(float(numpy.linalg.norm(vector)), 1e-12)
