"""Activations rounded to a byte, for models whose weights have one."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernels.launch import capability
from kvern.kernels.quantize_rows import LARGEST, quantize_rows, scale_products
from kvern.model_spec import ModelSpec

ROWS, TIMED_ROWS = 64, 4096
OUTPUTS = 256
GROUP = 128
"""Of blocks' activations."""


def _round(spec: ModelSpec, inputs: Inputs, code: str, group: int, rows: int, width: int) -> Call:
    """Numbers that rounding does not change, the largest in each group: what is between them rounds to either side."""
    largest = LARGEST[code]
    x = inputs.bytes(rows, width)
    x = x.view(torch.int8).float() if code == "int8" else (x & 0xBF).view(torch.float8_e4m3fn).float() * 256
    x = x.clamp(-largest, largest)
    x[:, :: group or width] = largest
    x = (x / 4).to(inputs.dtype)

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        groups = -(-width // (group or width))
        return x.double() * 4, torch.full((rows, groups), 0.25, dtype=torch.float64, device=x.device)

    sizes = f"{rows} x {width} {code}" + (f" by {group}" if group else "")
    return Call(sizes, partial(quantize_rows, x, code, group), reference, x.nbytes + rows * width)


def _forms(inputs: Inputs) -> dict[tuple[str, int, int], None]:
    """Codes, groups, and widths."""
    card = capability(inputs.device)
    codes = ("int8",) if 0 < card < 89 else ("int8", "e4m3")
    kinds = (kind for kind in inputs.packed if kind.code in codes)
    return dict.fromkeys((kind.code, GROUP if kind.group == GROUP else 0, kind.inputs) for kind in kinds)


def _round_launched(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    yield from ((code, group, ROWS, width) for code, group, width in _forms(inputs))


def _round_timed(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    yield from ((code, group, TIMED_ROWS, width) for code, group, width in _forms(inputs))


def _scale(spec: ModelSpec, inputs: Inputs, rows: int, outputs: int) -> Call:
    products = inputs.bytes(rows, outputs).int() * 300
    by_row, by_output = (inputs.numbers(size, 1, dtype=torch.float32) for size in (rows, outputs))
    launch = partial(scale_products, products, by_row, by_output, None, inputs.dtype)
    moved = rows * outputs * (4 + inputs.dtype.itemsize)
    return Call(f"{rows} x {outputs}", launch, lambda: products.double() * by_row * by_output.T, moved)


def _scale_launched(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if any(code == "int8" for code, _, _ in _forms(inputs)):
        yield ROWS, OUTPUTS


def _scale_timed(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    outputs = dict.fromkeys(kind.outputs for kind in inputs.packed if kind.code == "int8" and kind.part != "lm_head")
    yield from ((TIMED_ROWS, size) for size in outputs)


KERNELS = (
    Kernel("round activations", "quantized", _round, _round_launched, _round_timed),
    Kernel("scale integer products", "quantized", _scale, _scale_launched, _scale_timed),
)
