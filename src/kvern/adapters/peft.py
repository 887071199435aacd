"""Reads LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight     [rank, inputs]
    `--- PEFT's ---' `------ the module, as in the checkpoint ------'  and lora_B [outputs, rank]

Modules are mapped to the decoder's layers in the same way as the tensors of a checkpoint. Anything that would be read
wrongly or only in part is refused by name.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kvern.adapters.check import (
    CONFIG_NAME,
    MOST_CONFIG_BYTES,
    WEIGHTS_NAME,
    AdaptedModule,
    Checked,
    Matrix,
    check_files,
    ends_with_any,
)
from kvern.errors import InvalidAdapter
from kvern.io.files import digest_of, open_regular, read_at, reason
from kvern.layers.linear import Linear
from kvern.models.checkpoint import DTYPES
from kvern.models.decoder import Decoder
from kvern.models.loader import llama_name
from kvern.ranks.ranks import Share, places
from kvern.spec.model import ModelSpec, Rename


@dataclass(frozen=True)
class Target:
    """One part of a linear layer: `layer` is its path in the model, `part` the name of the checkpoint's module.

    `outputs`, in consecutive runs, and `inputs` give the sizes in the checkpoint and the ranges that this rank holds.
    """

    layer: str
    part: str
    outputs: Sequence[Share]
    inputs: Share

    @property
    def width(self) -> int:
        """The number of outputs in the checkpoint."""
        return sum(share.whole for share in self.outputs)

    @property
    def key(self) -> str:
        return f"{self.layer}/{self.part}"


def linear_layers(decoder: Decoder) -> Iterator[tuple[str, Linear]]:
    """The linear layers of the decoder's blocks, with their paths in the model, of which it may be one stage."""
    for place, layer in enumerate(decoder.layers, decoder.build.ranks.stage.first_layer):
        for path, module in layer.named_modules():
            if isinstance(module, Linear):
                yield f"layers.{place}.{path}", module


def targets_of(decoder: Decoder) -> dict[str, tuple[Target, ...]]:
    """The targets by the names of a checkpoint's modules, both fused ones and their parts."""
    targets: dict[str, tuple[Target, ...]] = {}
    for path, linear in linear_layers(decoder):
        prefix = f"model.{path.rpartition('.')[0]}."
        parts = [Target(path, part, *linear.shares(part)) for part in linear.outputs]
        targets |= {prefix + target.part: (target,) for target in parts}
        if linear.fused is not None:
            targets[prefix + linear.fused] = tuple(parts)
    return targets


_EXPERTS = re.compile(r"\.(experts|block_sparse_moe|router)\b|\.mlp\.gate$")
_ENDS = re.compile(r"(^|\.)(lm_head|embed_tokens|embed_in|embed_out|wte)$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LowRank:
    """The update of one linear part: `up @ (down @ x)`, with the scale included in `up`.

    `down [rank, inputs]`, `up [outputs, rank]`, in the model's dtype.
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def share(self, target: Target) -> "LowRank":
        """The share of the update that belongs to this rank."""
        inputs, rows = target.inputs.held, [self.up[held.start : held.stop] for _, held in places(target.outputs)]
        return LowRank(self.down[:, inputs.start : inputs.stop].contiguous(), torch.cat(rows))


@dataclass(frozen=True)
class Adapter:
    """The updates of an adapter by linear part, such as "layers.3.self_attn.qkv_proj/q_proj"; see `Target`.

    `digest`: 16 bytes that identify the files in every process.
    """

    parts: Mapping[str, LowRank]
    digest: bytes


@dataclass(frozen=True)
class _Place:
    """A module of the files, and the parts of the decoder that it changes."""

    name: str
    module: AdaptedModule
    parts: tuple[Target, ...]
    rename: Rename | None


def read_adapter(
    folder: Path, spec: ModelSpec, targets: Mapping[str, tuple[Target, ...]], max_rank: int, dtype: torch.dtype
) -> Adapter:
    """Reads the adapter in a folder and checks every tensor against the shapes of the decoder's `targets`.

    Raises InvalidAdapter, which names the file and its fault.
    """
    file = folder / WEIGHTS_NAME
    with _open(folder, CONFIG_NAME, MOST_CONFIG_BYTES) as config, _open(folder, WEIGHTS_NAME) as weights:
        before = _state(weights)
        checked = check_files(folder, config, weights)
        places = [_place(file, name, module, spec, targets, max_rank) for name, module in checked.modules.items()]
        taken: set[str] = set()
        for place in places:
            keys = {part.key for part in place.parts}
            if keys & taken:
                raise InvalidAdapter(f"{file}: {place.name} is there twice, fused with others and alone")
            taken |= keys
        _check_complete(file, checked, taken, targets)
        parts: dict[str, LowRank] = {}
        try:
            for place in places:
                parts |= _low_ranks(file, weights, place, spec, dtype)
            digest = digest_of(config, weights)
            if _state(weights) != before:
                raise ValueError("it was changed while it was read: load it again")
        except (OSError, ValueError) as error:
            raise InvalidAdapter(f"{file} cannot be read: {reason(error)}") from None
    return Adapter(parts, digest)


@contextlib.contextmanager
def _open(folder: Path, name: str, most_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Opens one of the adapter's files; later changes of the name have no effect."""
    # In the hub's cache, snapshots/REVISION/NAME is a link to blobs/HASH.
    below = folder.parent.parent if folder.parent.name == "snapshots" else folder
    try:
        stream = open_regular(folder / name, most_bytes, below)
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{folder / name} cannot be read: {reason(error)}") from None
    with stream:
        yield stream


def _state(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _place(
    file: Path,
    name: str,
    module: AdaptedModule,
    spec: ModelSpec,
    targets: Mapping[str, tuple[Target, ...]],
    max_rank: int,
) -> _Place:
    """The place of a module in the model, with the shapes of its matrices checked."""
    missing = {"A", "B"} - module.matrices.keys()
    if missing:
        raise InvalidAdapter(f"{file}: tensor {name}.lora_{missing.pop()}.weight is missing beside its counterpart")
    llama, rename = llama_name(f"{name}.weight", spec.renames)
    parts = targets.get(llama.removesuffix(".weight"))
    if parts is None:
        raise InvalidAdapter(f"{file}: {name} {_why_not(name)}")
    if not module.targeted:
        raise InvalidAdapter(
            f"{file}: {name} has tensors, but target_modules does not name it, or exclude_modules does"
        )
    rank = module.rank
    inputs = parts[0].inputs.whole
    outputs = sum(part.width for part in parts)
    for side, expected in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if module.matrices[side].shape != expected:
            raise InvalidAdapter(
                f"{file}: tensor {name}.lora_{side}.weight is {list(module.matrices[side].shape)}, and rank {rank} of "
                f"its configuration and the model's layer of {inputs} inputs and {outputs} outputs ask for "
                f"{list(expected)}: is it of another base model?"
            )
    if rank > max_rank:
        raise InvalidAdapter(f"{file}: {name} has rank {rank}, above max_adapter_rank {max_rank}: raise that")
    return _Place(name, module, parts, rename)


def _low_ranks(file: Path, weights: BinaryIO, place: _Place, spec: ModelSpec, dtype: torch.dtype) -> dict[str, LowRank]:
    """The updates of the parts that a module changes. Raises InvalidAdapter, or ValueError if the file is truncated."""
    scale, parts = place.module.scale, place.parts
    down, up = (_read(weights, place.module.matrices[side]) for side in "AB")
    down, up = down.to(dtype), (_reordered(up, place.rename, spec) * scale).to(dtype)
    for side, tensor in (("A", down), ("B", up)):
        if not tensor.isfinite().all():
            raise InvalidAdapter(
                f"{file}: tensor {place.name}.lora_{side}.weight, scaled by {scale:g}, holds numbers that are not "
                f"finite in {str(dtype).removeprefix('torch.')}"
            )
    each = torch.split(up, [part.width for part in parts])
    return {part.key: LowRank(down, rows.contiguous()) for part, rows in zip(parts, each, strict=True)}


def _read(weights: BinaryIO, matrix: Matrix) -> Tensor:
    """Read, not mapped: a map of a file that is cut meanwhile would end the process."""
    dtype = DTYPES[matrix.dtype]
    data = read_at(weights, matrix.begin, math.prod(matrix.shape) * dtype.itemsize)
    return torch.frombuffer(data, dtype=dtype).view(matrix.shape).to(torch.float32)


def _reordered(up: Tensor, rename: Rename | None, spec: ModelSpec) -> Tensor:
    """The rows in the decoder's order, if it differs from the checkpoint's."""
    return up if rename is None or rename.transform is None else rename.transform(up, spec)


def _why_not(module: str) -> str:
    if _EXPERTS.search(module):
        return "is of experts or their router, which kvern does not adapt: train without them"
    if _ENDS.search(module):
        return "is an embedding or the output layer, which kvern does not adapt: train without it"
    return "is no linear layer of this model: is it of another base model?"


def _check_complete(file: Path, checked: Checked, taken: set[str], targets: Mapping[str, tuple[Target, ...]]) -> None:
    """A listed module that the decoder knows by this name must be there in every layer."""
    if checked.names is None:
        return
    listed, excluded = frozenset(checked.names), frozenset(checked.excluded)
    layers = None if checked.layers is None else frozenset(checked.layers)
    known = {name.rpartition(".")[2] for name, parts in targets.items() if any(part.key in taken for part in parts)}
    for name, parts in targets.items():
        layer = _LAYER.search(name)
        chosen = layers is None or layer is None or int(layer[1]) in layers
        absent = any(part.key not in taken for part in parts) and not ends_with_any(name, excluded)
        if absent and chosen and name.rpartition(".")[2] in known and ends_with_any(name, listed):
            raise InvalidAdapter(f"{file}: tensor {name}.lora_A.weight is missing, which target_modules asks for")
