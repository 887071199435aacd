"""Checkpoints of torchao in safetensors: tensors of one byte, whose names begin with `_weight_`.

Source: `torchao/prototype/safetensors`, and the configurations of `torchao.quantization` as it writes them.
"""

from collections.abc import Mapping
from typing import Any

from kvern.errors import UnsupportedModel
from kvern.formats.choice import EMBEDDINGS, HEAD, ROUTERS, paths_matching
from kvern.formats.fp8 import block_of, runs_of
from kvern.formats.rounding import Rounding
from kvern.formats.scaled import ROWS, TENSOR, Block, Scaled
from kvern.formats.torchao_int4 import torchao_int4
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.spec.model import Rename

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
