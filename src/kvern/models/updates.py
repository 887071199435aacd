"""Checkpoints of which newer files replace some tensors or all, with the names and shapes of the model's folder."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvern.errors import InvalidWeights, KvernError
from kvern.io.files import reason
from kvern.models.checkpoint import StoredTensor, checkpoint_files, is_equal, read_header, read_headers
from kvern.request.weights import WeightSource
from kvern.spec.model import ModelSpec

SHOWN = 5
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class UpdatedTensors(NamedTuple):
    """The tensors of a model's folder with the newer ones in their places.

    `is_whole`, `stamp` and `names` as in `WeightsFound`.
    """

    stored: list[StoredTensor]
    is_whole: bool
    stamp: str
    names: str


def updated_tensors(
    folder: Path,
    sources: Sequence[WeightSource],
    harmless: "re.Pattern[str]",
    spec: ModelSpec,
    *,
    has_come: bool = True,
) -> UpdatedTensors:
    """The tensors of a folder, those of each source in the places of earlier ones.

    `harmless` are names of tensors that follow from the configuration. Where the output layer is that of the
    embeddings, one that a source has must be equal, if that `has_come`. Raises InvalidWeights.
    """
    passed_over = re.compile("|".join((harmless.pattern, *spec.ignored)))
    stored = {tensor.name: tensor for tensor in read_headers(folder)}
    *earlier, newest = sources
    stamp = stamp_of(Path(newest.path))
    tensors = _checked(newest.path, stored, passed_over)
    own = {tensor.name for tensor in tensors} & stored.keys()
    is_whole = all(name in own or harmless.search(name) for name in stored)
    names = hashlib.blake2b(repr(sorted(own)).encode(), digest_size=16).hexdigest()
    merged = dict(stored)
    for source in [] if is_whole else earlier:
        if source.names == names:
            continue
        _check_stamp(source, stamp_of(Path(source.path)))
        merged |= {
            tensor.name: tensor for tensor in _checked(source.path, stored, passed_over) if tensor.name in stored
        }
    _check_stamp(newest, stamp)
    merged |= {tensor.name: tensor for tensor in tensors if tensor.name in stored}
    if spec.tie_word_embeddings and has_come:
        _check_head(newest.path, tensors, merged)
    ordered = sorted(merged.values(), key=lambda tensor: (tensor.file, tensor.begin))
    return UpdatedTensors(ordered, is_whole, stamp, names)


def stamp_of(path: Path) -> str:
    """A name of the sizes and times of the safetensors files at a path. Raises InvalidWeights."""
    try:
        found = [(file.name, file.stat()) for file in _files(path)]
    except OSError as error:
        raise InvalidWeights(f"{path} cannot be read: {reason(error)}") from None
    told = [(name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found]
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _check_stamp(source: WeightSource, stamp: str) -> None:
    if source.stamp not in ("", stamp):
        raise InvalidWeights(
            f"{source.path} is not what it was when its weights were taken, and they are needed again: keep the files "
            "of an update that has not all tensors until one has, and those of the last update while the server runs"
        )


def _files(path: Path) -> list[Path]:
    if not os.path.lexists(path):
        raise InvalidWeights(f"{path} does not exist: name a folder with safetensors files, or one such file")
    if not path.is_dir():
        return [path]
    if not any(path.glob("*.safetensors")):
        raise InvalidWeights(f"{path} holds no *.safetensors file: weights are taken in no other format")
    return checkpoint_files(path)


def _checked(given: str, stored: dict[str, StoredTensor], harmless: "re.Pattern[str]") -> list[StoredTensor]:
    """The tensors of a source, which fit those of the model. Raises InvalidWeights with all that do not."""
    path = Path(given)
    try:
        files = _files(path)
        tensors = read_headers(path) if path.is_dir() else read_header(files[0])
    except KvernError as error:
        raise error if isinstance(error, InvalidWeights) else InvalidWeights(str(error)) from None
    unexpected = list[str]()
    misshapen = list[str]()
    mistyped = list[str]()
    for tensor in tensors:
        served = stored.get(tensor.name)
        if served is None:
            unexpected += [] if harmless.search(tensor.name) else [f"{tensor.name} {list(tensor.shape)}"]
        elif served.shape != tensor.shape:
            misshapen.append(f"{tensor.name} has {list(tensor.shape)}, the served model {list(served.shape)}")
        elif served.dtype != tensor.dtype:
            found, wanted = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, served.dtype))
            mistyped.append(f"{tensor.name} is {found}, in the served model {wanted}")
    faults = {"unexpected": unexpected, "misshapen": misshapen, "mistyped": mistyped}
    if any(faults.values()):
        shown = (f"{len(names)} {kind}: {', '.join(names[:SHOWN])}" for kind, names in faults.items() if names)
        raise InvalidWeights(f"weights in {path} do not fit the served model: {'; '.join(shown)}")
    if not any(tensor.name in stored for tensor in tensors):
        raise InvalidWeights(f"{path} has no tensor of the served model")
    return tensors


def _check_head(path: str, tensors: Sequence[StoredTensor], merged: dict[str, StoredTensor]) -> None:
    """Raise InvalidWeights for an output layer of its own, where the model has none."""
    head = next((tensor for tensor in tensors if tensor.name.endswith(HEAD)), None)
    embedding = next((tensor for name, tensor in merged.items() if name.endswith(EMBEDDING)), None)
    if head is None or head.name in merged or embedding is None:
        return
    if not is_equal(head, embedding):
        raise InvalidWeights(
            f"{head.name} in {path} is not equal to {embedding.name}, and the served model has one matrix for both"
        )
