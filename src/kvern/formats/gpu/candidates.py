"""Candidate kernel shapes for products with packed weights, by the number of rows for which they are timed."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch

from kvern.kernels.block_codes import BLOCKS
from kvern.kernels.codes import CODES
from kvern.kernels.linear import MatmulShape, MatvecShape, StreamPackedShape
from kvern.kernels.resident_row import ResidentShape, keeps_row


class PlainRuns(NamedTuple):
    """The weights of runs of rows, about `numbers` in all, are converted to plain numbers and multiplied by cuBLAS."""

    numbers: int


PLAIN_RUNS = PlainRuns(1 << 26)
"""Enough to fill a card. Half of that, which a card's cache would hold, is as fast at best."""


class CodesShape(NamedTuple):
    """The tile shape of a product of two quantized operands; see `MatmulShape`."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    splits: int = 1
    kind: str = "codes"


class CodesStream(NamedTuple):
    """The tile shape of a product of two quantized operands on Hopper; see `StreamShape`."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    splits: int
    kind: str = "stream"


class CodesTiles(NamedTuple):
    """The tile shape of a product of many quantized rows on Hopper; see `TileShape`."""

    splits: int
    group: int
    kind: str = "tiles"


RowShape = MatvecShape | ResidentShape | StreamPackedShape
"""A shape of a kernel that fuses the operations around the product of one row."""
OfCodes = CodesShape | CodesStream | CodesTiles
Shape = RowShape | MatmulShape | OfCodes | PlainRuns | str
"""A shape of a kernel, or the name of a product that belongs to the format."""
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
"""Candidates for at most that many rows; the last also for more."""

STREAMS: Mapping[int, tuple[StreamPackedShape, ...]] = {
    8: tuple(StreamPackedShape(8, 64, 6, splits) for splits in (1, 4, 8)),
    16: tuple(StreamPackedShape(16, 64, 5, splits) for splits in (1, 4, 8)),
    32: (StreamPackedShape(32, 128, 5), StreamPackedShape(32, 64, 6, 4), StreamPackedShape(32, 64, 4, 4)),
    64: (StreamPackedShape(64, 128, 4), StreamPackedShape(64, 64, 4, 4), StreamPackedShape(64, 256, 5)),
    128: (StreamPackedShape(128, 256, 3), StreamPackedShape(128, 128, 4, 2), StreamPackedShape(128, 128, 4, 4)),
    256: (StreamPackedShape(128, 256, 3), StreamPackedShape(128, 128, 4), StreamPackedShape(128, 128, 4, 2)),
}
"""Candidates that replace each `MatmulShape` on Hopper, for matrices that `stream_packed_hopper.py` supports."""

BLOCK_STREAMS: Mapping[int, tuple[StreamPackedShape, ...]] = {
    1: tuple(StreamPackedShape(8, 64, 4, splits) for splits in (1, 4, 8)),
    8: tuple(StreamPackedShape(8, 64, 4, splits) for splits in (1, 4, 8)),
    16: tuple(StreamPackedShape(16, 64, 4, splits) for splits in (1, 4, 8)),
    32: (StreamPackedShape(32, 128, 3), StreamPackedShape(32, 64, 4), StreamPackedShape(32, 64, 4, 4)),
    **dict.fromkeys((64, 128, 256), (StreamPackedShape(64, 128, 3), StreamPackedShape(64, 64, 3, 4))),
}
"""Candidates that replace each `MatmulShape` for GGUF blocks that `kernels/stream_blocks_hopper.py` supports."""

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
"""Limit of a timed result: a head with many outputs gets few rows, and its result for many exceeds the weights."""
CODES_CANDIDATES: Mapping[int, tuple[CodesShape, ...]] = {
    16: (CodesShape(16, 64, 128, 4, 4),),
    32: (CodesShape(32, 64, 128, 4, 4),),
    64: (CodesShape(64, 64, 128, 4, 4),),
    8192: (CodesShape(128, 128, 128, 8, 3), CodesShape(64, 128, 128, 4, 4)),
}
"""Additional candidates for at most that many rows, except one row, for products of two quantized operands."""
CODES_STREAMS: Mapping[int, tuple[CodesStream, ...]] = {
    8: (CodesStream(8, 64, 128, 8, 2), CodesStream(8, 128, 128, 6, 1)),
    16: (CodesStream(16, 64, 128, 8, 2), CodesStream(16, 128, 128, 6, 1)),
    32: (CodesStream(32, 64, 128, 6, 1), CodesStream(32, 64, 128, 6, 2)),
    64: (CodesStream(64, 64, 128, 6, 2), CodesStream(64, 128, 128, 4, 1), CodesStream(64, 64, 128, 4, 4)),
}
CODES_TILES: Mapping[int, tuple[CodesTiles, ...]] = {
    128: (CodesTiles(1, 1), CodesTiles(2, 1), CodesTiles(4, 1)),
    256: (CodesTiles(1, 2), CodesTiles(2, 2)),
}
"""Candidates that replace these on Hopper, for matrices that their kernels support."""
DETERMINISTIC = MatmulShape(32, 64, 128, 4, 4)
FLOAT32_DETERMINISTIC = MatmulShape(16, 32, 64, 4, 3)

ONE_ROW = MatvecShape(8, 2048, 4)
"""The shape for one row with fused operations, where the chosen kernel fuses none."""


def candidates_of(dtype: torch.dtype) -> Mapping[int, tuple[Shape, ...]]:
    """The candidates for activations of this dtype, by the largest number of rows."""
    return CANDIDATES if dtype.itemsize < 4 else FLOAT32_CANDIDATES


def one_way(dtype: torch.dtype) -> MatmulShape:
    """The shape with which a row's result does not depend on the number of rows."""
    return DETERMINISTIC if dtype.itemsize < 4 else FLOAT32_DETERMINISTIC


def codes_candidates(most: int, streams: bool = False, tiles: bool = False) -> tuple[OfCodes, ...]:
    """The candidates for at most `most` rows, except one row, for products of two quantized operands.

    On Hopper: `streams`, if few rows are multiplied by a streamed matrix; `tiles`, if many rows are in tiles.
    """
    streamed: tuple[OfCodes, ...] = CODES_STREAMS.get(most, ()) if streams else ()
    own = streamed + (CODES_TILES.get(most, ()) if tiles else ())
    return own or CODES_CANDIDATES[min((key for key in CODES_CANDIDATES if key >= most), default=max(CODES_CANDIDATES))]


def knows(shape: Shape, code: str, group: int, inputs: int, device: torch.device) -> bool:
    """True if a shape's kernel supports the matrix and may be fastest; a resident row is not, for e4m3."""
    return not isinstance(shape, ResidentShape) or (code != "e4m3" and keeps_row(code, group, inputs, device))


def beside(shapes: Iterable[Shape], streams: bool, codes: bool) -> tuple[Shape, ...]:
    """The candidates for several rows that may be fastest on Hopper, where kernels with TMA replace others.

    `streams`: there are such kernels for 4-bit weights; `codes`: for two quantized operands, and cuBLAS for more rows.
    """
    return () if codes else tuple(shape for shape in shapes if not (streams and isinstance(shape, MatmulShape)))


def fitted(shape: Cut, code: str) -> Cut:
    """The shape with steps of whole blocks."""
    if isinstance(shape, MatvecShape | MatmulShape) and shape.inputs % CODES[code].block:
        return shape._replace(inputs=CODES[code].block)
    return shape


def row_shape(shape: Shape, code: str, activated: bool) -> RowShape:
    """The shape for one row with fused operations if `shape` was chosen; gate and up are two half tiles."""
    if isinstance(shape, StreamPackedShape) and shape.rows == 8 and code in BLOCKS:
        return shape._replace(splits=1) if activated else shape
    cut = shape if isinstance(shape, MatvecShape | ResidentShape) else ONE_ROW
    return fitted(cut._replace(outputs=cut.outputs // 2) if activated else cut, code)
