"""Weights of one byte, FP8 (e4m3) or INT8, times float32 scales: of the tensor, of rows, of groups, or of blocks.

    weight [outputs, inputs] of codes          scale                                       zero (int8 alone)
    TENSOR   one number for a checkpoint's tensor; here its rows have it each, so that parts can be joined
    ROWS     [outputs]                         one for each output
    groups   [outputs, inputs / group]         a row's runs of `group` inputs              of the same shape
    blocks   [outputs / 128, inputs / 128]     the last of either axis may be partial

A plain number is (code - zero) * scale.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.cpu.packed import STEP, Int8Product, int8_rows, side_by_side
from kvern.formats.method import CpuProduct, Packed, QuantizedMethod
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import (
    INPUTS,
    OUTPUTS,
    RANDOM_SPREAD,
    Axis,
    LinearMethod,
    LinearShape,
    Part,
    Product,
    TensorLayout,
    copy_part,
)
from kvern.spec.model import MoeSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import Coding


Code = Literal["e4m3", "int8"]

DTYPES: dict[Code, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST: dict[Code, float] = {"e4m3": 448.0, "int8": 127.0}
SMALLEST_SCALE = 1e-12
"""The scale of rows of zeros."""


class Rounding(NamedTuple):
    """The rounding of activations, with a scale for each token or each `group` inputs of one.

    `limit`: a scale is at most that of this number, so that larger numbers are clipped. Asymmetric int8 has a zero
    point for each scale.
    """

    code: Code
    group: int = 0
    limit: float | None = None
    symmetric: bool = True


def scaled(x: Tensor, code: Code, scale: Tensor) -> Tensor:
    """The codes nearest to `x / scale`; numbers out of range get the largest code."""
    largest = LARGEST[code]
    codes = (x / scale).clamp(-largest, largest)
    return (codes.round() if code == "int8" else codes).to(DTYPES[code])


def quantized_rows(x: Tensor, code: Code, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """Rows `x [..., N]` as codes, and a float32 scale `[..., 1]` for each: that of its largest number."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.clamp(SMALLEST_SCALE * LARGEST[code], limit) / LARGEST[code]
    return scaled(x, code, scale), scale


def rounded(x: Tensor, how: Rounding, static: Tensor | None = None) -> Tensor:
    """Rounds `x [T, I]` to the values of its codes, in its own dtype; `static [1]`: a known scale."""
    if static is not None:
        return (scaled(x.float(), how.code, static).float() * static).to(x.dtype)
    width = x.shape[-1]
    group = how.group or width
    grouped = F.pad(x, (0, -width % group)).view(len(x), -1, group)
    if how.symmetric:
        codes, scale = quantized_rows(grouped, how.code, how.limit)
        plain = codes.float() * scale
    else:
        plain = _rounded_asymmetric(grouped.float())
    return plain.flatten(-2)[..., :width].to(x.dtype)


def _rounded_asymmetric(x: Tensor) -> Tensor:
    """Rounds to 256 values from the smallest number, or zero, to the largest."""
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 255).clamp_min(SMALLEST_SCALE)
    zero = (-128 - low / scale).round().clamp(-128, 127)
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


CODES_STEP = 128
"""Inputs that are multiplied as codes before scales are: no scale is of fewer."""
RANDOM_ACTIVATION = 8.0
"""The largest activation that random weights expect."""


class Block(NamedTuple):
    """A block of outputs and inputs that share a scale; 0: all of them."""

    outputs: int
    inputs: int


TENSOR, ROWS = Block(0, 0), Block(1, 0)


@dataclass(frozen=True)
class Scaled(LinearFormat):
    """The form of codes and scales in a checkpoint. `scale_name` is the end of the scales' names.

    Codes are multiplied by stored scales times `factor`.

    activations  the rounding of activations, None: none; `static`: by scales `input_scale` of the checkpoint
    zeros        zero points `weight_zero_point` exist, or may exist if they are optional
    granule      outputs that share a scale here, if parts do not begin at blocks
    """

    code: Code
    block: Block = ROWS
    activations: Rounding | None = None
    static: bool = False
    scale_name: str = "weight_scale"
    factor: float = 1.0
    zeros: bool = False
    zeros_needed: bool = True
    granule: int = 0

    @property
    def name(self) -> str:
        """For people, and in keys of measurements: "fp8 by row, W8A8", "int8 by 1 x 32", "fp8 by 128 x 128"."""
        rows, inputs = self.granule or self.block.outputs, self.block.inputs
        block = f"{rows} x {inputs}" if inputs else "row" if rows else "tensor"
        name = f"{'fp8' if self.code == 'e4m3' else self.code} by {block}"
        if self.activations is None:
            return name
        group = self.activations.group
        by = f" by {group}" if group and group != inputs else ""
        return f"{name}, W8A8{by}{' static' if self.static else ''}"

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return ScaledMethod(shape, self)

    def of_experts(self, hidden_size: int, spec: MoeSpec) -> LinearFormat:
        """A format in which gate, up and experts may begin within a block, if their width is no multiple of one."""
        rows = max(self.block.outputs, 1)
        granule = math.gcd(rows, spec.width, hidden_size)
        return self if granule == rows else replace(self, granule=granule)


class ScaledMethod(QuantizedMethod):
    """`codes [outputs, inputs]` times `scale [outputs / rows, inputs / group]` float32.

    `input_scale [1]` float32, of activations that are rounded by a scale of the checkpoint's: the largest of its parts.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    input_scale: Tensor

    def __init__(self, shape: LinearShape, form: Scaled) -> None:
        self.form = form
        self._library_products: Mapping[str, Product] | None = None
        self.name = form.name
        super().__init__(shape)
        if not form.zeros:
            self.zero = None
        if form.static:
            self.input_scale.data.zero_()
        if self.zero is not None:
            self.zero.data.zero_()

    def layouts(self) -> Mapping[str, TensorLayout]:
        form, (outputs, inputs) = self.form, self.form.block
        axes: list[Axis] = [Axis("outputs", outputs)] if outputs else []
        axes += [Axis("inputs", inputs)] if inputs else []
        found = {
            "weight": TensorLayout(DTYPES[form.code], (OUTPUTS, INPUTS)),
            form.scale_name: TensorLayout(torch.float32, tuple(axes)),
        }
        if form.zeros:
            found["weight_zero_point"] = TensorLayout(torch.int8, tuple(axes), form.zeros_needed)
        if form.static:
            found["input_scale"] = TensorLayout(torch.float32, (), common=True)
        return found

    def storage(self) -> Mapping[str, TensorLayout]:
        form, inputs = self.form, self.form.block.inputs
        axes = (Axis("outputs", self.rows_per_scale), Axis("inputs", inputs) if inputs else Axis("others", 1))
        found = {
            "codes": TensorLayout(DTYPES[form.code], (OUTPUTS, INPUTS)),
            "scale": TensorLayout(torch.float32, axes),
        }
        if form.zeros:
            found["zero"] = TensorLayout(torch.int8, axes)
        if form.static:
            found["input_scale"] = TensorLayout(torch.float32, (Axis("others", 1),))
        return found

    @property
    def rows_per_scale(self) -> int:
        """The number of stored outputs that share a scale."""
        return self.form.granule or self.form.block.outputs or 1

    @property
    def _group(self) -> int:
        return min(self.form.block.inputs or self.shape.inputs, self.shape.inputs)

    def cuts(self) -> tuple[int, int]:
        how = self.form.activations
        together = math.lcm(max(self.form.block.inputs, 1), how.group if how is not None and how.group else 1)
        return self.rows_per_scale, together

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind == "weight":
            copy_part(self.storage()["codes"], self.codes, tensor, part, first_row)
        elif kind == "input_scale":
            if not 0 < float(tensor) < float("inf"):
                raise ValueError(f"the scale of activations is {float(tensor)}; it has to be above 0")
            self.input_scale.copy_(torch.maximum(self.input_scale, tensor.to(self.input_scale).view(1)))
        elif kind == "weight_zero_point":
            self._load_scales("zero", tensor, part, first_row)
        else:
            scale = tensor.float() * self.form.factor
            if not bool(scale.isfinite().all()):
                raise ValueError("a scale is not finite; the file is damaged, download it again")
            self._load_scales("scale", scale, part, first_row)

    def _load_scales(self, name: str, tensor: Tensor, part: Part, first_row: int) -> None:
        """Loads the scales of rows from `first_row`; a scale is repeated if fewer outputs share one here."""
        rows = self.form.block.outputs or len(part.outputs)
        repeats = -(-rows // self.rows_per_scale)
        tensor = tensor.reshape(max(len(tensor), 1) if tensor.dim() else 1, -1).repeat_interleave(repeats, 0)
        if not self.form.block.outputs:
            part = replace(part, outputs=range(rows))
        copy_part(self.storage()[name], getattr(self, name), tensor, part, first_row * repeats)

    def finish(self) -> None:
        """Finishes loading; zero points that are all zero are dropped."""
        if self.zero is not None and not self.zero.is_meta and not self.zero.any():
            self.zero = None
        if self.zero is not None or not (self.form.activations is None or self.form.activations.symmetric):
            self.name += ", with zeros"
        super().finish()

    def stored(self) -> list[Tensor] | None:
        """See `LinearMethod.stored`; a CPU kernel stores the scale of static activations itself."""
        return None if self.form.static else super().stored()

    def cpu_product(self) -> CpuProduct | None:
        """None of activations that are rounded in another way than for each token."""
        how = self.form.activations
        if how is None:
            return super().cpu_product()
        if (
            self.form.code != "int8"
            or how != Rounding("int8", limit=how.limit)
            or self.packed().group < self.shape.inputs
        ):
            return None
        if self.zero is not None or self.rows_per_scale > 1:
            return None
        fixed = float(self.input_scale) if self.form.static else 0.0
        codes, scale = side_by_side(self.codes, STEP), side_by_side(self.scale)
        return Int8Product(codes, scale, self.shape.outputs, fixed, how.limit or 0.0)

    def rows(self, index: Tensor | slice) -> Tensor:
        codes = self.stored_rows(self.codes.view(torch.uint8), index).view(self.codes.dtype)
        codes = codes[:, : self.shape.inputs].float()
        scale = self._of_rows(self.scale, index)
        if self.zero is not None:
            codes = codes - self._of_rows(self.zero, index)
        return (codes * scale).to(self.shape.dtype)

    @property
    def looks_up(self) -> bool:
        is_by_row = self.form.block.inputs == 0 and self.rows_per_scale == 1 and self.zero is None
        return self.compiled and is_by_row and self.form.code == "int8"

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_share(ids, range(self.shape.outputs)) if self.looks_up else super().embed(ids)

    def embed_share(self, ids: Tensor, held: range) -> Tensor:
        if not self.looks_up:
            return super().embed_share(ids, held)
        outputs, inputs, dtype, _ = self.shape
        return int8_rows(self.codes, self.scale, (outputs, inputs), dtype, ids, held.start)

    def _of_rows(self, scales: Tensor, index: Tensor | slice) -> Tensor:
        """The scales of rows: `[N, inputs]`, or `[N, 1]`."""
        if self.rows_per_scale > 1:
            at = torch.arange(self.shape.outputs, device=scales.device)[index] if isinstance(index, slice) else index
            index = at // self.rows_per_scale
        chosen = self.stored_rows(scales, index)
        if not self.form.block.inputs:
            return chosen
        return chosen.repeat_interleave(self._group, 1)[:, : self.shape.inputs]

    def packed(self) -> Packed:
        return Packed(self.form.code, self.codes, self.scale, self.zero, self._group, self.rows_per_scale)

    def own_products(self) -> Mapping[str, Product]:
        if self._library_products is None:
            from kvern.formats.gpu.products import library_products

            self._library_products = library_products(self)
        return self._library_products

    @property
    def code(self) -> str:
        """The name of the codes."""
        return self.form.code

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        return self.form.block

    def activation_codes(self) -> "Coding | None":
        """See `QuantizedMethod.activation_codes`; the activations of a single row stay plain."""
        how = self.form.activations
        if how is None or how.code != self.form.code or not how.symmetric:
            return None
        if how.group and (self.form.static or how.group % CODES_STEP or self.shape.inputs % how.group):
            return None
        from kvern.kernels.quantize_rows import Coding

        return Coding(how.code, how.group, self.input_scale if self.form.static else None, how.limit)

    def rounded(self, x: Tensor) -> Tensor:
        if self.form.activations is None:
            return x
        return rounded(x, self.form.activations, self.input_scale if self.form.static else None)

    def fill_random(self, generator: torch.Generator) -> None:
        """See `LinearMethod.fill_random`; the numbers are distributed like plain weights."""
        largest = LARGEST[self.form.code]
        for first in range(0, self.shape.outputs, 1024):
            run = self.codes[first : first + 1024]
            run.copy_(torch.empty(run.shape, device=run.device).uniform_(-largest, largest, generator=generator))
        self.scale.data.fill_(RANDOM_SPREAD / largest)
        if self.form.static:
            self.input_scale.data.fill_(RANDOM_ACTIVATION / largest)
