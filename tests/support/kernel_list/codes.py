"""Products of codes of eight bits with the codes that activations become."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvern.formats.gpu.candidates import (
    CODES_CANDIDATES,
    CODES_STREAMS,
    CODES_TILES,
    CodesTiles,
    OfCodes,
    codes_candidates,
)
from kvern.formats.gpu.products import codes_product
from kvern.kernels.codes_hopper import tiles_codes
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.entry import Call, Inputs, Kernel, PackedKind
from tests.support.kernel_list.quantized import (
    bytes_of,
    codes_stream,
    forms_of,
    multiplies_by_codes,
    plain_of,
    random_packed,
    timed_kinds,
)

Sizes = Iterator[tuple[Any, ...]]


def _codes(spec: ModelSpec, inputs: Inputs, kind: PackedKind, rows: int, outputs: int, shape: OfCodes) -> Call:
    packed = random_packed(inputs, kind, outputs)
    bias = inputs.numbers(outputs) if kind.biased else None
    x = inputs.bytes(rows, kind.inputs)
    x = x.view(torch.int8) if kind.code == "int8" else (x & 0xBF).view(torch.float8_e4m3fn)
    runs = 1 if kind.group == kind.inputs else -(-kind.inputs // kind.group)
    scale = inputs.numbers(rows, runs, dtype=torch.float32, deviation=0.02 if kind.code == "int8" else 1.0)

    def reference() -> torch.Tensor:
        by = scale.double().repeat_interleave(kind.group, 1)[:, : kind.inputs]
        return (x.double() * by) @ plain_of(packed).T + (0 if bias is None else bias.double())

    launch = partial(codes_product, shape, x, scale, packed, bias, inputs.dtype)
    sizes = f"{rows} x {outputs} x {kind.inputs} {kind.code}"
    moved = bytes_of(packed) + x.numel() + rows * outputs * inputs.dtype.itemsize
    return Call(sizes, launch, reference, moved, 2 * rows * outputs * kind.inputs)


def _codes_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for kind in dict.fromkeys(kind._replace(part="") for kind in forms_of(inputs)):
        if multiplies_by_codes(kind, inputs):
            streams = codes_stream(kind, inputs)
            for most, shapes in CODES_CANDIDATES.items():
                for shape in () if streams and most in CODES_STREAMS else shapes:
                    yield kind, shape.rows + 2, kind.outputs, shape


def _streams_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    kinds: dict[PackedKind, PackedKind] = {}
    for kind in forms_of(inputs):  # how long whole rows are changes nothing
        alike = kind._replace(inputs=0, group=0) if kind.group == kind.inputs else kind
        kinds.setdefault(alike._replace(part=""), kind._replace(part=""))
    for kind in kinds.values():
        if codes_stream(kind, inputs):
            for shape in itertools.chain(*CODES_STREAMS.values()):
                yield kind, shape.rows - 1, kind.outputs, shape


def _streams_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for kind, rows in itertools.product(timed_kinds(inputs), CODES_STREAMS):
        if codes_stream(kind, inputs):
            yield kind, rows, kind.outputs, CODES_STREAMS[rows][0]


def _tiled(inputs: Inputs, kinds: list[PackedKind]) -> Iterator[PackedKind]:
    """Those whose codes are multiplied in tiles on Hopper GPUs."""
    for kind in dict.fromkeys(kind._replace(part="") for kind in kinds):
        if inputs.hopper and multiplies_by_codes(kind, inputs):
            packed = random_packed(inputs.without_device(), kind, 1)
            if tiles_codes(packed, kind.outputs, kind.inputs, inputs.dtype):
                yield kind


def _tiles_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    splits = dict.fromkeys(shape.splits for shape in itertools.chain(*CODES_TILES.values()))
    for kind, split in itertools.product(_tiled(inputs, forms_of(inputs)), splits):
        yield kind, 150, kind.outputs, CodesTiles(split, 1)  # another group compiles nothing else


def _tiles_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for kind, rows in itertools.product(_tiled(inputs, timed_kinds(inputs)), CODES_TILES):
        yield kind, rows, kind.outputs, CODES_TILES[rows][0]


def _codes_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for kind in timed_kinds(inputs):
        if multiplies_by_codes(kind, inputs):
            yield kind, 4096, kind.outputs, codes_candidates(4096)[0]


KERNELS = (
    Kernel("codes by codes", "quantized", _codes, _codes_launched, _codes_timed),
    Kernel("codes by codes on Hopper", "hopper_linear", _codes, _streams_launched, _streams_timed),
    Kernel("codes by codes on Hopper, many rows", "hopper_linear", _codes, _tiles_launched, _tiles_timed),
)
