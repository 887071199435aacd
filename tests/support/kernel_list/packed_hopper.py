"""Products with packed weights by the kernels for Hopper GPUs."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kvern.formats.gpu.candidates import BLOCK_STREAMS, row_shape
from kvern.kernels.arrange import arrange, scaled_lanes
from kvern.kernels.block_codes import BLOCKS
from kvern.kernels.linear import StreamPackedShape
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.entry import Call, Inputs, Kernel, PackedKind
from tests.support.kernel_list.quantized import (
    bytes_of,
    forms_of,
    joined_by,
    one_row,
    plain_of,
    random_packed,
    stream_shapes,
    timed_kinds,
)

Sizes = Iterator[tuple[Any, ...]]


def _stream(spec: ModelSpec, inputs: Inputs, kind: PackedKind, rows: int, shape: StreamPackedShape) -> Call:
    from kvern.kernels.stream_blocks_hopper import stream_blocks_product
    from kvern.kernels.stream_packed_hopper import stream_packed_product

    packed, x = random_packed(inputs, kind, kind.outputs), inputs.numbers(rows, kind.inputs)
    bias = inputs.numbers(kind.outputs) if kind.biased else None
    counters = inputs.zeros(kind.outputs)

    def launch() -> torch.Tensor:
        if kind.code in BLOCKS:
            return stream_blocks_product(scaled_lanes(x), packed, bias, shape, counters, x.dtype)
        return stream_packed_product(arrange(x, packed.order, "lanes"), packed, bias, shape, counters)

    def reference() -> torch.Tensor:
        return x.double() @ plain_of(packed).T + (0 if bias is None else bias.double())

    sizes = f"{rows} x {kind.outputs} x {kind.inputs} {kind.code}"
    moved = bytes_of(packed) + rows * (kind.inputs + kind.outputs) * x.element_size()
    return Call(sizes, launch, reference, moved, 2 * rows * kind.outputs * kind.inputs)


def _kinds(kinds: list[PackedKind]) -> Iterable[PackedKind]:
    return dict.fromkeys(kind._replace(part="") for kind in kinds)


def _launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    launched: dict[tuple[PackedKind, int, StreamPackedShape], None] = {}
    for kind in _kinds(forms_of(inputs)):
        for most, shapes in stream_shapes(kind, inputs).items():
            for shape in shapes:
                rows = min(most, shape.rows)
                launched[kind, rows, shape] = launched[kind, min(rows, 96), shape] = None  # kernels of which differ
    yield from launched


def _row_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    """With what is around one row; without it, `_launched` has them."""
    if not inputs.hopper or inputs.dtype.itemsize != 2:
        return
    from kvern.kernels.stream_blocks_hopper import streams_blocks

    for kind in forms_of(inputs):
        offered = [shape for shape in BLOCK_STREAMS[1] if streams_blocks(kind.code, shape)]
        for joined in joined_by(spec, inputs, kind) if offered else ():
            shapes = (row_shape(shape, kind.code, joined.activation is not None) for shape in offered)
            for shape in dict.fromkeys(shapes):
                yield kind._replace(part=""), kind.outputs, shape, joined


def _timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for kind in _kinds(timed_kinds(inputs)):
        yield from ((kind, rows, shapes[0]) for rows, shapes in stream_shapes(kind, inputs).items() if shapes)


KERNELS = (
    Kernel("quantized, by streams on Hopper", "hopper_linear", _stream, _launched, _timed),
    Kernel("quantized, one row on Hopper", "hopper_linear", one_row, _row_launched),
)
