"""The ways in which models measure the relevance of a document to a query, chosen by a model's folder.

an encoder's classifier       the sigmoid of its one label, or the label itself, of both texts encoded together
any other encoder             the cosine of both embeddings (`engine/embedding.py`)
`1_Pooling/config.json`       the same
a classifier's architecture   the sigmoid of its one label: `score.weight` times the last hidden state
anything else                 yes against no; `1_LogitScore/config.json`, or vLLM's `classifier_from_token` in
                              config.json, may name these tokens
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from kvern.engine.embedding import Vector
from kvern.errors import CorruptCheckpoint, InvalidRequest, shown
from kvern.io.files import open_regular, read_at, reason
from kvern.models.header import read_entries
from kvern.models.pooling import POOLING_FILE
from kvern.models.registry import is_described, spec_from_config
from kvern.text.tokenizer import Tokenizer, read_json

ANSWERS_FILE = "1_LogitScore/config.json"
"""The file in which sentence-transformers' checkpoints name the tokens of both answers."""
ANSWERS = ("no", "yes")
HEAD = "score.weight"


@dataclass(frozen=True)
class Embeddings:
    """Relevance by the embeddings of query and document."""


@dataclass(frozen=True)
class Classifier:
    """Relevance by a classifier: `weight` [hidden], float32, is multiplied by the last hidden state of both in one
    prompt."""

    weight: Vector

    def logit(self, state: bytes) -> float:
        """Returns the logit of a hidden state, float32 and little-endian."""
        return float(numpy.frombuffer(state, "<f4") @ self.weight)


@dataclass(frozen=True)
class YesOrNo:
    """Relevance by the tokens of both answers to the question whether the document meets the query."""

    yes: list[int]
    no: list[int]


@dataclass(frozen=True)
class PairClassifier:
    """Relevance by the engine's classifier of both texts; `sigmoid` turns its label into a probability."""

    sigmoid: bool

    def score(self, label: bytes) -> float:
        """Returns the score for the classifier's output, one float32, little-endian."""
        (logit,) = numpy.frombuffer(label, "<f4").tolist()
        return sigmoid(logit) if self.sigmoid else logit


Way = Embeddings | Classifier | PairClassifier | YesOrNo


def sigmoid(value: float) -> float:
    """Returns the sigmoid of any finite or infinite number."""
    return 1 / (1 + math.exp(min(-value, 700.0)))


def way_of(folder: Path, tokenizer: Tokenizer) -> Way:
    """Returns the way for the model in a folder. Raises InvalidRequest or CorruptCheckpoint."""
    config = read_json(folder / "config.json")
    spec = spec_from_config(config) if is_described(config) else None
    if spec is not None and spec.encoder is not None:
        if (head := spec.encoder.head) is None:
            return Embeddings()
        if head.labels > 1:
            raise InvalidRequest(f"the model has {head.labels} labels and judges no pairs: LLM.classify gives labels")
        return PairClassifier(_has_sigmoid(config))
    if (folder / POOLING_FILE).is_file():
        return Embeddings()
    if spec is not None and spec.is_classifier:
        return Classifier(_read_head(folder, spec.hidden_size))
    return _answers(folder, config, tokenizer)


def _has_sigmoid(config: Mapping[str, Any]) -> bool:
    """True unless the configuration says that labels are no probabilities, as sentence-transformers reads it."""
    inner = config.get("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, Mapping) else None
    name = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise InvalidRequest(
            f"the activation of the model's label is {shown(name)}: Sigmoid and Identity are supported"
        )
    return kind == "Sigmoid"


def _answers(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> YesOrNo:
    if given := read_json(folder / ANSWERS_FILE):
        yes, no = given.get("true_token_id"), given.get("false_token_id")
        if type(yes) is not int or type(no) is not int:
            raise InvalidRequest(
                f"{ANSWERS_FILE} of the model's folder has true_token_id {shown(yes)} and false_token_id {shown(no)}: "
                "only models that tell relevance by two tokens are supported"
            )
        return YesOrNo([yes], [no])
    texts = config.get("classifier_from_token") or ANSWERS
    if not (isinstance(texts, list | tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts)):
        raise InvalidRequest(
            f"classifier_from_token of config.json is {shown(texts)}: it must be two texts, no and yes"
        )
    no, yes = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return YesOrNo(yes, no)


def _read_head(folder: Path, hidden: int) -> Vector:
    """Returns the one row of `score.weight`, read without torch, which the server's process does not have."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open_regular(file) as stream:
                begin, entries = read_entries(stream)
                if (entry := entries.get(HEAD)) is None:
                    continue
                first, end = entry.data_offsets
                data = read_at(stream, begin + first, end - first)
        except (OSError, ValueError) as error:
            raise CorruptCheckpoint(f"{file} cannot be read: {reason(error)}") from None
        if list(entry.shape) != [1, hidden] or entry.dtype not in ("F32", "F16", "BF16"):
            found = f"{entry.dtype} {list(entry.shape)}"
            raise CorruptCheckpoint(f"{HEAD} of {file} is {found}: it must be F32, F16 or BF16 [1, {hidden}]")
        if entry.dtype == "BF16":
            return (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        return numpy.frombuffer(data, "<f4" if entry.dtype == "F32" else "<f2").astype("<f4")
    raise CorruptCheckpoint(
        f"{folder} has no {HEAD}, the head of a classifier, in its *.safetensors: download it again"
    )
