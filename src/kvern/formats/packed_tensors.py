"""The packed forms of compressed-tensors: codes of 4 or 8 bits in words or bytes, with scales in groups.

"pack-quantized": `weight_packed` int32 [O, I / n] of n codes each, the lowest bits first, in which 0 is the least
signed number; `weight_scale` [O, groups]; if not symmetric `weight_zero_point` int32 [O / n, groups], packed in the
same way along outputs; `weight_shape`; with activation ordering `weight_g_idx`. FP4 forms hold the tensors that `fp4`
reads.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.errors import UnsupportedModel
from kvern.formats.fp4 import MX, NV, fp4_format
from kvern.formats.groups import (
    Form,
    GroupedFormat,
    GroupedMethod,
    check_group,
    signed,
    unpack_pairs,
    words_to_bytes,
)
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import INPUTS, OUTPUTS, Axis, Part, TensorLayout

PACKED_FORMS = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


class PackQuantizedMethod(GroupedMethod):
    """A matrix in the form "pack-quantized"."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        form, codes = self.form, 4 if self.form.code == "int8" else 8
        layouts = {
            "weight_packed": TensorLayout(torch.int32, (OUTPUTS, Axis("inputs", codes))),
            "weight_scale": TensorLayout(form.scale, (OUTPUTS, self.groups)),
            "weight_shape": TensorLayout(torch.int64, (Axis("others", 2),), needed=False),
            "weight_g_idx": TensorLayout(torch.int32, (INPUTS,), needed=form.ordered),
        }
        if form.zero:
            layouts["weight_zero_point"] = TensorLayout(torch.int32, (Axis("outputs", codes), self.groups))
        return layouts

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        tensor = tensor.to(self.shape.device)
        wide = self.form.code == "int8"
        if kind == "weight_packed":
            codes = words_to_bytes(tensor)
            self.put("codes", signed(codes) if wide else codes, part, first_row)
        elif kind == "weight_scale":
            self.put("scale", tensor, part, first_row)
        elif kind == "weight_zero_point":
            stored = words_to_bytes(tensor.t())
            zero = (signed(stored) if wide else unpack_pairs(stored)).t()
            self.put("zero", zero, part, first_row * (4 if wide else 8))
        elif kind == "weight_g_idx":
            self.put_group_index(tensor, part, first_row)
        elif len(tensor) == 2 and (tensor[0] < part.outputs.stop or tensor[1] < part.inputs.stop):
            raise ValueError(f"it is {tensor.tolist()}, the weight has {[part.outputs.stop, part.inputs.stop]}")


def packed_format(weights: Mapping[str, Any], input_activations: Mapping[str, Any] | None, form: str) -> LinearFormat:
    """The format of layers whose scheme has these `weights` and `input_activations`, in one of `PACKED_FORMS`.

    Activations are not rounded. Raises UnsupportedModel.
    """
    if form == "pack-quantized":
        return _pack_quantized(weights)
    bits = weights.get("num_bits")
    kind = weights.get("type")
    group = weights.get("group_size")
    nvidia = form == "nvfp4-pack-quantized"
    if form not in PACKED_FORMS or bits != 4 or kind != "float" or group != (16 if nvidia else 32):
        raise UnsupportedModel(
            f"compressed-tensors weights of the format {form!r:.40} with {bits!r:.20} bits of type {kind!r:.20} in "
            f"groups of {group!r:.20} are not supported"
        )
    return fp4_format(
        form,
        NV if nvidia else MX,
        ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
        divides=True,
    )


def _pack_quantized(weights: Mapping[str, Any]) -> LinearFormat:
    bits = weights.get("num_bits")
    kind = weights.get("type", "int")
    strategy = weights.get("strategy")
    if bits not in (4, 8) or kind != "int":
        raise UnsupportedModel(
            f"compressed-tensors weights of {bits!r:.20} bits of type {kind!r:.20} are not supported in the format "
            "pack-quantized: integers of 4 and 8 are"
        )
    group = weights.get("group_size")
    if strategy not in ("group", "channel", None) or (strategy == "group" and group is None):
        raise UnsupportedModel(
            f"compressed-tensors weights of the strategy {strategy!r:.40} with group_size {group!r:.20} are not "
            "supported in the format pack-quantized: 'group' with a group_size, and 'channel', are"
        )
    group = check_group("the compressed-tensors configuration", -1 if strategy == "channel" or group is None else group)
    ordered = weights.get("actorder") in ("group", "dynamic", True) and group != -1
    made = Form(
        "int8" if bits == 8 else "int4",
        group,
        torch.bfloat16,
        zero=not weights.get("symmetric", True),
        ordered=ordered,
    )
    make = partial(PackQuantizedMethod, form=made)
    return GroupedFormat("pack-quantized", make, group, per_word=32 // bits, joins=not ordered)
