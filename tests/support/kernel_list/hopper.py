"""Products by the kernels for Hopper GPUs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvern.kernels.linear import ProductShape, StreamShape
from kvern.kernels.moe import hopper_experts
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.dense import ACTIVATION, gated_mlps
from tests.support.kernel_list.entry import Call, Inputs, Kernel
from tests.support.kernel_list.experts import blocks, bytes_of_expert, make_experts, plain_experts, width_of_rows

Sizes = Iterator[tuple[Any, ...]]


def _product(
    spec: ModelSpec,
    inputs: Inputs,
    rows: int,
    outputs: int,
    width: int,
    shape: StreamShape | ProductShape,
    activation: str | None,
) -> Call:
    from kvern.kernels.product_hopper import product
    from kvern.kernels.stream_hopper import stream_product

    x, weight = inputs.numbers(rows, width), inputs.numbers(outputs, width, deviation=width**-0.5)
    if isinstance(shape, StreamShape):
        launch = partial(stream_product, x, weight, None, shape, inputs.zeros(outputs), activation)
    else:
        launch = partial(product, x, weight, None, shape, activation)

    def reference() -> torch.Tensor:
        out = x.double() @ weight.double().T
        if activation is None:
            return out
        gate, up = out.chunk(2, -1)
        return ACTIVATION[activation](gate) * up

    moved = (weight.numel() + x.numel() + rows * outputs) * x.element_size()
    return Call(f"{rows} x {outputs} x {width}", launch, reference, moved, 2 * rows * weight.numel())


def _fits(spec: ModelSpec, inputs: Inputs) -> bool:
    return inputs.hopper and inputs.dtype.itemsize == 2 and spec.hidden_size % 8 == 0


def _product_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if _fits(spec, inputs):
        from kvern.layers.tuned_linear import GATED_ALONE, OWN, can_gate

        quantized = any(kind.part == "gate_proj" for kind in inputs.packed)
        gated = () if quantized else tuple(dict.fromkeys(mlp.activation for mlp in gated_mlps(spec)))
        for rows, shapes in OWN.items():
            if rows <= 256:  # with more, shapes compile nothing else
                for shape in shapes:
                    # Beside adapters gate and up are multiplied as they are, in the way that was chosen for both.
                    plainly = rows not in GATED_ALONE or inputs.adapter_rank > 0
                    known = (*((None,) if plainly else ()), *(gated if can_gate(shape) else ()))
                    yield from ((rows, 512, spec.hidden_size, shape, activation) for activation in known)


def _product_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if _fits(spec, inputs):
        from kvern.layers.tuned_linear import OWN

        for mlp in gated_mlps(spec)[:1]:
            for rows, shapes in OWN.items():
                yield rows, 2 * mlp.width, spec.hidden_size, shapes[-1], mlp.activation
                yield rows, spec.hidden_size, mlp.width, shapes[0], None


def _experts_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe in plain_experts(spec, inputs):
        known = hopper_experts(inputs.dtype, width_of_rows(spec, moe), moe.width)
        if inputs.hopper and known and moe.has_plain_gate:
            tokens = blocks(moe, inputs.batch_tokens, bytes_of_expert(spec, inputs, moe))
            yield from ((moe, count, True) for count in tokens)


def _experts_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe in dict.fromkeys(moe for moe, *_ in _experts_launched(spec, inputs)):
        yield from ((moe, tokens, True) for tokens in (32, 256, 8192))


KERNELS = (
    Kernel("product on Hopper", "hopper_linear", _product, _product_launched, _product_timed),
    Kernel("experts on Hopper", "hopper_linear", make_experts, _experts_launched, _experts_timed),
)
