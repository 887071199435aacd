"""AWQ: large inputs are scaled down, and the weights that multiply them scaled up, before rounding.

A weight's error is multiplied by its input. Dividing an input by s and multiplying its column of weights by s changes
no output, but gives the weights of large inputs relatively finer steps. The tensor that makes the inputs absorbs the
division: the norm before, or the rows of another matrix.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration".
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.quantize.blocks import Block
from kvern.quantize.checkpoint import WEIGHT
from kvern.quantize.method import Plan, RoundToNearest
from kvern.quantize.scheme import Scheme, fit
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import MoeSpec

POWERS = tuple(step / 20 for step in range(21))
"""Exponents of the inputs' mean sizes that are tried as scales."""

SEARCH_ROWS, SEARCH_OUTPUTS = 256, 1024
"""The number of input rows and matrix outputs with which scales are tried."""

_READS_NORM = re.compile(r"\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj|q_a_proj|kv_a_proj_with_mqa)\.weight$")
_BEHIND_LATENT = re.compile(r"\.mlp\.(experts\.|fc2_latent_proj\.)")
_MLP_INPUT = re.compile(r"\.mlp\.(?!.*down_proj).*\.weight$")


class Fold(NamedTuple):
    """The tensors that make some inputs, and the matrices that read them.

    `makers`: (tensor, its rows) to divide; `readers`: matrices whose columns are multiplied. A norm multiplies by its
    weights plus `offset`.
    """

    makers: list[tuple[str, slice]]
    readers: list[str]
    offset: float = 0.0


class Awq(RoundToNearest):
    def prepare(self, block: Block, plan: Plan) -> None:
        names = {piece.path: plan[piece.matrix] for piece in block.pieces if piece.matrix in plan}
        for fold in folds(block):
            rounded = {path: names[path] for path in fold.readers if path in names and names[path].bits < 8}
            if rounded:
                scale = self._search(block, fold, rounded)
                if scale is not None:
                    apply(block, fold, scale)

    def _search(self, block: Block, fold: Fold, schemes: dict[str, Scheme]) -> Tensor | None:
        """The scales `[inputs]` with the least error of sampled outputs; None: scales of one."""
        inputs = list({id(item): item for item in (block.inputs[path] for path in schemes)}.values())
        count = sum(item.count for item in inputs)
        if not count:
            return None
        means = torch.stack([item.absolute for item in inputs]).sum(0) / count
        means.clamp_(min=1e-8)
        samples = {id(item): few(item.rows, SEARCH_ROWS) for item in inputs}
        weights = {path: few(block.weight(path), SEARCH_OUTPUTS) for path in schemes}
        best, least = None, float("inf")
        for power in POWERS:
            scale = means.pow(power)
            scale = scale / (scale.max() * scale.min()).sqrt()
            errors = [
                output_error(
                    weights[path], samples[id(block.inputs[path])], scale, scheme, block.checkpoint.scale_dtype
                )
                for path, scheme in schemes.items()
            ]
            if (error := sum(errors)) < least:
                best, least = (scale if power else None), error
        return best


def few(rows: Tensor, most: int) -> Tensor:
    """At most `most` of the rows, evenly spread."""
    return rows[:: max(1, -(-len(rows) // most))]


def output_error(weight: Tensor, rows: Tensor, scale: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> float:
    """The squared error of the outputs, relative to them, if the columns are rounded times `scale`."""
    scaled = weight * scale
    grid = fit(scaled, scheme, scale_dtype, rows.div(scale).square().mean(0) if len(rows) else None)
    error = (grid.decode(grid.encode(scaled)) - scaled) / scale
    size = (rows @ weight.t()).square().sum().clamp(min=1e-30)
    return float((rows @ error.t()).square().sum() / size)


def apply(block: Block, fold: Fold, scale: Tensor) -> None:
    """Divides the makers of inputs by `scale [inputs]`, and multiplies the columns of their readers by it.

    A norm's weights are rounded first, and columns are multiplied by the factor that its rounded weights divide by.
    """
    norm = block.tensors[fold.makers[0][0]]
    if norm.dim() == 1 and fold.makers[0][0].endswith(WEIGHT):
        old = norm.to(scale) + fold.offset
        new = (old / scale - fold.offset).to(block.checkpoint.dtype).float() + fold.offset
        usable = (new != 0) & (old != 0)
        scale = torch.where(usable, old / torch.where(usable, new, 1.0), 1.0)
    for path, rows in fold.makers:
        tensor = block.tensors[path].to(scale.device, torch.float32, copy=True)
        part, offset = tensor[rows], fold.offset if path.endswith(WEIGHT) else 0.0
        tensor[rows] = (part + offset) / (scale if part.dim() == 1 else scale[:, None]) - offset
        block.tensors[path] = tensor
    for path in fold.readers:
        block.tensors[path] = block.weight(path) * scale
    for inputs in {id(item): item for path in fold.readers if (item := block.inputs.get(path))}.values():
        inputs.divide(scale)


def folds(block: Block) -> Iterator[Fold]:
    """The folds that the layers of a model allow."""
    spec, layer = block.checkpoint.spec, block.checkpoint.spec.layers[block.index]
    tensors = {path: tensor for path, tensor in block.tensors.items() if tensor.dim() == 2}
    attends, alone = any(isinstance(mixer, AttentionSpec) for mixer in layer.mixers), len(layer.mixers) == 1
    attention = [path for path in tensors if alone and _READS_NORM.search(path)]  # else a state reads the norm, too
    mlp = [path for path in tensors if _MLP_INPUT.search(path)]
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.latent:
        mlp = [path for path in mlp if not _BEHIND_LATENT.search(path)]
    together = spec.block.parallel and "mlp_in" not in spec.block.norms
    for placement, readers in (("attention_in", attention + (mlp if together else [])), ("mlp_in", mlp)):
        name = f"{block.prefix}.{spec.block.norms.get(placement)}"  # type: ignore[call-overload]
        if readers and f"{name}{WEIGHT}" in block.tensors:
            makers = [(path, slice(None)) for path in (f"{name}{WEIGHT}", f"{name}.bias") if path in block.tensors]
            yield Fold(makers, readers, offset=spec.norm.offset)
    if f"{block.prefix}.self_attn.q_b_proj{WEIGHT}" in tensors:
        yield Fold(
            [(f"{block.prefix}.self_attn.q_a_layernorm{WEIGHT}", slice(None))],
            [f"{block.prefix}.self_attn.q_b_proj{WEIGHT}"],
        )
    normal = spec.query_key_norm is not None and spec.query_key_norm.values
    if attends and not normal and layer.attention.heads == layer.attention.kv_heads:  # else one value is several inputs
        attended = layer.attention.heads * layer.attention.head_dim
        values = rows_of(block, f"{block.prefix}.self_attn", "v_proj", "qkv_proj", slice(2 * attended, 3 * attended))
        if values:
            yield Fold(values, [f"{block.prefix}.self_attn.o_proj{WEIGHT}"])
    for path in [path for path in tensors if path.endswith(f".down_proj{WEIGHT}")]:
        gated = layer.mlp is not None and layer.mlp.gated
        parent, width = path.removesuffix(f".down_proj{WEIGHT}"), tensors[path].shape[1]
        if gated and (makers := rows_of(block, parent, "up_proj", "gate_up_proj", slice(width, 2 * width))):
            yield Fold(makers, [path])


def rows_of(block: Block, parent: str, part: str, fused: str, within: slice) -> list[tuple[str, slice]]:
    """The tensors that hold a part's weight and bias, and its rows there; none if the checkpoint reorders its rows."""
    reordered = {piece.path for piece in block.pieces if piece.reordered}
    for name, rows in ((part, slice(None)), (fused, within)):
        found = [path for path in (f"{parent}.{name}{WEIGHT}", f"{parent}.{name}.bias") if path in block.tensors]
        if found and not reordered & set(found):
            return [(path, rows) for path in found]
    return []
