"""Checkpoints of NVIDIA's Model Optimizer: FP8 here, NVFP4 in `fp4.py`, and models with layers of both.

Settings may be in hf_quant_config.json instead of config.json (`models/loader.py` reads both).
"""

from collections.abc import Mapping
from typing import Any

from kvern.errors import UnsupportedModel
from kvern.formats.choice import all_but, paths_matching
from kvern.formats.fp4 import modelopt_nvfp4
from kvern.formats.scaled import ROWS, TENSOR, Block, Rounding, Scaled
from kvern.layers.linear_format import LinearFormat, LinearMethods

FP8: Mapping[str, Scaled] = {
    "FP8": Scaled("e4m3", TENSOR, Rounding("e4m3"), static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scaled("e4m3", ROWS, Rounding("e4m3")),
    "FP8_PB_WO": Scaled("e4m3", Block(128, 128)),
}
FP4 = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")


def modelopt(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Reads `quant_algo` of the model or, for MIXED_PRECISION, of each of its `quantized_layers`."""
    quantization = _inner(quantization)
    names = ("exclude_modules", "ignore")
    ignored = [paths_matching(quantization.get(name), name) for name in names]
    if quantization.get("quant_algo") != "MIXED_PRECISION":
        return all_but(ignored, _format(quantization, unquantized), unquantized)
    layers: dict[str, list[str]] = {}
    for path, described in quantization["quantized_layers"].items():
        layers.setdefault(described["quant_algo"], []).append(path)
    described = quantization["quantized_layers"]
    rules = tuple(
        (paths_matching(paths, "quantized_layers"), _format({**quantization, **described[paths[0]]}, unquantized))
        for paths in layers.values()
    )
    return LinearMethods(unquantized, (*((pattern, unquantized) for pattern in ignored), *rules))


def _inner(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, which hf_quant_config.json and some config.json files hold in an inner object."""
    inner = quantization.get("quantization")
    return inner if isinstance(inner, dict) else quantization


def _format(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearFormat:
    algorithm = quantization.get("quant_algo")
    if algorithm in FP8:
        return FP8[str(algorithm)]
    if algorithm in FP4:
        return modelopt_nvfp4(quantization, unquantized)
    raise UnsupportedModel(
        f"quantization_config: quant_algo is {str(algorithm)[:60]!r}; of modelopt's kvern reads "
        f"{', '.join((*FP8, *FP4))}, and MIXED_PRECISION of them"
    )
