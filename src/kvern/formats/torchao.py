"""Checkpoints of torchao in safetensors: tensors of one byte, whose names begin with `_weight_`.

Source: `torchao/prototype/safetensors`, and the configurations of `torchao.quantization` as it writes them. Integers of
four bits are in the packing "plain" (`Int4Tensor`): `weight` (qdata) int8 [O, I / 2], two signed codes in a byte, the
low four bits the first; `weight_scale` and `weight_zero_point` [I / group, O]. A weight is code * scale + zero: a zero
is a weight, not a code. Other packings are in the order of the matrix units of some device.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvern.errors import UnsupportedModel
from kvern.formats.choice import EMBEDDINGS, HEAD, ROUTERS, paths_matching
from kvern.formats.fp8 import block_of, runs_of
from kvern.formats.groups import Form, GroupedFormat, GroupedMethod, check_group
from kvern.formats.method import MIDDLE
from kvern.formats.scaled import ROWS, TENSOR, Block, Rounding, Scaled
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import OUTPUTS, Axis, Part, TensorLayout
from kvern.spec.model import Rename


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


NAMES = (Rename(r"\._weight_qdata$", ".weight"), Rename(r"\._weight_(scale|zero_point)$", r".weight_\1"))
BY_NAME = {"FqnToConfig": "fqn_to_config", "ModuleFqnToConfig": "module_fqn_to_config"}
"""Configurations that list formats by layer."""


def torchao(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Reads the default format of linear layers and those of named ones; embeddings and head are plain by default."""
    described = quantization["quant_type"]
    described = described["default"] if isinstance(described, dict) and "default" in described else described
    ignored = paths_matching(quantization.get("modules_to_not_convert"), "modules_to_not_convert")
    plain = [ignored, ROUTERS, *([] if quantization.get("include_input_output_embeddings") else [EMBEDDINGS, HEAD])]
    named: Mapping[str, Any] = {}
    if described["_type"] in BY_NAME:
        named = dict(described["_data"][BY_NAME[described["_type"]]])
        described = named.pop("_default", None)
    rules = tuple(
        (paths_matching([name.removesuffix(".weight")], "quant_type"), _format(item, unquantized))
        for name, item in named.items()
    )
    return LinearMethods(
        _format(described, unquantized), (*rules, *((pattern, unquantized) for pattern in plain)), NAMES
    )


def _format(described: Mapping[str, Any] | None, unquantized: LinearFormat) -> LinearFormat:
    if described is None:
        return unquantized
    kind, data = described["_type"], described["_data"]
    if kind == "Int8WeightOnlyConfig":
        return Scaled("int8", _block(data), zeros=True, zeros_needed=False)
    if kind == "Int8DynamicActivationInt8WeightConfig":
        rounding = Rounding("int8", symmetric=_symmetric(data.get("act_mapping_type")))
        return Scaled("int8", _block(data), rounding, zeros=True, zeros_needed=False)
    if kind == "Float8WeightOnlyConfig":
        return Scaled("e4m3", _block(data))
    if kind == "Float8DynamicActivationFloat8WeightConfig":
        block = _block(data, TENSOR)
        return Scaled("e4m3", block, Rounding("e4m3", block.inputs))
    if kind in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        return _intx(kind, data)
    if kind == "Int4WeightOnlyConfig":
        return torchao_int4(data)
    raise UnsupportedModel(
        f"quantization_config: quant_type is {str(kind)[:60]!r}; of torchao kvern reads Int4WeightOnly, "
        "Int8WeightOnly, Int8DynamicActivationInt8Weight, Float8WeightOnly, Float8DynamicActivationFloat8Weight, "
        "IntxWeightOnly and Int8DynamicActivationIntxWeight"
    )


def _intx(kind: str, data: Mapping[str, Any]) -> Scaled:
    """Integers of up to 8 bits, each in one byte."""
    packing = _value(data.get("intx_packing_format", "UNPACKED_TO_INT8"))
    if packing != "UNPACKED_TO_INT8":
        raise UnsupportedModel(
            f"quantization_config: intx_packing_format is {str(packing)[:60]!r}; kvern reads UNPACKED_TO_INT8"
        )
    if kind == "IntxWeightOnlyConfig":
        return Scaled("int8", _block(data), zeros=True, zeros_needed=False)
    rounding = Rounding("int8", symmetric=_symmetric(data.get("act_mapping_type", "ASYMMETRIC")))
    block = _block({"granularity": data.get("weight_granularity")}, Block(1, 32))
    return Scaled("int8", block, rounding, zeros=True, zeros_needed=False)


def _block(data: Mapping[str, Any], default: Block = ROWS) -> Block:
    """The block of a granularity; of several, the last one belongs to the weights."""
    granularity = data.get("granularity")
    if isinstance(granularity, list | tuple):
        granularity = granularity[-1]
    if granularity is None:
        size = data.get("group_size")
        return default if size is None else runs_of(size)
    kind, inner = granularity["_type"], granularity.get("_data", {})
    if kind == "PerTensor":
        return TENSOR
    if kind == "PerRow" or (kind == "PerAxis" and inner.get("axis") == 0):
        return ROWS
    if kind == "PerGroup":
        return runs_of(inner["group_size"])
    block = block_of(inner.get("block_size")) if kind == "PerBlock" else None
    if block is None:
        raise UnsupportedModel(
            f"quantization_config: granularity is {str(kind)[:60]!r}; of torchao kvern reads PerTensor, PerRow, "
            "PerGroup and PerBlock"
        )
    return block


def _symmetric(mapping: object) -> bool:
    return _value(mapping) != "ASYMMETRIC"


def _value(item: object) -> object:
    """The value of an enumeration's entry, as torchao writes them."""
    return item["_data"] if isinstance(item, dict) else item
