"""How quantized weights are multiplied on a GPU: by kernels that make numbers of codes inside the product.

One row reads the codes and computes little. Of more, weights are made plain inside the product, or a run of rows at a
time for cuBLAS, or activations become codes of eight bits, where the format rounds them, and codes are multiplied by
codes, by kernels or by the format's own products; the tuner times them.
"""

import functools
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvern.kernels.arrange import arrange, scaled_lanes
from kvern.kernels.block_codes import BLOCKS
from kvern.kernels.codes import CODES, INTERLEAVED, readable
from kvern.kernels.codes_hopper import outputs_of_tiles, product_codes
from kvern.kernels.linear import NOTHING, Around, MatmulShape, MatvecShape, StreamPackedShape, StreamShape, TileShape
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.kernels.plain_weights import plain_product
from kvern.kernels.quantize_rows import Coding, RowCodes
from kvern.kernels.resident_row import ResidentShape, keeps_row, resident_row
from kvern.kernels.scaled_product import multiplies_codes, scaled_product
from kvern.kernels.stream_hopper import stream_codes, streams_codes
from kvern.layers.linear_method import CodesProduct, Product
from kvern.layers.tuned_linear import MOST_TILES

if TYPE_CHECKING:
    from kvern.kernels.packed import Packed
    from kvern.layers.quantized.method import QuantizedMethod


class PlainRuns(NamedTuple):
    """Runs of rows of about so many numbers are made plain, then multiplied by cuBLAS."""

    numbers: int


PLAIN_RUNS = PlainRuns(1 << 26)
"""Enough to fill a card. Half of that, which a card's cache would hold, is as fast at best."""


class CodesShape(NamedTuple):
    """How a product of codes with codes is cut: as `MatmulShape`."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    splits: int = 1
    kind: str = "codes"


class CodesStream(NamedTuple):
    """How a product of codes with codes is cut on Hopper: as `StreamShape`."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    splits: int
    kind: str = "stream"


class CodesTiles(NamedTuple):
    """How a product of many rows of codes is cut on Hopper: as `TileShape`."""

    outputs: int
    inputs: int
    splits: int
    group: int
    kind: str = "tiles"


RowShape = MatvecShape | ResidentShape | StreamPackedShape
"""Of a kernel that does what is around the product of one row."""
OfCodes = CodesShape | CodesStream | CodesTiles
Shape = RowShape | MatmulShape | OfCodes | PlainRuns | str
"""Of a kernel; or the name of a product of the format's own."""
Cut = TypeVar("Cut", MatvecShape, ResidentShape, MatmulShape, RowShape, Shape)

CANDIDATES: Mapping[int, tuple[Shape, ...]] = {
    1: (
        MatvecShape(8, 2048, 4),
        MatvecShape(4, 2048, 4),
        MatvecShape(8, 1024, 4, unroll=2),
        ResidentShape(4, 4, 4),
        ResidentShape(2, 4, 4),
        ResidentShape(4, 8, 1),
    ),
    8: (
        MatmulShape(8, 64, 128, 4, 4),
        MatmulShape(8, 64, 128, 4, 4, splits=2),
        MatmulShape(8, 64, 256, 4, 3, splits=2),
        MatmulShape(8, 32, 256, 4, 4),
        MatmulShape(8, 64, 128, 4, 4, splits=4),
    ),
    16: (
        MatmulShape(16, 64, 128, 4, 4),
        MatmulShape(16, 64, 128, 4, 4, splits=2),
        MatmulShape(16, 64, 256, 4, 3, splits=2),
        MatmulShape(16, 64, 128, 4, 4, splits=4),
    ),
    32: (
        MatmulShape(32, 64, 128, 4, 4),
        MatmulShape(32, 64, 128, 4, 4, splits=2),
        MatmulShape(32, 128, 128, 8, 3, splits=2),
        MatmulShape(32, 64, 256, 4, 3, splits=2),
        PLAIN_RUNS,
    ),
    64: (
        MatmulShape(64, 64, 128, 4, 4),
        MatmulShape(64, 64, 128, 4, 4, splits=2),
        MatmulShape(64, 128, 128, 8, 3, splits=2),
        MatmulShape(64, 128, 64, 8, 4),
        PLAIN_RUNS,
    ),
    128: (MatmulShape(64, 128, 128, 8, 3), MatmulShape(128, 128, 64, 8, 3), PLAIN_RUNS),
    256: (MatmulShape(64, 128, 128, 8, 3), MatmulShape(128, 128, 64, 8, 3), PLAIN_RUNS),
    1024: (PLAIN_RUNS,),
    8192: (PLAIN_RUNS,),
}
"""What is timed for up to this many rows, the last for more too."""

STREAMS: Mapping[int, tuple[StreamPackedShape, ...]] = {
    8: tuple(StreamPackedShape(8, 64, 6, splits) for splits in (1, 4, 8)),
    16: tuple(StreamPackedShape(16, 64, 5, splits) for splits in (1, 4, 8)),
    32: (StreamPackedShape(32, 128, 5), StreamPackedShape(32, 64, 6, 4), StreamPackedShape(32, 64, 4, 4)),
    64: (StreamPackedShape(64, 128, 4), StreamPackedShape(64, 64, 4, 4), StreamPackedShape(64, 256, 5)),
    128: (StreamPackedShape(128, 256, 3), StreamPackedShape(128, 128, 4, 2), StreamPackedShape(128, 128, 4, 4)),
    256: (StreamPackedShape(128, 256, 3), StreamPackedShape(128, 128, 4), StreamPackedShape(128, 128, 4, 2)),
    1024: (StreamPackedShape(128, 256, 3), StreamPackedShape(128, 128, 4)),
}
"""What is timed instead of each `MatmulShape` on Hopper GPUs, of matrices that `stream_packed_hopper.py` knows."""

BLOCK_STREAMS: Mapping[int, tuple[StreamPackedShape, ...]] = {
    1: tuple(StreamPackedShape(8, 64, 4, splits) for splits in (1, 4, 8)),
    8: tuple(StreamPackedShape(8, 64, 4, splits) for splits in (1, 4, 8)),
    16: tuple(StreamPackedShape(16, 64, 4, splits) for splits in (1, 4, 8)),
    32: (StreamPackedShape(32, 128, 3), StreamPackedShape(32, 64, 4), StreamPackedShape(32, 64, 4, 4)),
    **dict.fromkeys((64, 128, 256), (StreamPackedShape(64, 128, 3), StreamPackedShape(64, 64, 3, 4))),
}
"""The same, but instead of each `MatmulShape`, of blocks of GGUF that `kernels/stream_blocks_hopper.py` knows."""

FLOAT32_CANDIDATES: Mapping[int, tuple[Shape, ...]] = {
    1: (MatvecShape(8, 2048, 4), MatvecShape(8, 1024, 4, unroll=2)),
    16: (MatmulShape(16, 32, 64, 4, 3), MatmulShape(16, 32, 64, 4, 3, splits=2)),
    64: (MatmulShape(16, 32, 64, 4, 3),),
    1024: (PLAIN_RUNS,),
}
"""Numbers of four bytes are multiplied on the ordinary cores, which takes small tiles."""

MOST_OWN_FEW = 16
"""A format's own products are for more: integers are multiplied by no fewer."""
MANY_ROWS = 64
"""A head is not always timed with more."""
MOST_TIMED_NUMBERS = 1 << 28
"""Of a result: a head, of so many outputs, gets few rows, and its result for many is larger than the weights."""
CODES_CANDIDATES: Mapping[int, tuple[CodesShape, ...]] = {
    16: (CodesShape(16, 64, 128, 4, 4),),
    32: (CodesShape(32, 64, 128, 4, 4),),
    64: (CodesShape(64, 64, 128, 4, 4),),
    8192: (CodesShape(128, 128, 128, 8, 3), CodesShape(64, 128, 128, 4, 4)),
}
"""What is timed beside the others for up to this many rows, but for one, where codes are multiplied by codes."""
CODES_STREAMS: Mapping[int, tuple[CodesStream, ...]] = {
    8: (CodesStream(8, 64, 128, 8, 2), CodesStream(8, 128, 128, 6, 1)),
    16: (CodesStream(16, 64, 128, 8, 2), CodesStream(16, 128, 128, 6, 1)),
    32: (CodesStream(32, 64, 128, 6, 1), CodesStream(32, 64, 128, 6, 2)),
    64: (CodesStream(64, 64, 128, 6, 2), CodesStream(64, 128, 128, 4, 1), CodesStream(64, 64, 128, 4, 4)),
    128: (CodesStream(128, 128, 128, 6, 1), CodesStream(128, 128, 128, 6, 4)),
}
CODES_TILES: Mapping[int, tuple[CodesTiles, ...]] = {
    128: (CodesTiles(256, 128, 1, 1), CodesTiles(128, 256, 2, 1), CodesTiles(128, 256, 4, 1)),
    256: (
        CodesTiles(256, 128, 1, 2),
        CodesTiles(256, 128, 4, 2),
        CodesTiles(128, 256, 1, 2),
        CodesTiles(128, 256, 2, 2),
    ),
    1024: (CodesTiles(256, 128, 1, 8),),
}
"""What is timed instead on Hopper GPUs, both, of matrices that their kernels know."""
DETERMINISTIC = MatmulShape(32, 64, 128, 4, 4)
FLOAT32_DETERMINISTIC = MatmulShape(16, 32, 64, 4, 3)

ONE_ROW = MatvecShape(8, 2048, 4)
"""What multiplies one row, with what is around it, where a kernel was chosen that does nothing around it."""


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros that kernels count in, shared by all products of a device."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def candidates_of(dtype: torch.dtype) -> Mapping[int, tuple[Shape, ...]]:
    """What is timed for activations of this dtype, by the most rows."""
    return CANDIDATES if dtype.itemsize < 4 else FLOAT32_CANDIDATES


def one_way(dtype: torch.dtype) -> MatmulShape:
    """How activations of this dtype are multiplied if a row's result must not depend on the number of rows."""
    return DETERMINISTIC if dtype.itemsize < 4 else FLOAT32_DETERMINISTIC


def codes_candidates(most: int, streams: bool = False, wide: int = 0) -> tuple[OfCodes, ...]:
    """What is timed for up to so many rows, but for one, where codes are multiplied by codes.

    On Hopper, `streams`: if matrices are streamed; `wide`: if there are tiles, of so many outputs at most.
    """
    streamed: tuple[OfCodes, ...] = CODES_STREAMS.get(most, ()) if streams else ()
    own = streamed + tuple(shape for shape in CODES_TILES.get(most, ()) if shape.outputs <= wide)
    return own or CODES_CANDIDATES[min((key for key in CODES_CANDIDATES if key >= most), default=max(CODES_CANDIDATES))]


def knows(shape: Shape, code: str, group: int, inputs: int, device: torch.device) -> bool:
    """Whether a shape's kernel multiplies such a matrix, and may be fastest: one that keeps the row is not of e4m3."""
    return not isinstance(shape, ResidentShape) or (code != "e4m3" and keeps_row(code, group, inputs, device))


def beside(shapes: Iterable[Shape], streams: bool, codes: bool) -> tuple[Shape, ...]:
    """Of `CANDIDATES` for more than one row those that may be fastest on a Hopper GPU: not beside kernels fed by TMA.

    `streams`: there are such for weights of four bits; `codes`: for codes by codes, and cuBLAS for more rows.
    """
    return () if codes else tuple(shape for shape in shapes if not (streams and isinstance(shape, MatmulShape)))


def multiply_row(x: Tensor, weight: "Packed", bias: Tensor | None, shape: RowShape, around: Around = NOTHING) -> Tensor:
    """One row by the kernel of a shape, with what is around it; a matrix's order is left to the caller."""
    if isinstance(shape, ResidentShape):
        return resident_row(x, weight, bias, shape, around)
    if isinstance(shape, StreamPackedShape):
        return _stream_blocks(x, weight, bias, shape, around)
    return packed_row(x, weight, bias, shape, around)


def _stream_blocks(
    x: Tensor, weight: "Packed", bias: Tensor | None, shape: StreamPackedShape, around: Around = NOTHING
) -> Tensor:
    from kvern.kernels.stream_blocks_hopper import stream_blocks_product

    lanes, places = scaled_lanes(x, around.gain, around.epsilon), counters(x.device)
    return stream_blocks_product(lanes, weight, bias, shape, places, x.dtype, around.activation, around.residual)


def fitted(shape: Cut, code: str) -> Cut:
    """The shape with steps of whole blocks."""
    if isinstance(shape, MatvecShape | MatmulShape) and shape.inputs % CODES[code].block:
        return shape._replace(inputs=CODES[code].block)
    return shape


def codes_product(
    shape: OfCodes,
    x: Tensor,
    x_scale: Tensor,
    weight: "Packed",
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """By codes that `QuantizedMethod.activation_codes` makes: `[T, outputs]` of the dtype."""
    if isinstance(shape, CodesStream):
        return stream_codes(x, x_scale, weight, bias, StreamShape(*shape[:-1]), counters(x.device), dtype)
    if isinstance(shape, CodesTiles):
        return product_codes(x, x_scale, weight, bias, TileShape(*shape[:-1]), counters(x.device), dtype)
    return scaled_product(x, x_scale, weight, bias, MatmulShape(*shape[:-1]), dtype)


def row_shape(shape: Shape, code: str, activated: bool) -> RowShape:
    """How one row is multiplied with what is around it, if `shape` was chosen: gate and up are two tiles of half."""
    if isinstance(shape, StreamPackedShape) and shape.rows == 8 and code in BLOCKS:
        return shape._replace(splits=1) if activated else shape
    cut = shape if isinstance(shape, MatvecShape | ResidentShape) else ONE_ROW
    return fitted(cut._replace(outputs=cut.outputs // 2) if activated else cut, code)


class PackedProducts:
    """The products of one matrix: a way to multiply for each number of rows, by guess until they are timed."""

    def __init__(self, method: "QuantizedMethod", deterministic: bool, hopper: bool) -> None:
        self._method, self._deterministic, self._hopper = method, deterministic, hopper
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
    def weight(self) -> "Packed":
        """What kernels read; once all is loaded."""
        return readable(self._method.packed())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As `LinearMethod.multiply`."""
        return self._multiply_by(self._way(x.shape[0]), x, bias)

    def coding(self, rows: int) -> Coding | None:
        """As `LinearMethod.coding`."""
        way = self._of_codes(self._way(rows))
        return None if way is None else way.coding

    def multiply_codes(self, x: RowCodes, bias: Tensor | None) -> Tensor:
        """As `LinearMethod.multiply_codes`."""
        way = self._of_codes(self._way(x.codes.shape[0]))
        assert way is not None
        return way.multiply_codes(x, bias)

    def multiply_row(self, x: Tensor, bias: Tensor | None, around: Around = NOTHING) -> Tensor:
        """As `RowProduct`, of a matrix without an order of its inputs."""
        weight = self.weight
        shape = row_shape(self._ways[bisect_left(self._most, 1)], weight.code, around.activation is not None)
        return multiply_row(x, weight, bias, shape, around)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        """As `LinearMethod.candidates`."""
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
        streamed, wide = self._hopper_codes() if coded else (False, 0)
        codes = codes_candidates(most, streamed, wide) if coded else ()
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

    def _hopper_codes(self) -> tuple[bool, int]:
        """Of `codes_candidates`."""
        weight, (outputs, inputs, dtype, _) = self.weight, self._method.shape
        if not self._hopper:
            return False, 0
        wide = outputs_of_tiles(weight, outputs, inputs, dtype)
        return streams_codes(weight.code, weight.group, outputs, inputs), wide

    def choose(self, rows: int, candidate: Hashable) -> None:
        """As `LinearMethod.choose`."""
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
        coding, weight, dtype = self._method.activation_codes(), self.weight, self._method.shape.dtype
        assert coding is not None
        return CodesProduct(coding, lambda x, bias: codes_product(shape, *x, weight, bias, dtype))


def _bounded(shape: Shape) -> bool:
    """It takes no more rows than it was offered for: of a tile's, or as there are counters."""
    return isinstance(shape, CodesStream) or (isinstance(shape, CodesTiles) and shape.splits > 1)


def _plain(shape: Shape) -> Hashable:
    return shape if isinstance(shape, str) else tuple(shape)


def multiplies(code: str, inputs: int) -> bool:
    """Whether the kernels know a code, and rows of so many inputs of it."""
    return code in CODES and inputs % CODES[code].block == 0
