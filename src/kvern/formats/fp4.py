"""FP4 weights: 4-bit numbers (E2M1) in groups with a scale.

MXFP4 (OCP Microscaling Formats 1.0) has groups of 32 with powers of two as scales. NVFP4 has groups of 16 with e4m3
scales, and one factor for the whole weight. In both a byte has two inputs, the first in its low four bits. Activations
are not rounded, whatever a checkpoint says: no card below compute capability 10.0 multiplies FP4.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.formats.choice import all_but, paths_matching
from kvern.formats.groups import Form, GroupedFormat, GroupedMethod
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import OUTPUTS, Axis, LinearShape, Part, TensorLayout

MX = Form("e2m1", 32, torch.uint8)
NV = Form("e2m1", 16, torch.float8_e4m3fn, factor=True)


class Mxfp4Blocks(GroupedMethod):
    """MXFP4 as `blocks` uint8 [outputs, groups, 16] and `scales` uint8 [outputs, groups]."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        groups = Axis("inputs", 32)
        return {
            "blocks": TensorLayout(torch.uint8, (OUTPUTS, groups, Axis("others", 16))),
            "scales": TensorLayout(torch.uint8, (OUTPUTS, groups)),
        }

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind == "blocks":
            self.put("codes", tensor.flatten(1), part, first_row)
        else:
            self.put("scale", tensor, part, first_row)


class Fp4Method(GroupedMethod):
    """Codes, their scales, and perhaps a factor and the activations' scale, by the names that a tool gives them.

    `divides`: the factor is that of quantization, by which weights are divided.
    """

    def __init__(self, shape: LinearShape, form: Form, names: tuple[str, str, str, str], divides: bool = False) -> None:
        self._names = names
        super().__init__(shape, form)
        self._divides = divides

    def layouts(self) -> Mapping[str, TensorLayout]:
        codes, scale, factor, activations = self._names
        layouts = {
            codes: TensorLayout(torch.uint8, (OUTPUTS, Axis("inputs", 2))),
            scale: TensorLayout(self.form.scale, (OUTPUTS, Axis("inputs", self.group))),
            activations: TensorLayout(torch.float32, (), needed=False),
        }
        return layouts | ({factor: TensorLayout(torch.float32, ())} if self.form.factor else {})

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        codes, scale, factor, _ = self._names
        if kind == codes:
            self.put("codes", tensor, part, first_row)
        elif kind == scale:
            self.put("scale", tensor, part, first_row)
        elif kind == factor:
            self.put_factor(tensor, part, self._divides)


def fp4_format(name: str, form: Form, names: tuple[str, str, str, str], *, divides: bool = False) -> LinearFormat:
    """The format that makes an `Fp4Method` of any matrix."""
    return GroupedFormat(name, partial(Fp4Method, form=form, names=names, divides=divides), form.group)


def modelopt_nvfp4(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearFormat:
    """NVFP4 as modelopt writes it: `weight`, `weight_scale`, `weight_scale_2` and perhaps `input_scale`."""
    return fp4_format("NVFP4", NV, ("weight", "weight_scale", "weight_scale_2", "input_scale"))


def mxfp4(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """The quantized layers of an MXFP4 model: its experts, and all linear layers except those listed."""
    quantized = GroupedFormat("MXFP4", partial(Mxfp4Blocks, form=MX), MX.group)
    names = quantization.get("modules_to_not_convert")
    plain = paths_matching(("self_attn",) if names is None else names, "modules_to_not_convert")
    return all_but([plain], quantized, unquantized)
