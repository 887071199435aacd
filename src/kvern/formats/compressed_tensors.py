"""Checkpoints of `quant_method` "compressed-tensors": groups of layers, each with its form of weights and activations.

Source: `CompressionConfig` and `QuantizationArgs` of the package of that name. Codes have one byte, or are packed:
"pack-quantized": `weight_packed` int32 [O, I / n] of n codes each, the lowest bits first, in which 0 is the least
signed number; `weight_scale` [O, groups]; if not symmetric `weight_zero_point` int32 [O / n, groups], packed in the
same way along outputs; `weight_shape`; with activation ordering `weight_g_idx`. FP4 forms hold the tensors that `fp4`
reads.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.errors import UnsupportedModel
from kvern.formats.choice import EMBEDDINGS, ROUTERS, paths_matching
from kvern.formats.fp4 import MX, NV, fp4_format
from kvern.formats.fp8 import block_of, runs_of
from kvern.formats.groups import (
    Form,
    GroupedFormat,
    GroupedMethod,
    check_group,
    signed,
    unpack_pairs,
    words_to_bytes,
)
from kvern.formats.scaled import ROWS, TENSOR, Block, Code, Rounding, Scaled
from kvern.layers.linear_format import LinearFormat, LinearMethods
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


PLAIN = ("float-quantized", "naive-quantized", "int-quantized")
CLASSES = {"Linear": r"(?<!embed_tokens)(?<!embed_tokens_per_layer)$", "Embedding": EMBEDDINGS.pattern}
"""Targets that are classes of modules, and the paths of these."""
CODES: Mapping[str, Code] = {"float": "e4m3", "int": "int8"}


def compressed_tensors(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """The format of each of `config_groups`, for its targets: names go before expressions, and these before classes."""
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused("sparsity_config.format", sparsity, "dense")
    if (quantization.get("transform_config") or {}).get("config_groups"):
        raise _refused("transform_config", "given", "checkpoints without transforms of activations")
    groups = quantization["config_groups"].values()
    formats = [(group["targets"], _format(group, quantization.get("format", ""), unquantized)) for group in groups]
    targets = [(target, item) for names, item in formats for target in names]
    rules = [(pattern, item) for target, item in sorted(targets, key=_precedence) for pattern in _patterns(target)]
    ignored = paths_matching(quantization.get("ignore"), "ignore")
    return LinearMethods(unquantized, ((ignored, unquantized), (ROUTERS, unquantized), *rules))


def _precedence(target: tuple[str, LinearFormat]) -> int:
    return 2 if target[0] in CLASSES else 1 if target[0].startswith("re:") else 0


def _patterns(target: str) -> Iterator[re.Pattern[str]]:
    if target in CLASSES:
        yield re.compile(CLASSES[target])
    elif re.fullmatch(r"[A-Z]\w*", target):
        raise _refused("a target", target, f"{', '.join(CLASSES)}, names and expressions")
    else:
        yield paths_matching([target], "targets")


def _format(group: Mapping[str, Any], form: str, unquantized: LinearFormat) -> LinearFormat:
    weights, activations = group.get("weights"), group.get("input_activations")
    form = group.get("format") or form
    if weights is None:
        return unquantized
    if form in PACKED_FORMS:
        return packed_format(weights, activations, form)
    if form not in PLAIN:
        raise _refused("format", form, ", ".join((*PLAIN, *PACKED_FORMS)))
    if group.get("output_activations") is not None:
        raise _refused("output_activations", "given", "quantized weights and inputs")
    return _scaled(weights, activations)


def _scaled(weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Scaled:
    code, symmetric = _code("weights", weights), bool(weights.get("symmetric", True))
    if weights.get("actorder") in ("group", "dynamic"):
        raise _refused(
            "weights.actorder", weights["actorder"], "it for packed weights alone, or weights of actorder static"
        )
    if code == "e4m3" and not symmetric:
        raise _refused("weights.symmetric", False, "it for int weights alone")
    rounding = None if activations is None else _rounding(activations)
    static = activations is not None and not activations.get("dynamic", False)
    zeros = code == "int8"  # symmetric ones, too, may have them: all zero
    return Scaled(code, _block(weights), rounding, static=static, zeros=zeros, zeros_needed=not symmetric)


def _block(weights: Mapping[str, Any]) -> Block:
    strategy = weights.get("strategy") or "tensor"
    if strategy == "group":
        return runs_of(weights.get("group_size"))
    if strategy == "block":
        block = block_of(weights.get("block_structure"))
        if block is None:
            raise _refused("weights.block_structure", None, "two numbers, as [128, 128]")
        return block
    if strategy not in ("tensor", "channel"):
        raise _refused("weights.strategy", strategy, "tensor, channel, group and block")
    return TENSOR if strategy == "tensor" else ROWS


def _rounding(activations: Mapping[str, Any]) -> Rounding:
    """The rounding of activations; dynamic scales of a tensor are per token, so that no token depends on others."""
    code, strategy = _code("input_activations", activations), activations.get("strategy") or "tensor"
    dynamic, symmetric = activations.get("dynamic", False), bool(activations.get("symmetric", True))
    if dynamic not in (True, False):
        raise _refused("input_activations.dynamic", dynamic, "true and false")
    if strategy not in (("tensor", "token", "group") if dynamic else ("tensor",)):
        raise _refused(
            f"input_activations.strategy (dynamic {dynamic})", strategy, "tensor, and dynamic token and group"
        )
    if not symmetric and (code == "e4m3" or not dynamic):
        raise _refused("input_activations.symmetric", False, "it for dynamic int activations alone")
    group = runs_of(activations.get("group_size")).inputs if strategy == "group" else 0
    return Rounding(code, group, symmetric=symmetric)


def _code(what: str, described: Mapping[str, Any]) -> Code:
    bits, kind = described.get("num_bits"), described.get("type")
    if bits != 8 or not isinstance(kind, str) or kind not in CODES:
        raise _refused(
            f"{what} of num_bits and type", f"{bits} {kind}", "8 float and 8 int in formats that are not packed"
        )
    return CODES[kind]


def _refused(what: str, found: object, readable: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"quantization_config: {what} is {str(found)[:60]!r}; of compressed-tensors kvern reads {readable}"
    )
