"""Products with weights of four bits by the kernel for Hopper GPUs."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernel_list.quantized import PackedKind, bytes_of, forms_of, plain_of, random_packed, timed_kinds
from kvern.kernels.arrange import arrange
from kvern.kernels.codes import INTERLEAVED
from kvern.kernels.linear import StreamPackedShape
from kvern.layers.quantized.products import STREAMS
from kvern.model_spec import ModelSpec

Sizes = Iterator[tuple[Any, ...]]


def _stream(spec: ModelSpec, inputs: Inputs, kind: PackedKind, rows: int, shape: StreamPackedShape) -> Call:
    from kvern.kernels.stream_packed_hopper import stream_packed_product

    packed, x = random_packed(inputs, kind, kind.outputs), inputs.numbers(rows, kind.inputs)
    bias = inputs.numbers(kind.outputs) if kind.biased else None
    counters = inputs.zeros(kind.outputs)

    def launch() -> torch.Tensor:
        return stream_packed_product(arrange(x, packed.order, "lanes"), packed, bias, shape, counters)

    def reference() -> torch.Tensor:
        return x.double() @ plain_of(packed).T + (0 if bias is None else bias.double())

    sizes = f"{rows} x {kind.outputs} x {kind.inputs} {kind.code}"
    moved = bytes_of(packed) + rows * (kind.inputs + kind.outputs) * x.element_size()
    return Call(sizes, launch, reference, moved, 2 * rows * kind.outputs * kind.inputs)


def _streamed(inputs: Inputs, kinds: list[PackedKind], cuts: Iterable[tuple[int, StreamPackedShape]]) -> Sizes:
    if not inputs.hopper or inputs.dtype.itemsize != 2:
        return
    from kvern.kernels.stream_packed_hopper import streams

    for kind in dict.fromkeys(kind._replace(part="") for kind in kinds if kind.code in INTERLEAVED):
        packed = random_packed(inputs.without_device(), kind, 1)
        for rows, shape in cuts:
            if streams(packed, kind.inputs, shape, inputs.dtype):
                yield kind, rows, shape


def _launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    shapes = dict.fromkeys(itertools.chain(*STREAMS.values()))
    cuts = [(rows, shape) for shape in shapes for rows in {shape.rows, min(shape.rows, 96)}]  # of which kernels differ
    yield from _streamed(inputs, forms_of(inputs), cuts)


def _timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for rows, shapes in STREAMS.items():
        yield from _streamed(inputs, timed_kinds(inputs), [(rows, shapes[0])])


KERNELS = (Kernel("quantized, by streams on Hopper", "hopper_linear", _stream, _launched, _timed),)
