"""Products with quantized weights, of the codes that a model stores."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvern.formats.gguf.header import BY_NAME
from kvern.formats.gguf.method import NUMBERS, GgufMethod, put_together, taken_apart
from kvern.formats.gpu.candidates import (
    BLOCK_STREAMS,
    PLAIN_RUNS,
    STREAMS,
    RowShape,
    Shape,
    beside,
    candidates_of,
    fitted,
    knows,
    one_way,
    row_shape,
)
from kvern.formats.gpu.products import multiply_row
from kvern.formats.method import QuantizedMethod
from kvern.kernels.arrange import arrange
from kvern.kernels.block_codes import BLOCKS
from kvern.kernels.codes import CODES, INTERLEAVED, readable
from kvern.kernels.linear import MatmulShape, StreamPackedShape
from kvern.kernels.packed import E2M1, NF4, Packed
from kvern.kernels.packed_product import packed_product
from kvern.kernels.plain_weights import plain_weights
from kvern.kernels.scaled_product import multiplies_codes
from kvern.kernels.stream_hopper import streams_codes
from kvern.layers.build import Build
from kvern.layers.embedding import Embedding
from kvern.layers.linear import Linear, Weighted
from kvern.layers.linear_method import LinearShape
from kvern.layers.row_experts import RowStackedExperts
from kvern.models.decoder import Decoder
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.dense import ACTIVATION, FEW_OUTPUTS, ROWS, gated_mlps
from tests.support.kernel_list.entry import ALONE_PRODUCT, Call, Inputs, Joined, Kernel, PackedKind, linear_shapes
from tests.support.kernel_list.experts import moes

Sizes = Iterator[tuple[Any, ...]]


FORMS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"code": "e4m3", "scale": "float32", "activations": "rows"},
    "fp8_blocks": {"code": "e4m3", "scale": "float32", "group": 128, "outputs_per_scale": 128}
    | {"activations": "groups"},
    "int8": {"code": "int8", "scale": "float32", "activations": "rows"},
    "int4": {"code": "int4", "scale": "float16", "group": 128},
    "int4_zero": {"code": "int4", "scale": "float16", "group": 128, "zero": "uint8"},
    "nf4": {"code": "nf4", "scale": "float32", "group": 64},
    "e2m1": {"code": "e2m1", "scale": "uint8", "group": 32},
    "nvfp4": {"code": "e2m1", "scale": "float8_e4m3fn", "group": 16, "factor": True},
    **{name: {"code": name} for name in BLOCKS},
}
"""What is timed, by name, whether a model stores it or not. Without a group, rows have a scale."""


def packed_kinds(spec: ModelSpec, build: Build) -> tuple[PackedKind, ...]:
    """The matrices that a model, built so, multiplies by and stores quantized, each kind once."""
    layers = tuple(dataclasses.replace(layer, rope=None) for layer in spec.layers)
    outline = Decoder(dataclasses.replace(spec, layers=layers), build)
    kinds: dict[PackedKind, None] = {}
    for module in outline.modules():
        if isinstance(module, Weighted) and not isinstance(module, Embedding):
            added = module.added if isinstance(module, Linear) else module.bias
            for method in module.method.methods():
                if isinstance(method, QuantizedMethod) and method.shape.dtype == build.dtype:
                    kinds[_kind(method, next(iter(module.outputs)), added is not None)] = None
        elif isinstance(module, RowStackedExperts):
            kinds[_kind(module.gate_up_proj, "experts.gate_up_proj", False)] = None
            kinds[_kind(module.down_proj, "experts.down_proj", False)] = None
    return tuple(kinds)


def _kind(method: QuantizedMethod, part: str, biased: bool) -> PackedKind:
    packed = method.packed()
    shape = method.shape
    coding = method.activation_codes()
    activations = ""
    if coding is not None:
        activations = "groups" if coding.group else "rows" if coding.static is None else "static"

    def dtype_of(item: torch.Tensor | None) -> str:
        return "" if item is None else str(item.dtype).removeprefix("torch.")

    return PackedKind(
        part,
        shape.outputs,
        shape.inputs,
        packed.code,
        packed.group,
        packed.outputs_per_scale,
        dtype_of(packed.scale),
        dtype_of(packed.zero),
        packed.factor is not None,
        packed.order is not None,
        biased,
        activations,
    )


def kinds_of_forms(spec: ModelSpec, dtype: torch.dtype, forms: Sequence[str]) -> tuple[PackedKind, ...]:
    """The matrices of a model's layers and experts, if they were stored in each of some `FORMS`."""
    kinds = [
        kind_of_form(
            form, sum(layer.outputs), layer.inputs, "q_proj" if layer.inputs == spec.hidden_size else "down_proj"
        )
        for form in forms
        for layer in linear_shapes(spec, dtype)
        if layer.inputs % whole_inputs(FORMS[form]["code"]) == 0
    ]
    for moe, form in itertools.product(moes(spec), forms):
        if math.gcd(moe.width, spec.hidden_size) % whole_inputs(FORMS[form]["code"]) == 0:
            both = (
                kind_of_form(form, moe.experts * 2 * moe.width, spec.hidden_size, "experts.gate_up_proj"),
                kind_of_form(form, moe.experts * spec.hidden_size, moe.width, "experts.down_proj"),
            )
            rows = math.gcd(both[0].outputs_per_scale, moe.width, spec.hidden_size)
            kinds += [kind._replace(outputs_per_scale=rows) for kind in both]
    return tuple(kinds)


def whole_inputs(code: str) -> int:
    """A row has a multiple of so many inputs."""
    return BY_NAME[code].numbers if code in BLOCKS else CODES[code].block


def kind_of_form(form: str, outputs: int, inputs: int, part: str = "") -> PackedKind:
    """A matrix that is stored in one of `FORMS`."""
    kind = PackedKind(part, outputs, inputs, "")._replace(**FORMS[form])
    return kind if kind.group or not kind.scale else kind._replace(group=inputs)


def random_packed(inputs: Inputs, kind: PackedKind, outputs: int) -> Packed:
    """Random codes, and numbers of about one over the root of the inputs; no bits that are no number."""
    if kind.code in BLOCKS:
        return _random_blocks(inputs, kind, outputs)
    codes = inputs.bytes(outputs, kind.inputs // CODES[kind.code].planes)
    if kind.code == "e4m3":
        codes = (codes & 0xBF).view(torch.float8_e4m3fn)
    elif kind.code == "int8":
        codes = codes.view(torch.int8)
    groups = -(-outputs // kind.outputs_per_scale), -(-kind.inputs // kind.group)
    spread = kind.inputs**-0.5 * {"int8": 0.02, "int4": 0.1}.get(kind.code, 1.0)
    dtype = getattr(torch, kind.scale)
    if dtype == torch.uint8:
        scale = inputs.bytes(*groups) % 4 + 118
    else:
        scale = (inputs.numbers(*groups, dtype=torch.float32).abs() * spread + spread).to(dtype)
    zero = (inputs.bytes(*groups) & 15).to(getattr(torch, kind.zero)) if kind.zero else None
    order = inputs.permutation(kind.inputs) if kind.order else None
    factor = inputs.numbers(outputs, dtype=torch.float32) if kind.factor else None
    return Packed(kind.code, codes, scale, zero, kind.group, kind.outputs_per_scale, order, factor)


def _random_blocks(inputs: Inputs, kind: PackedKind, outputs: int) -> Packed:
    method = GgufMethod(LinearShape(outputs, kind.inputs, inputs.dtype, inputs.device), BY_NAME[kind.code])
    inputs.fill(method)
    return Packed(kind.code, *taken_apart(kind.code, method.weight))


def plain_of(packed: Packed) -> torch.Tensor:
    """The matrix in float64."""
    codes, outputs = packed.codes, len(packed.codes)
    if packed.code in BLOCKS and packed.scale is not None:
        blocks = put_together(packed.code, codes, packed.scale)
        return NUMBERS[packed.code](blocks.flatten(0, 1)).view(outputs, -1).double()
    if packed.code in INTERLEAVED:
        halves = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        table = {"nf4": NF4, "e2m1": E2M1}.get(packed.code)
        plain = halves.double()
        if table is not None:
            plain = torch.tensor(table, dtype=torch.float64, device=codes.device)[halves.long()]
    else:
        plain = codes.double()
    inputs = plain.shape[1]

    def spread(scale: torch.Tensor) -> torch.Tensor:
        rows = scale.double().repeat_interleave(packed.outputs_per_scale, 0)[:outputs]
        return rows.repeat_interleave(packed.group, 1)[:, :inputs]

    if packed.zero is not None:
        plain -= spread(packed.zero)
    elif packed.code == "int4":
        plain -= 8
    assert packed.scale is not None
    scale = packed.scale.double()
    plain *= spread(2.0 ** (scale - 127) if packed.scale.dtype == torch.uint8 else scale)
    if packed.factor is not None:
        plain *= packed.factor.double()[:, None]
    return plain if packed.order is None else plain[:, packed.order.long().argsort()]


def bytes_of(packed: Packed) -> int:
    """Of codes and what stands beside them."""
    return sum(item.nbytes for item in packed if isinstance(item, torch.Tensor))


def one_row(
    spec: ModelSpec,
    inputs: Inputs,
    kind: PackedKind,
    outputs: int,
    shape: RowShape,
    joined: Joined = ALONE_PRODUCT,
) -> Call:
    packed, x = random_packed(inputs, kind, outputs), inputs.numbers(1, kind.inputs)
    bias = inputs.numbers(outputs) if kind.biased else None
    around, activation = inputs.around(spec, joined, kind.inputs, outputs), joined.activation

    def reference() -> torch.Tensor:
        row = x.double()
        if around.gain is not None:
            row = row / (row.square().mean(-1, keepdim=True) + 1e-6).sqrt() * around.gain.double()
        out = row @ plain_of(packed).T + (0 if bias is None else bias.double())
        if activation is not None:
            gate, up = out.chunk(2, -1)
            out = ACTIVATION[activation](gate) * up
        return out if around.residual is None else out + around.residual.double()

    def launch() -> torch.Tensor:
        row = x if packed.order is None else arrange(x, packed.order, "")
        return multiply_row(row, readable(packed), bias, shape, around)

    sizes = f"{outputs} x {kind.inputs} {kind.code}"
    return Call(sizes, launch, reference, bytes_of(packed), 2 * outputs * kind.inputs)


def _product(spec: ModelSpec, inputs: Inputs, kind: PackedKind, rows: int, outputs: int, shape: MatmulShape) -> Call:
    packed, x = random_packed(inputs, kind, outputs), inputs.numbers(rows, kind.inputs)
    bias = inputs.numbers(outputs) if kind.biased else None
    counters, apart = inputs.zeros(outputs), kind.code in INTERLEAVED

    def launch() -> torch.Tensor:
        values = arrange(x, packed.order, "planes" if apart else "") if apart or kind.order else x
        return packed_product(values, readable(packed), bias, shape, counters)

    def reference() -> torch.Tensor:
        return x.double() @ plain_of(packed).T + (0 if bias is None else bias.double())

    sizes = f"{rows} x {outputs} x {kind.inputs} {kind.code}"
    moved = bytes_of(packed) + rows * (kind.inputs + outputs) * x.element_size()
    return Call(sizes, launch, reference, moved, 2 * rows * outputs * kind.inputs)


def _plain(spec: ModelSpec, inputs: Inputs, kind: PackedKind) -> Call:
    packed = random_packed(inputs, kind, kind.outputs)
    out = torch.empty(kind.outputs, kind.inputs, dtype=inputs.dtype, device=inputs.device)
    launch = partial(plain_weights, readable(packed), 0, out)
    return Call(
        f"{kind.outputs} x {kind.inputs} {kind.code}", launch, lambda: plain_of(packed), bytes_of(packed) + out.nbytes
    )


def _plain_forms(kinds: list[PackedKind]) -> Sizes:
    for kind in dict.fromkeys(kind._replace(part="", order=False, biased=False, activations="") for kind in kinds):
        yield (kind,)


def joined_by(spec: ModelSpec, inputs: Inputs, kind: PackedKind) -> Iterator[Joined]:
    """What products of one row do besides, in layers where they do more than multiply."""
    if kind.part in ("o_proj", "down_proj"):
        yield Joined(residual=True)
    elif kind.part == "q_proj":
        yield Joined(norm=True)
    elif kind.part == "gate_proj":
        norms = (True, False) if inputs.ranks[1] > 1 else (True,)  # those that sum over ranks are launched alone
        yield from (Joined(norm, mlp.activation) for mlp in gated_mlps(spec) for norm in norms)


def _dense(inputs: Inputs) -> list[PackedKind]:
    """All but those of experts."""
    return [kind for kind in inputs.packed if not kind.part.startswith("experts.")]


def forms_of(inputs: Inputs) -> list[PackedKind]:
    """One of those that kernels are compiled alike for, with few outputs."""
    alike: dict[tuple[Any, ...], PackedKind] = {}
    for kind in _dense(inputs):
        few = min(kind.outputs, FEW_OUTPUTS + kind.outputs % 16)
        alike.setdefault(kind._replace(outputs=few), kind._replace(outputs=few))
    return list(alike.values())


def _row_shapes(inputs: Inputs, kind: PackedKind, activated: bool = False) -> list[RowShape]:
    """How one row may be multiplied by such a matrix."""
    known = kind.code, kind.group, kind.inputs, inputs.device
    offered = (shape for shape in candidates_of(inputs.dtype)[1] if knows(shape, *known))
    return list(dict.fromkeys(row_shape(shape, kind.code, activated) for shape in offered))


def _row_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    launched: dict[tuple[Any, ...], None] = {}
    for kind in forms_of(inputs):
        for joined in (ALONE_PRODUCT, *(() if kind.order else joined_by(spec, inputs, kind))):
            for shape in _row_shapes(inputs, kind, joined.activation is not None):
                launched[kind._replace(part=""), kind.outputs, shape, joined] = None
    yield from launched


def _product_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    launched: dict[tuple[Any, ...], None] = {}
    for kind in forms_of(inputs):
        shapes = itertools.chain.from_iterable(
            ((rows, shape) for shape in shapes) for rows, shapes in offered(kind, inputs).items()
        )
        for rows, shape in (*shapes, (ROWS, one_way(inputs.dtype))):
            if isinstance(shape, MatmulShape):
                launched[kind._replace(part=""), min(rows, 256), kind.outputs, fitted(shape, kind.code)] = None
    yield from launched


def _plain_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    made_plain = (kind for kind in forms_of(inputs) if PLAIN_RUNS in itertools.chain(*offered(kind, inputs).values()))
    yield from _plain_forms(list(made_plain))


def offered(kind: PackedKind, inputs: Inputs) -> Mapping[int, tuple[Shape, ...]]:
    """The ways for weights of any code that the tuner may choose for a matrix, by the most rows."""
    streams, codes = stream_shapes(kind, inputs), codes_stream(kind, inputs)
    return {
        rows: shapes if rows == 1 else beside(shapes, bool(streams.get(rows)), codes)
        for rows, shapes in candidates_of(inputs.dtype).items()
    }


def stream_shapes(kind: PackedKind, inputs: Inputs) -> Mapping[int, tuple[StreamPackedShape, ...]]:
    """How the kernels for packed weights on Hopper GPUs may multiply by a matrix, by the most rows."""
    if not inputs.hopper or inputs.dtype.itemsize != 2 or kind.code not in INTERLEAVED:
        return {}
    from kvern.kernels.stream_blocks_hopper import streams_blocks
    from kvern.kernels.stream_packed_hopper import streams

    packed, blocks = random_packed(inputs.without_device(), kind, 1), kind.code in BLOCKS

    def fits(shape: StreamPackedShape) -> bool:
        return streams_blocks(kind.code, shape) if blocks else streams(packed, kind.inputs, shape, inputs.dtype)

    offered = BLOCK_STREAMS if blocks else STREAMS
    return {rows: tuple(shape for shape in shapes if fits(shape)) for rows, shapes in offered.items()}


def codes_stream(kind: PackedKind, inputs: Inputs) -> bool:
    """Whether the kernel for codes by codes on Hopper GPUs may multiply by a matrix."""
    known = inputs.hopper and multiplies_by_codes(kind, inputs)
    return known and streams_codes(kind.code, kind.group, kind.outputs, kind.inputs)


def multiplies_by_codes(kind: PackedKind, inputs: Inputs) -> bool:
    """Whether activations become codes that may be multiplied by such codes."""
    return (
        bool(kind.activations)
        and not kind.zero
        and multiplies_codes(kind.code, [kind.group], kind.inputs, inputs.device)
    )


def timed_kinds(inputs: Inputs) -> list[PackedKind]:
    """Those whose speed counts."""
    return list(dict.fromkeys(kind._replace(part="") for kind in _dense(inputs) if kind.part != "lm_head"))


def _row_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((kind, kind.outputs, shape) for kind in timed_kinds(inputs) for shape in _row_shapes(inputs, kind))


def _product_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    candidates = candidates_of(inputs.dtype)
    for kind, rows in itertools.product(timed_kinds(inputs), (8, 32, 64, 4096)):
        most = min((most for most in candidates if most >= rows), default=max(candidates))
        shape = candidates[most][0]
        if isinstance(shape, MatmulShape):
            yield kind, rows, kind.outputs, fitted(shape, kind.code)


KERNELS = (
    Kernel("quantized, one row", "quantized", one_row, _row_launched, _row_timed),
    Kernel("quantized, several rows", "quantized", _product, _product_launched, _product_timed),
    Kernel(
        "quantized, made plain",
        "quantized",
        _plain,
        _plain_launched,
        lambda spec, inputs: _plain_forms(timed_kinds(inputs)),
    ),
)
