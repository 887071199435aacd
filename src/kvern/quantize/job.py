"""A whole run: its options are checked before memory or disk is used, then it goes layer by layer.

Codes are stored in the form of compressed-tensors checkpoints (https://github.com/vllm-project/compressed-tensors):
"float-quantized" and "int-quantized" store codes of one byte in `weight`; "pack-quantized" stores 4-bit codes in
`weight_packed`, int32, the first input in the lowest bits, with 8 added to each.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvern.errors import ConfigError, shown
from kvern.models.registry import KEY
from kvern.quantize.awq import Awq
from kvern.quantize.blocks import Block, Walk
from kvern.quantize.calibration import Calibration
from kvern.quantize.checkpoint import Checkpoint, Piece
from kvern.quantize.method import Gptq, Method, Plan, Rounded, RoundToNearest
from kvern.quantize.scheme import Scheme
from kvern.quantize.statistics import REPORT_NAME, MatrixStatistics, report, statistics_of
from kvern.quantize.writer import SHARD_BYTES, Writer, check_target, writing


def tensors_of(rounded: Rounded, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The stored tensors of a matrix by the end of their names, on the host."""
    codes, grid = rounded
    scheme = grid.scheme
    scale = grid.scale.to(scale_dtype)
    if scheme.bits == 8:
        dtype = torch.float8_e4m3fn if scheme.kind == "float" else torch.int8
        tensors = {"weight": codes.to(dtype), "weight_scale": scale}
    else:
        tensors = {
            "weight_packed": pack(codes, scheme.bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if grid.zero is not None:
            tensors["weight_zero_point"] = pack(grid.zero.t(), scheme.bits).t()
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def pack(codes: Tensor, bits: int) -> Tensor:
    """`[rows, n]` signed codes -> int32 `[rows, ceil(n / (32 / bits))]`, the first in the lowest bits."""
    count = 32 // bits
    unsigned = codes.to(torch.int64) + (1 << (bits - 1))
    padded = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % count)).view(len(codes), -1, count)
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (padded << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantization_config(plan: Plan, plain: list[str], act_order: bool = False) -> dict[str, Any]:
    """The `quantization_config` of config.json; `plain` are the names of linear layers that are not quantized."""
    schemes = list(dict.fromkeys(plan.values()))
    groups: dict[str, Mapping[str, Any]] = {}
    for number, scheme in enumerate(schemes):
        names = [name for name, other in plan.items() if other == scheme]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(schemes) == 1 else names,
            "weights": _weights(scheme, act_order and scheme.bits < 8),
            "input_activations": _activations(scheme) if scheme.activations else None,
            "output_activations": None,
            "format": _format(scheme),
        }
    formats = {_format(scheme) for scheme in schemes}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def _format(scheme: Scheme) -> str:
    if scheme.bits < 8:
        return "pack-quantized"
    return "float-quantized" if scheme.kind == "float" else "int-quantized"


def _weights(scheme: Scheme, act_order: bool) -> dict[str, Any]:
    strategy = "block" if scheme.outputs_per_scale > 1 else "group" if scheme.group else "channel"
    return {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group if strategy == "group" else None,
        "block_structure": [scheme.outputs_per_scale, scheme.group] if strategy == "block" else None,
        "dynamic": False,
        "actorder": "weight" if act_order else None,
        "observer": "minmax",
    }


def _activations(scheme: Scheme) -> dict[str, Any]:
    """Dynamic, of each token; for blocks of weights, of each run of as many inputs."""
    blocks = scheme.outputs_per_scale > 1
    return {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": True,
        "strategy": "group" if blocks else "token",
        "group_size": scheme.group if blocks else None,
        "block_structure": None,
        "dynamic": True,
        "observer": None,
    }


Progress = Callable[[int, int], None]
"""A callback with the number of finished matrices and of their weights."""


@dataclass(frozen=True)
class Settings:
    """The options: `plan` names matrices of the checkpoint and their schemes, `method` chooses the codes.

    `about` goes into the report: "method" and "settings" as the user gave them.
    """

    plan: Plan
    method: Method
    about: Mapping[str, Any] = field(default_factory=dict)
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class Result:
    """The result: bytes of weights before and after, and statistics of each matrix."""

    matrices: list[MatrixStatistics]
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    seconds: float


def check_plan(checkpoint: Checkpoint, plan: Plan) -> None:
    """Raises ConfigError for names that are no matrices, and groups that do not divide."""
    if not plan:
        raise ConfigError("the plan leaves every matrix plain: nothing is to be quantized")
    for name, scheme in plan.items():
        if name not in checkpoint.matrices:
            raise ConfigError(f"the plan names {shown(name)}: the model has no such matrix that can be quantized")
        scheme.check_fits(name, checkpoint.matrices[name].shape[1])


def make_method(name: str, *, act_order: bool = True) -> Method:
    """The method of a name of the command line."""
    return Gptq(act_order=act_order) if name == "gptq" else Awq() if name == "awq" else RoundToNearest()


def estimated_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """The bytes of the new folder's weights."""
    total = 0
    for piece in checkpoint.pieces:
        scheme = plan.get(piece.matrix)
        outputs, *inputs = piece.shape or (1,)
        if scheme is None or len(inputs) != 1:
            total += torch.Size(piece.shape).numel() * piece.stored.dtype.itemsize
        else:
            total += scheme.stored_bytes(outputs, inputs[0], checkpoint.scale_dtype)
    return total


def check(checkpoint: Checkpoint, settings: Settings, out: Path, *, overwrite: bool = False) -> None:
    """Checks that the run can succeed, before any weight is read. Raises ConfigError."""
    check_plan(checkpoint, settings.plan)
    check_target(out, checkpoint.folder, overwrite, estimated_bytes(checkpoint, settings.plan))


def quantize(
    checkpoint: Checkpoint,
    settings: Settings,
    calibration: Calibration,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda matrices, weights: None,
) -> Result:
    """Writes the model to the folder `out`, with the matrices of the plan quantized.

    One block's weights are on the device at a time. Raises ConfigError or CorruptCheckpoint; after any exception,
    KeyboardInterrupt included, nothing of `out` remains.
    """
    started = time.monotonic()
    check(checkpoint, settings, out, overwrite=overwrite)
    with writing(out, 4 * len(checkpoint.pieces), settings.shard_bytes) as writer:
        run = _Run(checkpoint, settings, writer, progress)
        for piece in checkpoint.of_layer(None):
            writer.add(piece.name, checkpoint.read(piece))
        run.layers(calibration.rows)
        result = run.result(time.monotonic() - started)
        plain = [
            name
            for piece in checkpoint.pieces
            if piece.name.endswith(".weight") and len(piece.shape) == 2 and piece.matrix not in settings.plan
            for name in piece.names
        ]
        plain += ["lm_head"] if checkpoint.spec.tie_word_embeddings else []
        config = {name: value for name, value in checkpoint.config.items() if name != KEY}  # its file is copied
        if not checkpoint.spec.tie_word_embeddings and config.get("tie_word_embeddings"):
            config["tie_word_embeddings"] = False  # the output layer is another
        config["quantization_config"] = quantization_config(settings.plan, plain, settings.method.act_order)
        rows, length = calibration.rows.shape
        told = report(
            result.matrices,
            model=str(checkpoint.folder),
            **settings.about,
            calibration={"source": calibration.source, "rows": rows, "row_tokens": length},
            totals=run.totals(result),
        )
        writer.finish(config, told, checkpoint.folder, REPORT_NAME)
    return result


class _Run:
    """The state of a run between two layers."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, writer: Writer, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._settings = settings
        self._writer = writer
        self._progress = progress
        self._matrices: list[MatrixStatistics] = []
        self._weights = 0
        self._stored = 0.0

    def layers(self, rows: Tensor) -> None:
        settings, walk = self._settings, Walk(self._checkpoint, rows)
        for index in range(walk.layers):
            block = walk.block(index)
            walk.observe(block, products=settings.method.products)
            settings.method.prepare(block, settings.plan)
            for piece in block.pieces:
                self._piece(block, piece)
            walk.advance(block)
            del block

    @torch.no_grad()
    def _piece(self, block: Block, piece: Piece) -> None:
        """Rounds a tensor of a block and writes it, or writes it unchanged."""
        scheme = self._settings.plan.get(piece.matrix) if piece.matrix != piece.name else None
        if scheme is None:
            self._writer.add(piece.name, block.tensors[piece.path].to(piece.stored.dtype))
            return
        weight = block.weight(piece.path)
        inputs = block.inputs[piece.path]
        dtype = self._checkpoint.scale_dtype
        rounded = self._settings.method.round(weight, inputs, scheme, dtype)
        for ending, tensor in tensors_of(rounded, dtype).items():
            self._writer.add(f"{piece.matrix}.{ending}", tensor)
        bits = scheme.bits_per_weight(weight.shape[0], weight.shape[1], dtype)
        self._matrices.append(statistics_of(piece.matrix, block.index, weight, rounded, inputs, bits))
        self._weights += weight.numel()
        self._stored += bits * weight.numel()
        block.tensors[piece.path] = rounded.plain().to(self._checkpoint.dtype)
        self._progress(len(self._matrices), self._weights)

    def result(self, seconds: float) -> Result:
        before = sum(tensor.nbytes for tensor in self._checkpoint.stored)
        return Result(self._matrices, before, self._writer.nbytes, self._stored / self._weights, seconds)

    def totals(self, result: Result) -> dict[str, Any]:
        return {
            "weights": sum(torch.Size(piece.shape).numel() for piece in self._checkpoint.pieces),
            "quantized_weights": self._weights,
            "bits_per_weight": round(result.bits_per_weight, 4),
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "seconds": round(result.seconds, 1),
        }
