"""Texts as vectors of length 1: the last token's last hidden state, or what an encoder pools."""

from pathlib import Path

import numpy
import numpy.typing

from kvern.errors import InvalidParameter, InvalidRequest
from kvern.models.pooling import read_pooling
from kvern.spec.facts import ModelFacts

Vector = numpy.typing.NDArray[numpy.float32]
LAST_TOKEN = {"lasttoken": "lasttoken"}


def check_embeds(facts: ModelFacts, folder: Path, model: str) -> None:
    """Refuse models whose states mean nothing by themselves, or are pooled in unknown ways. Raises InvalidRequest.

    How an encoder pools, its specification says.
    """
    if not facts.is_encoder:
        read_pooling(folder, model, LAST_TOKEN)
    elif facts.is_classifier:
        raise InvalidRequest(f"{model} is a classifier and gives no embeddings: ask /v1/rerank or /v1/score")


def embedding_of(state: bytes, dimensions: int | None = None, normalize: bool = True) -> list[float]:
    """The first `dimensions` of a hidden state, float32 and little-endian, as a vector of length 1 if they are
    to be normalized.

    Raises InvalidParameter.
    """
    vector = numpy.frombuffer(state, "<f4")
    if dimensions is not None:
        if not 0 < dimensions <= len(vector):
            raise InvalidParameter(
                f"dimensions is {dimensions}: it must be at least 1 and at most {len(vector)}, the model's"
            )
        vector = vector[:dimensions]
    return list((_of_length_1(vector) if normalize else vector).tolist())


def cosine(one: bytes, other: bytes) -> float:
    """Returns the cosine of two hidden states."""
    first, second = (_of_length_1(numpy.frombuffer(state, "<f4")) for state in (one, other))
    return float(first @ second)


def _of_length_1(vector: Vector) -> Vector:
    return vector / max(float(numpy.linalg.norm(vector)), 1e-12)
