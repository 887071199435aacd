"""Activations rounded to one byte for products of two such matrices, and the scales applied to integer results."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import (
    Launcher,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    processors,
    wait_for_previous,
)

DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"e4m3": 448.0, "int8": 127.0}
BLOCK = 1 << 15
"""Numbers of a row that a program has in registers; a longer row is read twice."""
NARROW, NARROW_PROGRAMS = 1024, 32
"""Numbers of a row of which a warp takes one after another, and such warps of a processor."""
UNLIMITED = 3e38
TILE = 2048
"""Inputs of groups, of one row, that a program rounds."""


class RowCodes(NamedTuple):
    """Rows of codes [T, I], and float32 scales [T, 1], or [T, I / group] of groups: what `quantize_rows` makes."""

    codes: torch.Tensor
    scales: torch.Tensor


class Target(NamedTuple):
    """The place where a kernel writes rows, and with codes their scales, by a `limit` of numbers or one `static`."""

    out: Any
    scales: Any = None
    static: Any = None
    limit: float | None = None


class Strides(NamedTuple):
    """Distances of scales in memory, for which no kernel is compiled: of rows, and of groups."""

    row: Any = None
    group: Any = None


class Rule(NamedTuple):
    """The constants of a kernel that rounds to codes: the largest code, and whether there is a static scale."""

    largest: float
    integer: bool
    static: bool
    group: int


Destination = tuple[Target, Strides, Rule | None]
"""The arguments of a kernel that writes rows: variables and constants of `store_codes`; without a rule plain rows."""


@dataclass(frozen=True)
class Coding:
    """The coding of rows: the arguments of `quantize_rows` beside the rows."""

    code: str
    group: int = 0
    static: torch.Tensor | None = None
    limit: float | None = None
    columns: bool = False
    late: bool = False

    def __call__(self, x: torch.Tensor) -> RowCodes:
        return quantize_rows(x.contiguous(), self.code, self.group, self.static, self.limit, self.columns, self.late)

    def block(self, width: int) -> int:
        """Returns the block of a program that rounds a row of so many numbers; 0 if it cannot, or not in groups of that
        size."""
        block = max(next_power_of_2(width), self.group)
        return block if block <= BLOCK and self.group & (self.group - 1) == 0 else 0

    def empty(self, tokens: int, width: int, device: torch.device) -> RowCodes:
        """Returns empty codes for so many rows."""
        groups = cdiv(width, self.group) if self.group else 1
        scales = torch.empty((groups, tokens) if self.columns else (tokens, groups), dtype=torch.float32, device=device)
        codes = torch.empty(tokens, width, dtype=DTYPES[self.code], device=device)
        return RowCodes(codes, scales.t() if self.columns else scales)

    def arguments(self, made: RowCodes) -> Destination:
        """Returns the arguments of `store_codes`."""
        static = made.scales if self.static is None else self.static
        target, strides = Target(*made, static, self.limit or UNLIMITED), Strides(*made.scales.stride())
        return target, strides, Rule(LARGEST[self.code], self.code == "int8", self.static is not None, self.group)


@triton.jit
def _coded(x, scale, codes, RULE: tl.constexpr):
    """`x / scale` as the nearest codes, ties to even; what is out of range becomes the largest."""
    LARGEST: tl.constexpr = RULE.largest
    value = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    if RULE.integer:
        value = (value + 12582912.0) - 12582912.0  # numbers of 24 bits that begin at 2^23 are whole
    return value.to(codes.dtype.element_ty)


@triton.jit
def _scale_of(most, limit, RULE: tl.constexpr):
    """Returns the scale for this largest number."""
    return tl.minimum(tl.maximum(most, RULE.largest * 1e-12), limit) / RULE.largest


@triton.jit
def store_codes(x, row, column, width, target, strides, RULE: tl.constexpr):
    """Write the whole row `x [BLOCK]` float32, zero behind its end, and its scales; groups are 0 or a power of two."""
    BLOCK: tl.constexpr = x.shape[0]
    GROUP: tl.constexpr = RULE.group
    scales = target.scales + row * strides.row
    if GROUP:
        COUNT: tl.constexpr = BLOCK // GROUP
        parts = tl.reshape(x, [COUNT, GROUP])
        scale = _scale_of(tl.max(tl.abs(parts), 1), target.limit, RULE)
        group = tl.arange(0, COUNT)
        tl.store(scales + group.to(tl.int64) * strides.group, scale, mask=group * GROUP < width)
        made = tl.reshape(_coded(parts, scale[:, None], target.out, RULE), [BLOCK])
    else:
        scale = tl.load(target.static) if RULE.static else _scale_of(tl.max(tl.abs(x), 0), target.limit, RULE)
        tl.store(scales, scale)
        made = _coded(x, scale, target.out, RULE)
    tl.store(target.out + row * width + column, made, mask=column < width)


@Launcher
@triton.jit(do_not_specialize=["strides", "rows"])
def _quantize_rows_kernel(
    x: tl.tensor,
    target: Target,
    strides: Strides,
    width,
    rows,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
    LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """WHOLE: a block holds a row; else it is read twice, the second time from a cache. NARROW: a program takes several.

    What a processor's registers hold of narrow rows is less than has to be on its way from memory.
    """
    if OVERLAP and LATE:
        gdc_wait()
        gdc_launch_dependents()
    else:
        wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if NARROW:
        for number in tl.range(row, rows, tl.num_programs(0), num_stages=3):
            values = tl.load(x + number * width + column, mask=column < width, other=0.0)
            store_codes(values.to(tl.float32), number, column, width, target, strides, RULE)
    elif WHOLE:
        values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        store_codes(values, row, column, width, target, strides, RULE)
    else:
        if RULE.static:
            scale = tl.load(target.static)
        else:
            most = tl.zeros([BLOCK], dtype=tl.float32)
            for first in range(0, width, BLOCK):
                part = tl.load(x + row * width + first + column, mask=first + column < width, other=0.0)
                most = tl.maximum(most, tl.abs(part.to(tl.float32)))
            scale = _scale_of(tl.max(most, 0), target.limit, RULE)
        tl.store(target.scales + row, scale)
        for first in range(0, width, BLOCK):
            inside = first + column < width
            part = tl.load(x + row * width + first + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(target.out + row * width + first + column, _coded(part, scale, target.out, RULE), mask=inside)


@Launcher
@triton.jit(do_not_specialize=["strides"])
def _quantize_groups_kernel(
    x: tl.tensor,
    target: Target,
    strides: Strides,
    width,
    groups,
    RULE: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, PADDED)
    column = group[:, None] * RULE.group + within[None, :]
    inside = (within[None, :] < RULE.group) & (column < width)
    part = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(part), 1), target.limit, RULE)
    scales = target.scales + group.to(tl.int64) * strides.group + row * strides.row
    tl.store(scales, scale, mask=group < groups)
    tl.store(target.out + row * width + column, _coded(part, scale[:, None], target.out, RULE), mask=inside)


def quantize_rows(
    x: torch.Tensor,
    code: str,
    group: int = 0,
    static: torch.Tensor | None = None,
    limit: float | None = None,
    columns: bool = False,
    late: bool = False,
) -> RowCodes:
    """`x [T, I]` as codes of "e4m3" or "int8": those of rows, or of groups of inputs.

    A scale is that of its largest number, of `limit` at most, or `static [1]` float32. `columns`: scales of
    the same group lie behind one another, as cuBLAS reads them. `late`, not of groups: the next kernel starts only when
    those before this one have ended, and may read what they wrote before it waits. Moves x once, a row of more than
    `BLOCK` numbers twice, and the codes once.
    """
    tokens, width = x.shape
    coding = Coding(code, group, static, limit, columns)
    made = coding.empty(tokens, width, x.device)
    target, strides, rule = coding.arguments(made)
    if group:
        groups, padded = made.scales.shape[1], next_power_of_2(group)
        count = max(1, min(TILE // padded, next_power_of_2(groups)))
        _quantize_groups_kernel[(tokens, cdiv(groups, count))](
            x, target, strides, width, groups, rule, padded, count, num_warps=4
        )
        return made
    block = min(BLOCK, next_power_of_2(width))
    narrow = width <= block <= NARROW
    programs = min(tokens, processors(x.device) * NARROW_PROGRAMS) if narrow else tokens
    _quantize_rows_kernel[(programs,)](
        x, target, strides, width, tokens, rule, block, block >= width, narrow, late,
        num_warps=min(16, max(1, block // 1024)),
    )  # fmt: skip
    return made


@Launcher
@triton.jit
def _scale_products_kernel(
    products: tl.tensor,
    by_row: tl.tensor,
    by_output: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    outputs,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    result = tl.load(products + row * outputs + output, mask=inside, other=0).to(tl.float32)
    result = result * tl.load(by_row + row) * tl.load(by_output + output, mask=inside, other=0.0)
    if bias is not None:
        result += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, result.to(out.dtype.element_ty), mask=inside)


def scale_products(
    products: torch.Tensor, by_row: torch.Tensor, by_output: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`products [T, O]` int32 times `by_row [T, 1]` and `by_output [O, 1]` float32, plus a bias: [T, O] of `dtype`."""
    tokens, outputs = products.shape
    out = torch.empty(tokens, outputs, dtype=dtype, device=products.device)
    block = min(1024, next_power_of_2(outputs))
    _scale_products_kernel[(tokens, cdiv(outputs, block))](
        products, by_row, by_output, bias, out, outputs, block, num_warps=4
    )
    return out
