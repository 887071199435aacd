"""Checkpoints of `quant_method` "fp8", with one scale a tensor or blocks of 128 x 128, and "fbgemm_fp8", of rows.

Sources: DeepSeek-V3's `inference/fp8_cast_bf16.py` for `weight_block_size` and `weight_scale_inv`, which multiplies;
`FineGrainedFP8Config` and `FbgemmFp8Config` of transformers; AutoFP8 for `weight_scale` and `input_scale`.
"""

from collections.abc import Mapping
from typing import Any

from kvern.errors import UnsupportedModel
from kvern.formats.choice import all_but, paths_matching
from kvern.formats.scaled import ROWS, TENSOR, Block, Rounding, Scaled
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.spec.model import Rename

STACKED = Rename(r"(_proj)_scale_inv$", r"\1_weight_scale_inv")
"""Scales of experts' tensors that are stacked in one tensor."""
MOST_BLOCK = 1 << 16
BLOCK_NAMES = (STACKED, Rename(r"([._]weight_scale)$", r"\1_inv"))
TENSOR_NAMES = (STACKED, Rename(r"([._]weight_scale)_inv$", r"\1"), Rename(r"\.activation_scale$", ".input_scale"))
"""Other names of scales in checkpoints."""


def fp8(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Activations are rounded as the weights are: by blocks' inputs, or for each token, or by a scale of the file's."""
    numbers = quantization.get("fmt", "e4m3")
    if numbers not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(f"quantization_config: fmt is {str(numbers)[:40]!r}; kvern reads FP8 of fmt e4m3")
    scheme = quantization.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedModel(
            f"quantization_config: activation_scheme is {str(scheme)[:40]!r}; kvern reads static and dynamic"
        )
    block = block_of(quantization.get("weight_block_size"))
    static = scheme == "static"
    if block is None:
        form = Scaled("e4m3", TENSOR, Rounding("e4m3"), static=static)
    elif static:
        raise UnsupportedModel(
            "quantization_config: activation_scheme is 'static' beside a weight_block_size: blocks round activations "
            "dynamically"
        )
    else:
        form = Scaled("e4m3", block, Rounding("e4m3", block.inputs), scale_name="weight_scale_inv")
    lists = ("modules_to_not_convert", "ignored_layers")
    methods = all_but([paths_matching(quantization.get(name), name) for name in lists], form, unquantized)
    return methods.renamed(BLOCK_NAMES if block else TENSOR_NAMES)


def block_of(size: object) -> Block | None:
    """A block of `[outputs, inputs]`. Raises UnsupportedModel."""
    if size is None:
        return None
    sizes = tuple(size) if isinstance(size, list | tuple) else ()
    if len(sizes) != 2 or not all(type(item) is int and 0 < item <= MOST_BLOCK for item in sizes):
        raise UnsupportedModel(
            f"quantization_config: the block size is {str(size)[:40]}; it must be two numbers, as [128, 128], of at "
            f"most {MOST_BLOCK}"
        )
    return Block(*sizes)


def runs_of(size: object) -> Block:
    """Blocks of `size` inputs of a row. Raises UnsupportedModel."""
    block = block_of([1, size])
    assert block is not None
    return block


def fbgemm_fp8(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """A scale for each row, and for each token; activations above `activation_scale_ub` become it."""
    limit = float(quantization.get("activation_scale_ub", 1200.0))
    if not limit > 0:
        raise UnsupportedModel(f"quantization_config: activation_scale_ub is {limit}; it must be above 0")
    form = Scaled("e4m3", ROWS, Rounding("e4m3", limit=limit))
    ignored = paths_matching(quantization.get("modules_to_not_convert"), "modules_to_not_convert")
    return all_but([ignored], form, unquantized)
