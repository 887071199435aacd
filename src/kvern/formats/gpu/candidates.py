"""How products with packed weights may be cut: what is timed for which numbers of rows, and what is not worth it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch

from kvern.kernels.block_codes import BLOCKS
from kvern.kernels.codes import CODES
from kvern.kernels.linear import MatmulShape, MatvecShape, StreamPackedShape
from kvern.kernels.resident_row import ResidentShape, keeps_row


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
}
CODES_TILES: Mapping[int, tuple[CodesTiles, ...]] = {
    128: (CodesTiles(1, 1), CodesTiles(2, 1), CodesTiles(4, 1)),
    256: (CodesTiles(1, 2), CodesTiles(2, 2)),
}
"""What is timed instead on Hopper GPUs, both, of matrices that their kernels know."""
DETERMINISTIC = MatmulShape(32, 64, 128, 4, 4)
FLOAT32_DETERMINISTIC = MatmulShape(16, 32, 64, 4, 3)

ONE_ROW = MatvecShape(8, 2048, 4)
"""What multiplies one row, with what is around it, where a kernel was chosen that does nothing around it."""


def candidates_of(dtype: torch.dtype) -> Mapping[int, tuple[Shape, ...]]:
    """What is timed for activations of this dtype, by the most rows."""
    return CANDIDATES if dtype.itemsize < 4 else FLOAT32_CANDIDATES


def one_way(dtype: torch.dtype) -> MatmulShape:
    """How activations of this dtype are multiplied if a row's result must not depend on the number of rows."""
    return DETERMINISTIC if dtype.itemsize < 4 else FLOAT32_DETERMINISTIC


def codes_candidates(most: int, streams: bool = False, tiles: bool = False) -> tuple[OfCodes, ...]:
    """What is timed for up to so many rows, but for one, where codes are multiplied by codes.

    On Hopper, `streams`: if few rows are multiplied by a stream of the matrix; `tiles`: if many rows are in tiles.
    """
    streamed: tuple[OfCodes, ...] = CODES_STREAMS.get(most, ()) if streams else ()
    own = streamed + (CODES_TILES.get(most, ()) if tiles else ())
    return own or CODES_CANDIDATES[min((key for key in CODES_CANDIDATES if key >= most), default=max(CODES_CANDIDATES))]


def knows(shape: Shape, code: str, group: int, inputs: int, device: torch.device) -> bool:
    """Whether a shape's kernel multiplies such a matrix, and may be fastest: one that keeps the row is not of e4m3."""
    return not isinstance(shape, ResidentShape) or (code != "e4m3" and keeps_row(code, group, inputs, device))


def beside(shapes: Iterable[Shape], streams: bool, codes: bool) -> tuple[Shape, ...]:
    """Of `CANDIDATES` for more than one row those that may be fastest on a Hopper GPU: not beside kernels fed by TMA.

    `streams`: there are such for weights of four bits; `codes`: for codes by codes, and cuBLAS for more rows.
    """
    return () if codes else tuple(shape for shape in shapes if not (streams and isinstance(shape, MatmulShape)))


def fitted(shape: Cut, code: str) -> Cut:
    """The shape with steps of whole blocks."""
    if isinstance(shape, MatvecShape | MatmulShape) and shape.inputs % CODES[code].block:
        return shape._replace(inputs=CODES[code].block)
    return shape


def row_shape(shape: Shape, code: str, activated: bool) -> RowShape:
    """How one row is multiplied with what is around it, if `shape` was chosen: gate and up are two tiles of half."""
    if isinstance(shape, StreamPackedShape) and shape.rows == 8 and code in BLOCKS:
        return shape._replace(splits=1) if activated else shape
    cut = shape if isinstance(shape, MatvecShape | ResidentShape) else ONE_ROW
    return fitted(cut._replace(outputs=cut.outputs // 2) if activated else cut, code)
