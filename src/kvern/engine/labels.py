"""The labels of an encoder's classifier, and their probabilities."""

from dataclasses import dataclass
from pathlib import Path

import numpy

from kvern.errors import InvalidRequest, shown
from kvern.models.registry import is_described, spec_from_config
from kvern.text.tokenizer import read_json


@dataclass(frozen=True)
class Labels:
    """The labels by their ids. `exclusive`: a text has one of them; else any of them, each with its own probability."""

    names: tuple[str, ...]
    exclusive: bool

    def probabilities(self, logits: bytes) -> dict[str, float]:
        """Returns the labels' probabilities for the classifier's logits, float32 and little-endian."""
        values = numpy.frombuffer(logits, "<f4").astype(numpy.float64)
        if self.exclusive:
            values = numpy.exp(values - values.max())
            found = values / values.sum()
        else:
            found = 1 / (1 + numpy.exp(-values))
        return dict(zip(self.names, found.tolist(), strict=True))


def labels_of(folder: Path, model: str) -> Labels:
    """Returns the labels of the model in a folder. Raises InvalidRequest for a model that is no such classifier."""
    config = read_json(folder / "config.json")
    spec = spec_from_config(config) if is_described(config) else None
    head = None if spec is None or spec.encoder is None else spec.encoder.head
    if head is None:
        raise InvalidRequest(f"{model} has no labels: classify takes encoders whose architecture classifies texts")
    kind = config.get("problem_type")
    if kind == "regression":
        raise InvalidRequest(f"problem_type of {model} is {shown(kind)}: its numbers are no probabilities")
    names = config.get("id2label") or {}
    return Labels(
        tuple(str(names.get(str(label), f"LABEL_{label}")) for label in range(head.labels)),
        exclusive=head.labels > 1 and kind != "multi_label_classification",
    )
