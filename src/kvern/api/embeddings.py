"""OpenAI's /v1/embeddings: texts as vectors of length 1."""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvern.api.completions import read_encoding, read_prompts
from kvern.api.errors import HttpError
from kvern.api.fields import CommonFields, read_common, typed
from kvern.engine.embedding import embedding_of
from kvern.engine.inputs import Prompt
from kvern.errors import shown
from kvern.outputs import RequestOutput
from kvern.tools.encoding import Encoding

EMBEDDINGS = "/v1/embeddings"
MOST_TEXTS = 2048
"""As at OpenAI's: clients send a thousand at once by themselves."""


@dataclass(frozen=True)
class EmbeddingBody:
    """Texts whose vectors are wanted: the first `dimensions` of each, as `number_format` float or base64.

    `encoding` says how they become tokens, if a body says something about it.
    """

    prompts: list[Prompt]
    encoding: Encoding | None
    number_format: str
    dimensions: int | None
    common: CommonFields


def read_embedding(body: Mapping[str, Any]) -> EmbeddingBody:
    """Check a body. Raises HttpError."""
    number_format = typed(body, "encoding_format", str, "float")
    if number_format not in ("float", "base64"):
        message = f"encoding_format is {shown(number_format)}: it must be float or base64"
        raise HttpError(400, message, param="encoding_format")
    dimensions = typed(body, "dimensions", int, None)
    if "input" not in body:
        raise HttpError(400, "input is missing: a text, a list of token ids, or a list of these", param="input")
    encoding = read_encoding(body, special=True, side="right")
    if encoding is not None:
        encoding = replace(encoding, keeps_special=encoding.add_special_tokens)
    return EmbeddingBody(
        read_prompts(body, "input", MOST_TEXTS), encoding, number_format, dimensions, read_common(body)
    )


def embedding_answer(
    outputs: Sequence[RequestOutput], model: str, number_format: str, dimensions: int | None
) -> dict[str, Any]:
    """The vectors. Raises InvalidParameter if the model's have fewer dimensions."""
    data = []
    for index, output in enumerate(outputs):
        vector = embedding_of(output.embedding or b"", dimensions)
        value = vector if number_format == "float" else base64.b64encode(array("f", vector).tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
