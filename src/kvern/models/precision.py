"""The precision and memory of a model by its modules, without any weight, and the ranges of loaded weights."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvern.formats.gguf.header import BY_NAME
from kvern.formats.method import Packed, QuantizedMethod
from kvern.layers.experts import Experts
from kvern.layers.linear import Weighted
from kvern.layers.linear_method import LinearMethod
from kvern.layers.loadable import Loadable
from kvern.layers.unquantized import UnquantizedMethod
from kvern.models.decoder import Decoder

KINDS = {
    "embed_tokens": "embeddings",
    "per_layer.table": "embeddings of each layer",
    "per_layer.projection": "inputs of each layer",
    "streams.entering": "residual streams",
    "streams.leaving": "residual streams",
    "altup.router": "residual streams",
    "altup.prediction": "residual streams",
    "altup.correction": "residual streams",
    "laurel.left": "product beside attention",
    "laurel.right": "product beside attention",
    "per_layer_input_gate": "inputs of each layer",
    "per_layer_projection": "inputs of each layer",
    "self_attn.qkv_proj": "attention q, k, v",
    "self_attn.in_proj": "attention queries, latents",
    "self_attn.q_b_proj": "attention queries",
    "self_attn.indexer.wq_b": "indexer",
    "self_attn.indexer.wk": "indexer",
    "self_attn.indexer.weights_proj": "indexer",
    "self_attn.expansion": "attention keys, values",
    "self_attn.o_proj": "attention out",
    "linear_attn.in_proj": "delta net in",
    "linear_attn.out_proj": "delta net out",
    "mamba.in_proj": "Mamba in",
    "mamba.out_proj": "Mamba out",
    "conv.in_proj": "short convolution in",
    "conv.out_proj": "short convolution out",
    "mlp.gate_up_proj": "MLP gate, up",
    "mlp.up_proj": "MLP up",
    "mlp.down_proj": "MLP down",
    "mlp.experts": "experts",
    "experts.experts": "experts",
    "mlp.gate": "routers",
    "experts.gate": "routers",
    "mlp.shared_expert.gate_up_proj": "shared expert gate, up",
    "mlp.shared_expert.down_proj": "shared expert down",
    "lm_head": "output layer",
}
"""Descriptions of matrices by their module paths."""
SMALL = "norms, biases"


@dataclass(frozen=True)
class Share:
    """The parameters of one kind of layer that are stored in one format: `nbytes` with scales and all."""

    kind: str
    format: str
    matrices: int
    parameters: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.nbytes / max(self.parameters, 1)


def shares(decoder: Decoder) -> list[Share]:
    """The stored form of the model's layers, in order; a tied output layer counts as embeddings."""
    found: dict[tuple[str, str], list[int]] = {}
    seen: set[int] = set()
    for path, module in decoder.named_modules():
        if isinstance(module, Loadable):
            for kind, name, parameters, nbytes in _of_module(path, module, seen):
                count = found.setdefault((kind, name), [0, 0, 0])
                count[0] += 1
                count[1] += parameters
                count[2] += nbytes
    items = [Share(*key, *count) for key, count in found.items()]
    kinds = list(dict.fromkeys(share.kind for share in items))
    return sorted(items, key=lambda share: (share.kind == SMALL, kinds.index(share.kind)))


def _of_module(path: str, module: Loadable, seen: set[int]) -> Iterator[tuple[str, str, int, int]]:
    """(kind, format, parameters, bytes) of the matrices of a module that are not among the `seen`, and of the rest."""
    place = re.sub(r"^layers\.\d+\.|\.\d+$", "", path)
    kind = KINDS.get(place, place)
    for method in methods_of(module):
        if id(method) not in seen:
            seen.add(id(method))
            yield kind, format_of(method), method.shape.outputs * method.shape.inputs, _nbytes(method)
            seen.update(map(id, method.parameters()))
    for parameter in module.parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            plain = kind if isinstance(module, Experts) else SMALL
            yield plain, _dtype_name(parameter.dtype), parameter.numel(), parameter.nbytes


def methods_of(module: nn.Module) -> Iterator[LinearMethod]:
    """The matrices within a module; parts of one product that are stored in different ways are separate."""
    if isinstance(module, Weighted):
        yield from module.method.methods()
    else:
        inner = (item for item in module.modules() if isinstance(item, LinearMethod))
        yield from (method for method in inner if tuple(method.methods()) == (method,))


def format_of(method: LinearMethod) -> str:
    """The name of a matrix' format: that of its numbers where it is plain."""
    return _dtype_name(method.shape.dtype) if isinstance(method, UnquantizedMethod) else method.name


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


OUTERMOST = {"e4m3": 448, "int8": 127}
"""The largest code of codes that have a sign."""


@dataclass(frozen=True)
class WeightStatistics:
    """One matrix, as products read it.

    `least`, `largest` and `deviation` are of its weights; the scales' range and the `saturated` share of codes that are
    the smallest or largest there are, which clipped weights become, are None where a format tells none apart. In groups
    that are scaled to their largest weight, one code of each is saturated without harm.
    """

    layer: str
    format: str
    outputs: int
    inputs: int
    least: float
    largest: float
    deviation: float
    smallest_scale: float | None
    largest_scale: float | None
    saturated: float | None


@torch.no_grad()
def weight_statistics(decoder: Decoder) -> Iterator[WeightStatistics]:
    """Statistics of all matrices, in the model's order; one at a time is decoded."""
    seen: set[int] = set()
    for path, module in decoder.named_modules():
        if isinstance(module, Loadable):
            methods = [method for method in methods_of(module) if id(method) not in seen]
            seen.update(map(id, methods))
            for number, method in enumerate(methods):
                yield _of(path if len(methods) == 1 else f"{path} {number}", method)


def _of(layer: str, method: LinearMethod) -> WeightStatistics:
    plain = method.dequantize().float()
    packed = method.packed() if isinstance(method, QuantizedMethod) else None
    scale = None if packed is None or packed.scale is None or packed.code in BY_NAME else _scales(packed)
    return WeightStatistics(
        layer=layer,
        format=format_of(method),
        outputs=method.shape.outputs,
        inputs=method.shape.inputs,
        least=float(plain.min()),
        largest=float(plain.max()),
        deviation=float(plain.std()),
        smallest_scale=None if scale is None else float(scale.min()),
        largest_scale=None if scale is None else float(scale.max()),
        saturated=None if packed is None else _saturated(packed),
    )


def _scales(packed: Packed) -> Tensor:
    """The scales in float32; unsigned one-byte scales are powers of two."""
    assert packed.scale is not None
    return torch.exp2(packed.scale.float() - 127) if packed.scale.dtype == torch.uint8 else packed.scale.float()


def _saturated(packed: Packed) -> float | None:
    codes = packed.codes
    if packed.code in OUTERMOST:
        return float((codes.float().abs() >= OUTERMOST[packed.code]).float().mean())
    if packed.code == "int4":
        halves = torch.stack([codes & 15, codes >> 4])
        return float(((halves == 0) | (halves == 15)).float().mean())
    return None
