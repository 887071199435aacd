"""The loss of each precision of each part of a model, measured at the model's outputs.

Each unit, the matrices that multiply the same rows, is stored in each precision alone; its loss is the mean
Kullback-Leibler divergence of the next-token distribution from the plain model's. All these variants go through the
layers side by side: a variant begins with the plain model's hidden states at its own layer, and each layer is read
once. So the memory is that of one layer and the variants' hidden states, and a variant costs half a forward pass on
average.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvern.errors import ConfigError
from kvern.formats.scaled import Rounding, rounded
from kvern.layers.linear import Linear
from kvern.models.decoder import Decoder
from kvern.quantize.blocks import Block, Walk
from kvern.quantize.checkpoint import WEIGHT, Checkpoint, Piece
from kvern.quantize.method import RoundToNearest
from kvern.quantize.mixed_report import PLAIN, Choice, Unit
from kvern.quantize.scheme import FP8, GROUPS, INT8, Scheme, int4
from kvern.quantize.watched import WatchedExperts, WatchedMethod

SCHEMES = (FP8, INT8, *(int4(group) for group in GROUPS))
"""The precisions that are measured, and of which mixtures consist besides plain weights."""
HIDDEN_BYTES, GPU_SHARE = 4 << 30, 4
"""Limits of all variants' hidden states: bytes, and a part of a GPU's free memory, one of so many. A single precision
on a GPU has the second limit alone."""
UNITS_A_LAYER = 4
"""The usual number of units in a layer."""
MOST_TOKENS, LEAST_TOKENS = 4096, 256
HEAD_ROWS = 512
"""The number of tokens whose distributions are compared at a time."""

Key = TypeVar("Key", bound=Hashable)
Progress = Callable[[int, int], None]
"""A callback with the number of finished layers and of all layers."""


@dataclass(frozen=True)
class Group:
    """The matrices of a unit, the layer that multiplies by them, and the precisions that all of them allow."""

    name: str
    owner: WatchedMethod | WatchedExperts
    pieces: tuple[Piece, ...]
    schemes: tuple[Scheme, ...]

    @property
    def parameters(self) -> int:
        return sum(piece.shape[0] * piece.shape[1] for piece in self.pieces)

    def bits(self, scheme: Scheme, scale_dtype: torch.dtype) -> int:
        """The bits of the matrices, scales included."""
        return 8 * sum(scheme.stored_bytes(*_matrix(piece), scale_dtype) for piece in self.pieces)


def groups_of(block: Block, allowed: Sequence[Scheme] = SCHEMES) -> Iterator[Group]:
    """The units of a layer: each linear layer whose weights may be quantized, and all experts together; with those of
    the `allowed` precisions that fit."""
    pieces = {piece.path: piece for piece in block.pieces if piece.matrix in block.checkpoint.matrices}
    owner: WatchedMethod | WatchedExperts
    for name, module in block.module.named_modules():
        if isinstance(module, Linear) and isinstance(module.method, WatchedMethod):
            owner, names = module.method, [*module.outputs, *([module.fused] if module.fused else [])]
            found = [pieces.get(f"{module.path}.{part}{WEIGHT}") for part in names]
        elif isinstance(module, WatchedExperts):
            owner = module
            found = [piece for path, piece in pieces.items() if path.startswith(f"{module.path}.experts.")]
        else:
            continue
        members = tuple(piece for piece in found if piece is not None)
        if members:
            schemes = tuple(item for item in allowed if all(_fits(item, piece) for piece in members))
            yield Group(f"{block.prefix}.{name}", owner, members, schemes)


def _fits(scheme: Scheme, piece: Piece) -> bool:
    return not scheme.group or _matrix(piece)[1] % scheme.group == 0


def _matrix(piece: Piece) -> tuple[int, int]:
    outputs, inputs = piece.shape
    return outputs, inputs


def tokens_for(checkpoint: Checkpoint, allowed: Sequence[Scheme] = SCHEMES, memory: int | None = None) -> int:
    """The number of tokens for the measurement of the `allowed` precisions, limited by the memory of the variants.

    `memory`: bytes of a GPU that may be used, if its free memory is not the limit.
    """
    spec = checkpoint.spec
    variants = len(spec.layers) * UNITS_A_LAYER * len(allowed)
    each = spec.hidden_size * checkpoint.dtype.itemsize
    limit = HIDDEN_BYTES
    if checkpoint.device.type == "cuda":
        free = torch.cuda.mem_get_info(checkpoint.device)[0]
        room = min(free, memory or free) // GPU_SHARE
        limit = room if len(allowed) == 1 else min(limit, room)  # more tokens of many precisions would take minutes
    return max(LEAST_TOKENS, min(MOST_TOKENS, limit // (variants * each)))


def least_bits(checkpoint: Checkpoint) -> float:
    """Bits per weight of the model with each matrix in the smallest precision that it can have.

    Raises ConfigError if none may be quantized.
    """
    pieces = checkpoint.matrices.values()
    if not pieces:
        raise ConfigError("every matrix is left plain: nothing is to be quantized")
    stored = sum(
        min(scheme.stored_bytes(*_matrix(piece), checkpoint.scale_dtype) for scheme in SCHEMES if _fits(scheme, piece))
        for piece in pieces
    )
    return 8 * stored / sum(math.prod(_matrix(piece)) for piece in pieces)


def operations(checkpoint: Checkpoint, tokens: int) -> float:
    """The approximate number of floating point operations of a measurement: half a pass for each variant."""
    weights = sum(piece.shape[0] * piece.shape[1] for piece in checkpoint.matrices.values())
    variants = len(checkpoint.spec.layers) * UNITS_A_LAYER * len(SCHEMES)
    return 2.0 * weights * tokens * (1 + variants / 2)


class Variants:
    """The hidden states `[N, L, hidden]` of the model with one unit in one precision, by the two's names."""

    def __init__(self, walk: Walk, allowed: Sequence[Scheme]) -> None:
        self.walk = walk
        self._allowed = allowed
        self.hidden: dict[tuple[str, str], Tensor] = {}
        self.groups: list[Group] = []
        self._rounding = RoundToNearest()

    def through(self, block: Block) -> None:
        """Runs all variants through a layer, and starts those of its own units."""
        self.walk.observe(block)
        for key, hidden in self.hidden.items():
            self.hidden[key] = self.walk.through(block, hidden)
        groups = list(groups_of(block, self._allowed))
        self.groups += groups
        plain = dict(block.tensors)
        for group in groups:
            for scheme in group.schemes:
                for piece in group.pieces:
                    block.tensors[piece.path] = self._rounded(block, piece, scheme)
                block.load()
                how = Rounding("int8" if scheme.kind == "int" else "e4m3")
                group.owner.rounding = partial(rounded, how=how) if scheme.activations else None
                self.hidden[group.name, scheme.name] = self.walk.through(block, self.walk.hidden)
                group.owner.rounding = None
                block.tensors.update(plain)
        self.walk.advance(block)

    def _rounded(self, block: Block, piece: Piece, scheme: Scheme) -> Tensor:
        checkpoint, inputs = block.checkpoint, block.inputs[piece.path]
        made = self._rounding.round(block.weight(piece.path), inputs, scheme, checkpoint.scale_dtype)
        return made.plain().to(checkpoint.dtype)


def measure(walk: Walk, progress: Progress, allowed: Sequence[Scheme] = SCHEMES) -> list[Unit]:
    """The units of the model with the loss of each `allowed` precision. `walk` is before the first layer."""
    checkpoint, variants = walk.checkpoint, Variants(walk, allowed)
    for index in range(walk.layers):
        progress(index, walk.layers)
        variants.through(walk.block(index))
    progress(walk.layers, walk.layers)
    losses = divergences(walk.ends(), walk.hidden, variants.hidden)
    return [_unit(group, losses, checkpoint) for group in variants.groups]


def _unit(group: Group, losses: Mapping[tuple[str, str], float], checkpoint: Checkpoint) -> Unit:
    choices = {PLAIN: Choice(8 * checkpoint.dtype.itemsize * group.parameters, 0.0)}
    for scheme in group.schemes:
        bits = group.bits(scheme, checkpoint.scale_dtype)
        choices[scheme.name] = Choice(bits, losses[group.name, scheme.name])
    return Unit(group.name, tuple(piece.matrix for piece in group.pieces), group.parameters, choices, PLAIN)


@torch.no_grad()
def divergences(ends: Decoder, plain: Tensor, others: Mapping[Key, Tensor]) -> dict[Key, float]:
    """The mean divergence of other next-token distributions from the plain one, in nats per token.

    All are hidden states `[N, L, hidden]` after the last layer.
    """
    sums = dict.fromkeys(others, 0.0)
    flat = {key: hidden.flatten(0, 1) for key, hidden in others.items()}
    for first in range(0, plain.shape[0] * plain.shape[1], HEAD_ROWS):
        rows = slice(first, first + HEAD_ROWS)
        expected = log_probabilities(ends, plain.flatten(0, 1)[rows])
        probabilities = expected.exp()
        for key, hidden in flat.items():
            found = log_probabilities(ends, hidden[rows])
            sums[key] += float((probabilities * (expected - found)).sum(dtype=torch.float64))
    return {key: max(0.0, total / (plain.shape[0] * plain.shape[1])) for key, total in sums.items()}


def log_probabilities(ends: Decoder, hidden: Tensor) -> Tensor:
    """Log-probabilities, float32 `[T, vocab]`, of hidden states `[T, hidden]` after the last layer."""
    return exact_scores(ends, ends.norm(hidden)).log_softmax(-1)


def exact_scores(model: Decoder, normal: Tensor) -> Tensor:
    """Scores, float32 `[T, vocab]`, of normalized states `[T, hidden]`.

    Scores in 16 bits would jump from one number to the next for any change: 128 units then lose 0.005 nats by that
    alone.
    """
    if normal.dtype == torch.float32:
        return model.logits(normal)
    head = model.lm_head
    weight = head.method.dequantize().t()
    scores = torch.mm(normal, weight, out_dtype=torch.float32) if normal.is_cuda else normal.float() @ weight.float()
    return model.scaled(scores if head.bias is None else scores + head.bias)
