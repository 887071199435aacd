"""Activations rounded to a byte, for models whose weights have one: alone, and by the kernels that make them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvern.kernels.activation import coded_gated_activation, gated_activation
from kvern.kernels.launch import capability
from kvern.kernels.norm import coded_rms_norm, rms_norm
from kvern.kernels.quantize_rows import LARGEST, Coding, scale_products
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.dense import activated_mlps
from tests.support.kernel_list.entry import Call, Inputs, Kernel

ROWS, TIMED_ROWS = 64, 4096
OUTPUTS = 256
GROUP = 128
"""Of blocks' activations."""


def coding_of(inputs: Inputs, code: str, form: str) -> Coding:
    """A coding to these codes, with scales of "rows" or "groups", the latter in "columns" too, or "static" ones."""
    static = torch.full((1,), 0.25, device=inputs.device) if form == "static" else None
    return Coding(code, GROUP if form in ("groups", "columns") else 0, static, columns=form == "columns")


def _round(spec: ModelSpec, inputs: Inputs, code: str, form: str, rows: int, width: int) -> Call:
    """Numbers that rounding does not change, the largest in each group: what is between them rounds to either side."""
    largest, coding = LARGEST[code], coding_of(inputs, code, form)
    x = inputs.bytes(rows, width)
    x = x.view(torch.int8).float() if code == "int8" else (x & 0xBF).view(torch.float8_e4m3fn).float() * 256
    x = x.clamp(-largest, largest)
    x[:, :: coding.group or width] = largest
    x = (x / 4).to(inputs.dtype)

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        groups = -(-width // (coding.group or width))
        return x.double() * 4, torch.full((rows, groups), 0.25, dtype=torch.float64, device=x.device)

    return Call(f"{rows} x {width} {code} by {form}", partial(coding, x), reference, x.nbytes + rows * width)


def _norm(spec: ModelSpec, inputs: Inputs, code: str, form: str, rows: int, add: bool) -> Call:
    coding, width = coding_of(inputs, code, form), spec.hidden_size
    x, weight = inputs.numbers(rows, width), inputs.numbers(width, dtype=torch.float32 if spec.norm.offset else None)
    update = inputs.numbers(rows, width) if add else None

    def reference() -> list[torch.Tensor]:
        normal = rms_norm(x if update is None else x + update, weight, 1e-6)
        return [part.double() for part in coding(normal)]

    launch = partial(coded_rms_norm, x, update, weight, 1e-6, coding)
    moved = rows * width * (x.element_size() * (3 if add else 1) + 1)
    return Call(f"{rows} x {width} {code} by {form}{', added' if add else ''}", launch, reference, moved)


def _activate(spec: ModelSpec, inputs: Inputs, code: str, form: str, rows: int, width: int, activation: str) -> Call:
    coding, x = coding_of(inputs, code, form), inputs.numbers(rows, 2 * width)

    def reference() -> list[torch.Tensor]:
        return [part.double() for part in coding(gated_activation(x, activation))]

    launch = partial(coded_gated_activation, x, activation, coding)
    moved = rows * width * (2 * x.element_size() + 1)
    return Call(f"{rows} x {width} {code} by {form}", launch, reference, moved)


def _forms(inputs: Inputs, *parts: str) -> dict[tuple[str, str, int], None]:
    """Codes, scales, and widths: of layers that begin with one of the parts, or of all."""
    card = capability(inputs.device)
    codes = ("int8",) if 0 < card < 89 else ("int8", "e4m3")
    kinds = [kind for kind in inputs.packed if kind.code in codes and kind.activations]
    forms = {
        (kind.code, kind.activations, kind.inputs): None for kind in kinds if not parts or kind.part in parts
    }  # fmt: skip
    return forms | {(code, "columns", width): None for code, form, width in forms if form == "groups"}


def _round_launched(spec: ModelSpec, inputs: Inputs, rows: int = ROWS) -> Iterator[tuple[Any, ...]]:
    yield from ((code, form, rows, width) for code, form, width in _forms(inputs))


def codes_of_norms(inputs: Inputs) -> dict[tuple[str, str], None]:
    """The codes and scales of what norms are rounded to."""
    return {(code, form): None for code, form, _ in _forms(inputs, "q_proj", "gate_proj")}


def _norm_launched(spec: ModelSpec, inputs: Inputs, rows: int = ROWS) -> Iterator[tuple[Any, ...]]:
    if spec.norm.kind == "rms":
        for code, form in codes_of_norms(inputs):
            yield from ((code, form, rows, add) for add in (False, True))


def _activate_launched(spec: ModelSpec, inputs: Inputs, rows: int = ROWS) -> Iterator[tuple[Any, ...]]:
    for mlp in activated_mlps(spec):
        for code, form, width in _forms(inputs, "down_proj"):
            if width == mlp.width:
                yield code, form, rows, width, mlp.activation


def _scale(spec: ModelSpec, inputs: Inputs, rows: int, outputs: int) -> Call:
    products = inputs.bytes(rows, outputs).int() * 300
    by_row, by_output = (inputs.numbers(size, 1, dtype=torch.float32) for size in (rows, outputs))
    launch = partial(scale_products, products, by_row, by_output, None, inputs.dtype)
    moved = rows * outputs * (4 + inputs.dtype.itemsize)
    return Call(f"{rows} x {outputs}", launch, lambda: products.double() * by_row * by_output.T, moved)


def _scale_launched(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if any(code == "int8" for code, *_ in _forms(inputs)):
        yield ROWS, OUTPUTS


def _scale_timed(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    outputs = dict.fromkeys(kind.outputs for kind in inputs.packed if kind.code == "int8" and kind.part != "lm_head")
    yield from ((TIMED_ROWS, size) for size in outputs)


KERNELS = (
    Kernel("round activations", "quantized", _round, _round_launched, partial(_round_launched, rows=TIMED_ROWS)),
    Kernel("RMSNorm to codes", "quantized", _norm, _norm_launched, partial(_norm_launched, rows=TIMED_ROWS)),
    Kernel(
        "gated activation to codes", "quantized", _activate, _activate_launched,
        partial(_activate_launched, rows=TIMED_ROWS),
    ),
    Kernel("scale integer products", "quantized", _scale, _scale_launched, _scale_timed),
)  # fmt: skip
