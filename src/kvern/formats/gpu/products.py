"""Multiplication by quantized weights on a GPU, with kernels that decode inside the product or PyTorch's libraries.

For one row a kernel reads the codes and computes little. For more rows weights are decoded inside the product, or in
runs of rows for cuBLAS; or, where the format rounds activations, activations become 8-bit codes and both operands stay
quantized, in kernels or in `library_products` of one byte. The tuner times all of them.
"""

import functools
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.formats.gpu.candidates import (
    BLOCK_STREAMS,
    MANY_ROWS,
    MOST_OWN_FEW,
    MOST_TIMED_NUMBERS,
    STREAMS,
    CodesStream,
    CodesTiles,
    OfCodes,
    PlainRuns,
    RowShape,
    Shape,
    beside,
    candidates_of,
    codes_candidates,
    fitted,
    knows,
    one_way,
    row_shape,
)
from kvern.kernels.arrange import arrange, scaled_lanes
from kvern.kernels.block_codes import BLOCKS
from kvern.kernels.codes import CODES, INTERLEAVED, readable
from kvern.kernels.codes_hopper import product_codes, tiles_codes
from kvern.kernels.launch import capability
from kvern.kernels.linear import NOTHING, Around, MatmulShape, MatvecShape, StreamPackedShape, StreamShape, TileShape
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.kernels.plain_weights import plain_product
from kvern.kernels.quantize_rows import Coding, RowCodes, scale_products
from kvern.kernels.resident_row import ResidentShape, resident_row
from kvern.kernels.scaled_product import multiplies_codes, scaled_product
from kvern.kernels.stream_hopper import stream_codes, streams_codes
from kvern.layers.linear_method import CodesProduct, LinearShape, Product
from kvern.layers.tuned_linear import MOST_TILES


class CodesMatrix(Protocol):
    """A matrix of codes: the part of `QuantizedMethod` that products read."""

    shape: LinearShape

    def packed(self) -> Packed:
        """The codes and scales in the form that kernels read."""

    def activation_codes(self) -> Coding | None:
        """The way in which activations become codes; None: they stay plain."""

    def own_products(self) -> Mapping[str, Product]:
        """Products that belong to this format, by name."""

    def rounded(self, x: Tensor) -> Tensor:
        """The activations `x [T, inputs]` as the format rounds them."""


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros that kernels count in, shared by all products of a device."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def multiply_row(x: Tensor, weight: Packed, bias: Tensor | None, shape: RowShape, around: Around = NOTHING) -> Tensor:
    """Multiplies one row with the kernel of a shape and its fused operations; the caller applies an order of inputs."""
    if isinstance(shape, ResidentShape):
        return resident_row(x, weight, bias, shape, around)
    if isinstance(shape, StreamPackedShape):
        return _stream_blocks(x, weight, bias, shape, around)
    return packed_row(x, weight, bias, shape, around)


def _stream_blocks(
    x: Tensor, weight: Packed, bias: Tensor | None, shape: StreamPackedShape, around: Around = NOTHING
) -> Tensor:
    from kvern.kernels.stream_blocks_hopper import stream_blocks_product

    lanes, places = scaled_lanes(x, around.gain, around.epsilon), counters(x.device)
    return stream_blocks_product(lanes, weight, bias, shape, places, x.dtype, around.activation, around.residual)


def codes_product(
    shape: OfCodes,
    x: Tensor,
    x_scale: Tensor,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiplies codes made by `QuantizedMethod.activation_codes`: `[T, outputs]` of `dtype`."""
    if isinstance(shape, CodesStream):
        return stream_codes(x, x_scale, weight, bias, StreamShape(*shape[:-1]), counters(x.device), dtype)
    if isinstance(shape, CodesTiles):
        return product_codes(x, x_scale, weight, bias, TileShape(*shape[:-1]), counters(x.device), dtype)
    return scaled_product(x, x_scale, weight, bias, MatmulShape(*shape[:-1]), dtype)


class PackedProducts:
    """The products of one matrix: a way to multiply for each number of rows, by guess until they are timed."""

    def __init__(self, method: CodesMatrix, deterministic: bool, hopper: bool) -> None:
        self._method = method
        self._deterministic = deterministic
        self._hopper = hopper
        dtype, packed = method.shape.dtype, method.packed()
        code, known = packed.code, (packed.code, packed.group, method.shape.inputs, method.shape.device)
        given = {} if deterministic else candidates_of(dtype)
        self._candidates = {
            most: tuple(fitted(shape, code) for shape in shapes if knows(shape, *known))
            for most, shapes in given.items()
            if most <= MANY_ROWS or most * method.shape.outputs <= MOST_TIMED_NUMBERS
        }
        self._most = sorted(self._candidates)
        self._ways: list[Shape] = [self._candidates[most][0] for most in self._most] or [fitted(one_way(dtype), code)]
        self._ways.append(self._ways[-1])

    @functools.cached_property
    def weight(self) -> Packed:
        """The weights that kernels read, after loading."""
        return readable(self._method.packed())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply_by(self._way(x.shape[0]), x, bias)

    def coding(self, rows: int) -> Coding | None:
        way = self._of_codes(self._way(rows))
        return None if way is None else way.coding

    def multiply_codes(self, x: RowCodes, bias: Tensor | None) -> Tensor:
        way = self._of_codes(self._way(x.codes.shape[0]))
        assert way is not None
        return way.multiply_codes(x, bias)

    def multiply_row(self, x: Tensor, bias: Tensor | None, around: Around = NOTHING) -> Tensor:
        """See `RowProduct`; the matrix may have no order of its inputs."""
        weight = self.weight
        shape = row_shape(self._ways[bisect_left(self._most, 1)], weight.code, around.activation is not None)
        return multiply_row(x, weight, bias, shape, around)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        return {
            most: {
                _plain(shape): self._of_codes(shape) or partial(self._multiply_by, shape)
                for shape in self._shapes(most)
            }
            for most in self._candidates
        }

    def _shapes(self, most: int) -> tuple[Shape, ...]:
        shapes = self._candidates[most]
        offered = BLOCK_STREAMS if self.weight.code in BLOCKS else STREAMS
        streams = tuple(shape for shape in offered.get(most, ()) if self._streams(shape))
        if most == 1:
            return (*shapes, *streams)
        coded = self._multiplies_codes()
        streamed, tiled = self._hopper_codes() if coded else (False, False)
        codes = codes_candidates(most, streamed, tiled) if coded else ()
        own = self._method.own_products() if most > MOST_OWN_FEW else ()
        return (*beside(shapes, bool(streams), streamed), *streams, *codes, *own)

    def _streams(self, shape: StreamPackedShape) -> bool:
        size, weight = self._method.shape, self.weight
        if not self._hopper or size.dtype.itemsize != 2 or weight.code not in INTERLEAVED:
            return False
        if weight.code in BLOCKS:
            from kvern.kernels.stream_blocks_hopper import streams_blocks

            return streams_blocks(weight.code, shape)
        from kvern.kernels.stream_packed_hopper import streams

        return streams(weight, size.inputs, shape, size.dtype)

    def _multiplies_codes(self) -> bool:
        weight, shape = self.weight, self._method.shape
        if weight.zero is not None or self._method.activation_codes() is None:
            return False
        return multiplies_codes(weight.code, [weight.group], shape.inputs, shape.device)

    def _hopper_codes(self) -> tuple[bool, bool]:
        """The arguments `streams` and `tiles` of `codes_candidates`."""
        weight, (outputs, inputs, dtype, _) = self.weight, self._method.shape
        if not self._hopper:
            return False, False
        streamed = streams_codes(weight.code, weight.group, outputs, inputs)
        return streamed, tiles_codes(weight, outputs, inputs, dtype)

    def choose(self, rows: int, candidate: Hashable) -> None:
        way = next(shape for shape in self._shapes(rows) if _plain(shape) == candidate)
        self._ways[self._most.index(rows)] = way
        if rows == self._most[-1] and not _bounded(way):
            self._ways[-1] = way

    def _multiply_by(self, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, of_codes = self.weight, self._of_codes(shape)
        if of_codes is not None:
            return of_codes(x, bias)
        if isinstance(shape, str):
            return self._method.own_products()[shape](x, bias)
        if isinstance(shape, PlainRuns):
            x = self._method.rounded(x)
            x = x if weight.order is None else arrange(x, weight.order, "")
            return plain_product(x, weight, bias, shape.numbers)
        if isinstance(shape, MatvecShape | ResidentShape):
            x = x if weight.order is None else arrange(x, weight.order, "")
            return multiply_row(x, weight, bias, shape)
        if isinstance(shape, StreamPackedShape) and weight.code in BLOCKS:
            return _stream_blocks(x, weight, bias, shape)
        if isinstance(shape, StreamPackedShape):
            from kvern.kernels.stream_packed_hopper import stream_packed_product

            return stream_packed_product(arrange(x, weight.order, "lanes"), weight, bias, shape, counters(x.device))
        assert isinstance(shape, MatmulShape)
        apart = weight.code in INTERLEAVED
        if apart or weight.order is not None:
            x = arrange(x, weight.order, "planes" if apart else "")
        return packed_product(x, weight, bias, shape, counters(x.device))

    def _way(self, rows: int) -> Shape:
        return self._ways[bisect_left(self._most, rows)]

    def _of_codes(self, shape: Shape) -> CodesProduct | None:
        """The way, if it multiplies codes."""
        if isinstance(shape, str):
            own = self._method.own_products()[shape]
            return own if isinstance(own, CodesProduct) else None
        if not isinstance(shape, OfCodes):
            return None
        coding = self._method.activation_codes()
        weight = self.weight
        dtype = self._method.shape.dtype
        assert coding is not None
        return CodesProduct(coding, lambda x, bias: codes_product(shape, *x, weight, bias, dtype))


def _bounded(shape: Shape) -> bool:
    """True if the shape takes at most the rows it was timed for: those of a tile, or by the number of counters."""
    return isinstance(shape, CodesStream) or (isinstance(shape, CodesTiles) and shape.splits > 1)


def _plain(shape: Shape) -> Hashable:
    return shape if isinstance(shape, str) else tuple(shape)


def multiplies(code: str, inputs: int) -> bool:
    """True if the kernels support a code and rows of `inputs` inputs."""
    return code in CODES and inputs % CODES[code].block == 0


BLOCK = 128
"""Outputs and inputs of the blocks, and inputs of the groups of activations, that cuBLAS knows."""
CUBLAS_ROWS = 4
"""The multiple of rows that cuBLAS takes with scales for groups, so that groups begin at multiples of 16 bytes."""


class ScaledMatrix(Protocol):
    """A matrix of codes of a byte with float32 scales: the part of `ScaledMethod` that these products read.

    Each scale is of `rows_per_scale` outputs and of the inputs of a block; `block` has 0 outputs or inputs where it is
    as large as the matrix.
    """

    shape: LinearShape
    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    @property
    def rows_per_scale(self) -> int:
        """Outputs that share a scale."""

    @property
    def code(self) -> str:
        """The name of the codes, "e4m3" or "int8"."""

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""

    def activation_codes(self) -> Coding | None:
        """The coding of activations; None: they stay plain."""


def library_products(method: ScaledMatrix) -> Mapping[str, Product]:
    """The library products that support the form of a loaded matrix, by name."""
    outputs, inputs, dtype, device = method.shape
    coding, card = method.activation_codes(), capability(device)
    if coding is None or method.zero is not None or outputs % 16 or inputs % 16:
        return {}
    by_rows = not method.block[1] and not coding.group
    if method.code == "int8":
        return {"int_mm": CodesProduct(coding, partial(_int_mm, method))} if by_rows and card >= 80 else {}
    if dtype != torch.bfloat16 or card < 89:
        return {}
    if by_rows:
        return {"scaled_mm": CodesProduct(coding, partial(_scaled_mm, method))}
    whole = outputs % BLOCK == 0 and inputs % BLOCK == 0 and method.block == (BLOCK, BLOCK)
    if whole and coding.group == BLOCK and method.rows_per_scale == BLOCK and card == 90:
        multiply = partial(_scaled_mm_by_blocks, method, _as_cublas_reads(method.scale))
        return {"scaled_mm by blocks": CodesProduct(replace(coding, columns=True), multiply)}
    return {}


def _scaled_mm(method: ScaledMatrix, x: RowCodes, bias: Tensor | None) -> Tensor:
    """e4m3 by e4m3, a scale for each token and each output."""
    by_output = method.scale.view(1, -1)
    out: Tensor = torch._scaled_mm(
        x.codes, method.codes.t(), x.scales, by_output, bias, out_dtype=method.shape.dtype, use_fast_accum=True
    )
    return out


def _scaled_mm_by_blocks(method: ScaledMatrix, scale: Tensor, x: RowCodes, bias: Tensor | None) -> Tensor:
    """e4m3 by e4m3, a scale for each token's 128 inputs and each block of 128 x 128 weights."""
    rows, missing = len(x.codes), -len(x.codes) % CUBLAS_ROWS
    codes, scales = x
    if missing:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        scales = F.pad(scales.t(), (0, missing)).t()
    out: Tensor = torch._scaled_mm(codes, method.codes.t(), scales, scale, out_dtype=method.shape.dtype)[:rows]
    return out if bias is None else out + bias


def _as_cublas_reads(scale: Tensor) -> Tensor:
    """`[outputs / 128, inputs / 128]` transposed, its columns at multiples of four numbers."""
    outputs, groups = scale.shape
    padded = torch.zeros(outputs, -(-groups // 4) * 4, device=scale.device)
    padded[:, :groups] = scale
    return padded[:, :groups].t()


def _int_mm(method: ScaledMatrix, x: RowCodes, bias: Tensor | None) -> Tensor:
    """int8 by int8 as integers, to which the scales of tokens and outputs are applied."""
    products = torch._int_mm(x.codes, method.codes.t())
    return scale_products(products, x.scales, method.scale, bias, method.shape.dtype)
