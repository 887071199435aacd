"""A folder with plain weights, read block by block."""

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvern.errors import ConfigError, CorruptCheckpoint, UnsupportedModel, shown
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearMethods
from kvern.layers.loadable import Loadable
from kvern.models.checkpoint import StoredTensor, open_map, read_headers
from kvern.models.embedder import spec_of_folder
from kvern.models.loader import check_fits, choose_dtype, llama_name, outline_of, read_config
from kvern.models.weighted import targets_of
from kvern.quantize.watched import Watched, places
from kvern.spec.mixers import AttentionSpec, LatentAttentionSpec
from kvern.spec.model import ModelSpec, Rename

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
WEIGHT = ".weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
LEFT_PLAIN = re.compile(r"\.shared_expert_gate$")
"""Linear layers of a single output."""


@dataclass(frozen=True)
class Piece:
    """A tensor of the new checkpoint: one of the old one, or an expert's matrix in a stack of them.

    `name` is the checkpoint's, `path` Llama's; `layer` None: not of a layer. `place` (expert, first row, rows,
    columns) is within a stack, brought into Llama's order.
    """

    name: str
    path: str
    stored: StoredTensor
    rename: Rename | None
    place: tuple[int, int, int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape if self.place is None else self.place[2:]

    @property
    def layer(self) -> int | None:
        match = _LAYER.match(self.path)
        return int(match[1]) if match else None

    @property
    def matrix(self) -> str:
        """The name of its module in plans, reports and configurations."""
        return self.name.removesuffix(WEIGHT)

    @property
    def reordered(self) -> bool:
        """Its rows are in another order than Llama's."""
        return self.place is None and self.rename is not None and self.rename.transform is not None

    @property
    def names(self) -> list[str]:
        """The names of its module: the checkpoint's, and Llama's if it differs."""
        return list(dict.fromkeys((self.matrix, self.path.removesuffix(WEIGHT))))

    def of(self, tensor: Tensor, spec: ModelSpec) -> Tensor:
        """The part of the stored tensor that this piece is."""
        if self.place is None:
            return tensor
        expert, first, rows, _ = self.place
        return _in_order(tensor, self.rename, spec)[expert, first : first + rows]


def _in_order(tensor: Tensor, rename: Rename | None, spec: ModelSpec) -> Tensor:
    return rename.transform(tensor, spec) if rename and rename.transform else tensor


class Checkpoint:
    """A model with plain weights, whose names and shapes have been checked.

    Raises ModelNotFound, UnsupportedModel, CorruptCheckpoint, or ConfigError if the weights are quantized.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        _refuse_file(folder)
        self.config: Mapping[str, Any] = read_config(folder)
        _refuse_quantized(folder, self.config)
        self.spec = spec_of_folder(folder, self.config)
        _refuse_parts(self.spec)
        self.stored = read_headers(folder)
        _refuse_codes(self.stored)
        self.dtype = choose_dtype("auto", self.spec, folder)
        self._maps: dict[Path, mmap.mmap] = {}
        outline = outline_of(self.spec, self.build(1))
        check_fits(outline, folder, self.stored)
        self.pieces = [piece for tensor in self.stored for piece in self._pieces(tensor)]
        watched = {path for layer in outline.layers for place in places(layer) for path in place.paths}
        self.matrices = {
            piece.matrix: piece
            for piece in self.pieces
            if piece.path.removesuffix(WEIGHT) in watched and piece.path.endswith(WEIGHT)
            if not LEFT_PLAIN.search(piece.matrix) and not piece.reordered
        }
        """Matrices that may be quantized, by name: all linear layers of the blocks except routers and gates.

        Matrices whose rows are stored in another order are left out, because packed codes cannot be reordered.
        """

    def build(self, length: int) -> Build:
        """The `Build` of blocks for rows of `length` tokens."""
        return Build(self.dtype, self.device, length, linear=LinearMethods(Watched()))

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales in the new checkpoint: bfloat16 has a sufficient range, float16 has not."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def of_layer(self, layer: int | None) -> list[Piece]:
        return [piece for piece in self.pieces if piece.layer == layer]

    def read(self, piece: Piece) -> Tensor:
        """The tensor, as a view of the file."""
        tensor = piece.stored
        if tensor.file not in self._maps:
            self._maps[tensor.file] = open_map(tensor.file)
        if not tensor.nbytes:
            return piece.of(torch.empty(tensor.shape, dtype=tensor.dtype), self.spec)
        data, count = self._maps[tensor.file], tensor.nbytes // tensor.dtype.itemsize
        flat = torch.frombuffer(data, dtype=tensor.dtype, count=count, offset=tensor.begin)
        return piece.of(flat.view(tensor.shape), self.spec)

    def _pieces(self, tensor: StoredTensor) -> Iterator[Piece]:
        path, rename = llama_name(tensor.name, self.spec.renames)
        match = _STACKED.fullmatch(path)
        if match is None:
            yield Piece(tensor.name, path, tensor, rename)
            return
        experts, rows, columns = _in_order(torch.empty(tensor.shape, device="meta"), rename, self.spec).shape
        half = rows // 2
        parts = {"down_proj": (0, rows)} if match[2] == "down" else {"gate_proj": (0, half), "up_proj": (half, half)}
        own = _STACKED.fullmatch(tensor.name)
        for expert in range(experts):
            for part, (first, count) in parts.items():
                path = f"{match[1]}.{expert}.{part}.weight"
                name = f"{own[1]}.{expert}.{part}.weight" if own else path
                yield Piece(name, path, tensor, rename, (expert, first, count, columns))


def _refuse_file(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError(
            f"{folder} is a file: quantize the model's folder of safetensors with float32, float16 or bfloat16 weights "
            "that it was made from"
        )


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization or (folder / "hf_quant_config.json").exists():
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ConfigError(
            f"the model in {folder} is quantized already ({shown(method or 'by hf_quant_config.json')}): quantize the "
            "model with float32, float16 or bfloat16 weights that it was made from"
        )


def part_without_calibration(spec: ModelSpec) -> str | None:
    """The part of a model that calibration cannot run; None: it runs all."""
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    if any(isinstance(mixer, LatentAttentionSpec) and mixer.indexer for mixer in mixers):
        return "an indexer, which selects keys"
    if any(attention.sinks for attention in spec.attentions):
        return "attention sinks"
    if spec.additions.per_layer is not None:
        return "inputs of each layer's own"
    if any(isinstance(mixer, AttentionSpec) and mixer.cache_of is not None for mixer in mixers):
        return "layers that attend to the keys of others"
    return None


def _refuse_parts(spec: ModelSpec) -> None:
    part = part_without_calibration(spec)
    if part is not None:
        raise UnsupportedModel(
            f"{spec.model_type} has {part}, through which calibrations do not go: quantize it while it is loaded "
            "(--quantization), or use a quantized checkpoint"
        )


def _refuse_codes(stored: list[StoredTensor]) -> None:
    for tensor in stored:
        if tensor.name.endswith(WEIGHT) and tensor.dtype not in PLAIN:
            raise UnsupportedModel(
                f"tensor {tensor.name} has the dtype {str(tensor.dtype).removeprefix('torch.')}: weights to quantize "
                "are float32, float16 or bfloat16"
            )


def load_into(
    module: torch.nn.Module, pieces: list[Piece], tensors: Mapping[str, Tensor], checkpoint: Checkpoint
) -> None:
    """Fill a module of the model from tensors by Llama's names. Raises CorruptCheckpoint if one is missing."""
    loadables = [part for part in module.modules() if isinstance(part, Loadable)]
    targets = targets_of(loadables, tensors.keys())
    missing = [name for name, target in targets.items() if target.needed and name not in tensors]
    if missing:
        raise CorruptCheckpoint(f"weights in {checkpoint.folder} lack {missing[0]} {list(targets[missing[0]].shape)}")
    with torch.no_grad():
        for piece in pieces:
            target = targets.get(piece.path)
            if target is not None:
                tensor = tensors[piece.path]
                rows = _in_order(tensor, piece.rename, checkpoint.spec) if piece.reordered else tensor
                target.load(rows.reshape(target.shape), 0)
