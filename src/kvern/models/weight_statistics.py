"""Ranges of a loaded model's weights, matrix by matrix, as a measure of how well codes and scales are used."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.formats.gguf.types import BY_NAME
from kvern.formats.method import Packed, QuantizedMethod
from kvern.layers.linear_method import LinearMethod
from kvern.layers.loadable import Loadable
from kvern.models.decoder import Decoder
from kvern.models.precision import format_of, methods_of

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
