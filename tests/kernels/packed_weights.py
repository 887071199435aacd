"""Random quantized matrices of every code, with the plain numbers that they stand for."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.formats.gguf.header import BY_NAME, QUANTIZED
from kvern.formats.gguf.method import HALF_SCALES, NUMBERS, GgufMethod, taken_apart
from kvern.formats.method import QuantizedMethod
from kvern.kernels.packed import E2M1, NF4, Packed
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import LinearMethod, LinearShape, TensorLayout

KINDS = (
    *("e4m3 row", "e4m3 blocks", "int8 row", "int8 group", "int8 zero", "int4", "int4 zero", "int4 g32", "nf4"),
    *("mxfp4", "nvfp4", *(f"gguf {name}" for name in NUMBERS)),
)


LARGE_BLOCKS = tuple(f"gguf {item.name}" for item in QUANTIZED.values() if item.numbers == 256)


class Made(NamedTuple):
    packed: Packed
    plain: torch.Tensor


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()


def _spread(scale: torch.Tensor, outputs: int, inputs: int, per: int, group: int) -> torch.Tensor:
    return scale.double().repeat_interleave(per, 0)[:outputs].repeat_interleave(group, 1)[:, :inputs]


def make_packed(kind: str, outputs: int, inputs: int, group: int = 64, order: bool = False, seed: int = 0) -> Made:
    """`plain [outputs, inputs]` float64 multiplies x as it comes, also with an `order`."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    code, _, form = kind.partition(" ")
    if code == "gguf":
        return _blocks(form, outputs, inputs, generator)
    per = 1
    if form == "row":
        group = inputs
    elif form == "blocks":
        group = per = 128
    elif form == "g32" or code == "mxfp4":
        group = 32
    elif code == "nvfp4":
        group = 16
    shape = -(-outputs // per), -(-inputs // group)
    scale = (torch.rand(shape, generator=generator) + 0.5) / inputs**0.5
    zero = factor = None
    if code == "e4m3":
        codes = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        values = codes.double()
    elif code == "int8":
        codes = integers(-127, 128, outputs, inputs).to(torch.int8)
        values, scale = codes.double(), scale / 64
        zero = integers(-9, 9, *shape).to(torch.int8) if form == "zero" else None
        values = values - (0 if zero is None else _spread(zero, outputs, inputs, per, group))
    else:
        bits = integers(0, 16, outputs, inputs).to(torch.uint8)
        codes = _nibbles(bits)
        if code == "int4":
            zero = integers(0, 16, *shape).to(torch.uint8) if form == "zero" else None
            values = bits.double() - (8 if zero is None else _spread(zero, outputs, inputs, per, group))
            scale /= 5
        else:
            values = torch.tensor(NF4 if code == "nf4" else E2M1, dtype=torch.float64)[bits.long()]
    code = {"mxfp4": "e2m1", "nvfp4": "e2m1"}.get(code, code)
    factors = scale.double()
    if kind == "mxfp4":
        scale = integers(118, 124, *shape).to(torch.uint8)
        factors = 2.0 ** (scale.double() - 127)
    elif kind == "nvfp4":
        scale = (scale * 50).to(torch.float8_e4m3fn)
        factors = scale.double()
        factor = torch.rand(outputs, generator=generator) / 40
        values = values * factor.double()[:, None]
    plain = values * _spread(factors, outputs, inputs, per, group)
    places = None
    if order:
        places = torch.randperm(inputs, generator=generator).int()
        plain = plain[:, places.long().argsort()]
    return Made(Packed(code, codes, scale, zero, group, per, places, factor), plain)


def _blocks(name: str, outputs: int, inputs: int, generator: torch.Generator) -> Made:
    """Random blocks of GGUF's."""
    shape = LinearShape(outputs, inputs, torch.float32, torch.device("cpu"))
    method = GgufMethod(shape, BY_NAME[name])
    method.fill_random(generator)
    for at, scale in HALF_SCALES[name]:
        halves = (torch.rand(*method.weight.shape[:2], 1, generator=generator) + 0.5) * scale * 10
        method.weight[..., at : at + 2] = halves.half().view(torch.uint8)
    if name == "mxfp4":
        method.weight[..., 0] = torch.randint(118, 124, method.weight.shape[:2], generator=generator)
    return Made(Packed(name, *taken_apart(name, method.weight)), method.dequantize().double())


def to_device(packed: Packed, device: torch.device) -> Packed:
    return packed._make(item.to(device) if isinstance(item, torch.Tensor) else item for item in packed)


class MadeMethod(QuantizedMethod):
    """A made matrix."""

    name = "made"

    def __init__(self, shape: LinearShape, made: Made) -> None:
        self.made = made
        self.plain = made.plain.to(shape.device, shape.dtype)
        super().__init__(shape)

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {}

    def storage(self) -> Mapping[str, TensorLayout]:
        return {} if self.made.packed.order is None else {"order": TensorLayout(torch.int32, ())}

    def rows(self, index: Tensor | slice) -> Tensor:
        return self.plain[index]

    def packed(self) -> Packed:
        return to_device(self.made.packed, self.shape.device)


class MadeFormat(LinearFormat):
    def __init__(self, made: Made) -> None:
        self.made = made

    def linear(self, shape: LinearShape, build: Build) -> LinearMethod:
        return MadeMethod(shape, self.made)


def made_layer(made: Made, device: torch.device, kernels: bool = True, deterministic: bool = False) -> Linear:
    groups = frozenset({"quantized"} if kernels else ())
    outputs, inputs = made.plain.shape
    build = Build(torch.float32, device, 1, groups, deterministic, linear=LinearMethods(MadeFormat(made)))
    return Linear(inputs, {"o_proj": outputs}, build)
