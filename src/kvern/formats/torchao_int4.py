"""Integers of four bits as torchao stores them in its packing "plain" (`Int4Tensor`).

A matrix of O outputs and I inputs is `weight` (qdata) int8 [O, I / 2], two signed codes in a byte, the low four bits
the first; `weight_scale` and `weight_zero_point` [I / group, O]. A weight is code * scale + zero: a zero is a weight,
not a code. Other packings are in the order of the matrix units of some device.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvern.errors import UnsupportedModel
from kvern.formats.groups import MIDDLE, Form, GroupedFormat, GroupedMethod, check_group
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import OUTPUTS, Axis, Part, TensorLayout


class PlainInt4Method(GroupedMethod):
    """A matrix of a torchao checkpoint, whose zeros are converted to fractional codes after loading.

    The zeros are float16, off by less than 1/256 of a code, which is less than the rounding error of bfloat16 weights.
    """

    def layouts(self) -> Mapping[str, TensorLayout]:
        groups = (self.groups, OUTPUTS)
        return {
            "weight": TensorLayout(torch.int8, (OUTPUTS, Axis("inputs", 2))),
            "weight_scale": TensorLayout(self.form.scale, groups),
            "weight_zero_point": TensorLayout(self.form.scale, groups),
        }

    def storage(self) -> Mapping[str, TensorLayout]:
        storage = super().storage()
        return {**storage, "zero": storage["zero"]._replace(dtype=self.form.scale)}

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind == "weight":
            codes = tensor.to(self.shape.device).view(torch.uint8)
            self.put("codes", codes ^ 0x88, part, first_row)
        else:
            name = "scale" if kind == "weight_scale" else "zero"
            self.put(name, tensor.to(self.shape.device).t(), part, first_row, along=1)

    def fill_random(self, generator: torch.Generator) -> None:
        super().fill_random(generator)
        assert self.zero is not None
        self.zero.zero_()

    def finish(self) -> None:
        assert self.zero is not None
        zero = (MIDDLE["int4"] - self.zero.float() / self.scale.float()).half()
        if not (zero.is_meta or bool(zero.isfinite().all())):
            raise ValueError("a group has a zero point and no scale")
        self.zero = nn.Parameter(zero, requires_grad=False)
        super().finish()


def torchao_int4(data: Mapping[str, Any]) -> LinearFormat:
    """The format of layers with an `Int4WeightOnlyConfig` with this `_data`.

    Raises UnsupportedModel.
    """
    packing = data.get("int4_packing_format", "plain")
    packing = packing.get("_data") if isinstance(packing, Mapping) else packing
    if str(packing).lower() != "plain":
        raise UnsupportedModel(
            f"torchao weights of the int4_packing_format {packing!r:.40} are not supported: 'plain' is; quantize the "
            "model with it"
        )
    group = check_group("the torchao configuration", data.get("group_size", 128))
    make = partial(PlainInt4Method, form=Form("int4", group, torch.bfloat16, zero=True))
    return GroupedFormat("INT4 of torchao", make, group)
