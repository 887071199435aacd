"""Random quantized matrices of every code, with the plain numbers that they stand for."""

from typing import NamedTuple

import torch

from kvern.kernels.codes import NF4
from kvern.kernels.packed import Packed

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
KINDS = (
    *("e4m3 row", "e4m3 blocks", "int8 row", "int8 group", "int8 zero", "int4", "int4 zero", "int4 g32", "nf4"),
    *("mxfp4", "nvfp4", "q8_0", "q4_0"),
)


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
    if code in ("q8_0", "q4_0"):
        return _blocks(code, outputs, inputs, integers)
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


def _blocks(code: str, outputs: int, inputs: int, integers: object) -> Made:
    count = inputs // 32
    scale = (integers(1, 100, outputs, count) / 1000 / inputs**0.5).half()  # type: ignore[operator]
    half = scale.view(torch.uint8).view(outputs, count, 2)
    if code == "q8_0":
        values = integers(-127, 128, outputs, count, 32).to(torch.int8)  # type: ignore[operator]
        packed = torch.cat((half, values.view(torch.uint8)), -1)
        plain = values.double() * scale.double()[..., None] / 1
    else:
        bits = integers(0, 16, outputs, count, 32).to(torch.uint8)  # type: ignore[operator]
        packed = torch.cat((half, bits[..., :16] | bits[..., 16:] << 4), -1)
        plain = (bits.double() - 8) * scale.double()[..., None]
    return Made(Packed(code, packed.contiguous()), plain.flatten(1))


def to_device(packed: Packed, device: torch.device) -> Packed:
    return packed._make(item.to(device) if isinstance(item, torch.Tensor) else item for item in packed)
