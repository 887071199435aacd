"""Products of activations and weights that are both quantized to one byte."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvern.kernels.packed import Packed

DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class Scales(NamedTuple):
    """Inputs that share a scale of x and of the weights, 0: all of them; and the outputs that do."""

    x: int
    inputs: int
    outputs: int


WHOLE, BLOCKS, GROUPS = Scales(0, 0, 1), Scales(128, 128, 128), Scales(128, 0, 1)


class Product(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor
    weight: Packed
    bias: torch.Tensor
    expected: torch.Tensor


def _codes(code: str, generator: torch.Generator, *shape: int) -> torch.Tensor:
    if code == "int8":
        return torch.randint(-127, 128, shape, generator=generator, device=generator.device).to(torch.int8)
    numbers = torch.randn(shape, generator=generator, device=generator.device)
    return numbers.mul_(60).clamp_(-448, 448).to(torch.float8_e4m3fn)


def _spread(scale: torch.Tensor, outputs: int, inputs: int, per: int, group: int) -> torch.Tensor:
    return scale.double().repeat_interleave(per, 0)[:outputs].repeat_interleave(group or inputs, 1)[:, :inputs]


def product_of_codes(code: str, rows: int, outputs: int, inputs: int, form: Scales) -> Product:
    generator = torch.Generator("cuda").manual_seed(rows + outputs + inputs)

    def scales(lines: int, group: int) -> torch.Tensor:
        runs = -(-inputs // group) if group else 1
        return torch.rand(lines, runs, generator=generator, device="cuda") + 0.5

    x, codes = _codes(code, generator, rows, inputs), _codes(code, generator, outputs, inputs)
    x_scale, scale = scales(rows, form.x), scales(-(-outputs // form.outputs), form.inputs)
    bias = torch.randn(outputs, generator=generator, device="cuda", dtype=torch.bfloat16) * 60**2
    plain = codes.double() * _spread(scale, outputs, inputs, form.outputs, form.inputs)
    expected = (x.double() * _spread(x_scale, rows, inputs, 1, form.x)) @ plain.T
    weight = Packed(code, codes, scale, None, form.inputs or inputs, form.outputs)
    return Product(x, x_scale, weight, bias, expected)


def poison() -> None:
    """Fills the memory of the next outputs with NaN."""
    torch.full((1 << 24,), float("nan"), device="cuda")


def assert_overlap_changes_nothing(layers: Callable[[], torch.Tensor], x: torch.Tensor) -> None:
    """Launches of a graph give of the same `x`, on memory that was no number, what they give one by one."""
    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(10):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        found = out.clone()
        torch.cuda.synchronize()
        assert found.isfinite().all() and torch.equal(found, layers())
