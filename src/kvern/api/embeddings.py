"""OpenAI's /v1/embeddings: texts and images as vectors, of length 1 unless `normalize` is false."""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvern.api.completions import read_encoding
from kvern.api.embedding_inputs import Input, read_inputs
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import COMMON_FIELDS, WITHOUT_EFFECT, CommonFields, Refused, read_common, typed
from kvern.api.unknown_fields import check_extras
from kvern.engine.embedding import embedding_of
from kvern.request.outputs import RequestOutput
from kvern.text.content import MediaPart
from kvern.tools.encoding import Encoding

EMBEDDINGS = "/v1/embeddings"
FIELDS = frozenset(
    {"input", "messages", "encoding_format", "dimensions", "normalize", "use_activation", "add_special_tokens"}
    | {"truncate_prompt_tokens", "truncation_side"}
)
KNOWN = FIELDS | WITHOUT_EFFECT | set(COMMON_FIELDS)
_TASK = "write what the model wants before a text into input itself"
_TYPE = "numbers are float32; send encoding_format for their base64"
REFUSED: Refused = {
    **dict.fromkeys(
        ("input_type", "task", "task_type", "prompt_name", "prompt", "instruction", "title"), (("",), _TASK)
    ),
    **dict.fromkeys(("embedding_type", "output_dtype", "embed_dtype"), (("float", "float32"), _TYPE)),
    "embedding_types": (([], ["float"]), _TYPE),
    "endianness": (("native", "little"), "numbers are little-endian"),
    **dict.fromkeys(("output_dimension", "output_dimensionality"), ((), "send dimensions")),
    **dict.fromkeys(("truncate", "truncation"), ((False, "NONE"), "send truncate_prompt_tokens, -1 for what fits")),
    "max_length": ((), "send truncate_prompt_tokens"),
    "late_chunking": ((False,), "each text has a vector of its own"),
    "return_multivector": ((False,), "each text has one vector"),
    **dict.fromkeys(("pooling", "pooling_type"), ((), "texts are pooled as the model's folder says")),
    **dict.fromkeys(("text", "texts", "inputs", "images"), (([],), "send texts as input")),
}
"""Fields of other servers that would change the vectors, with the values that change nothing and advice."""
OF_TEXTS_ALONE: Refused = {"messages": (([],), "this model embeds texts without a chat template; send texts as input")}


@dataclass(frozen=True)
class EmbeddingBody:
    """Texts and images to embed: the first `dimensions` of each vector are wanted, as `number_format` float or base64.

    `encoding` is how texts are tokenized; None is the default.
    """

    inputs: list[Input]
    encoding: Encoding | None
    number_format: str
    dimensions: int | None
    normalize: bool
    common: CommonFields

    @property
    def images(self) -> list[bool]:
        """True for each input that is an image."""
        return [isinstance(one, MediaPart) for one in self.inputs]


def read_embedding(body: Mapping[str, Any], reads_images: bool = False) -> EmbeddingBody:
    """Checks a body for a model that embeds texts, and images or not. Raises HttpError."""
    check_extras(body, FIELDS, REFUSED if reads_images else {**REFUSED, **OF_TEXTS_ALONE})
    number_format = typed(body, "encoding_format", str, "float")
    if number_format not in ("float", "base64"):
        raise wrong_value("encoding_format", number_format, "float or base64")
    dimensions = typed(body, "dimensions", int, None)
    normalize = typed(body, "normalize", bool, None)
    activation = typed(body, "use_activation", bool, normalize)
    if normalize not in (None, activation):
        message = f"normalize is {normalize} and use_activation {activation}: they mean the same; give one of them"
        raise HttpError(400, message, param="normalize")
    encoding = read_encoding(body, special=True, side="right")
    if encoding is not None:
        encoding = replace(encoding, keeps_special=encoding.add_special_tokens)
    inputs = read_inputs(body)
    return EmbeddingBody(inputs, encoding, number_format, dimensions, activation is not False, read_common(body))


def embedding_answer(outputs: Sequence[RequestOutput], model: str, asked: EmbeddingBody) -> dict[str, Any]:
    """Returns the vectors of the inputs. Raises InvalidParameter if the model's vectors have too few dimensions."""
    data = []
    for index, output in enumerate(outputs):
        vector = embedding_of(output.embedding or b"", asked.dimensions, asked.normalize)
        value = vector if asked.number_format == "float" else base64.b64encode(array("f", vector).tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    if seen := sum(
        len(output.prompt_token_ids) for output, is_image in zip(outputs, asked.images, strict=True) if is_image
    ):
        usage["prompt_tokens_details"] = {"image_tokens": seen}
    return {"object": "list", "data": data, "model": model, "usage": usage}
