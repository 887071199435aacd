"""Statistics of each quantized matrix, and the report in the folder: quantization_report.json.

    {
      "kvern_quantization_report": 1,            the schema's version
      "model": "/models/llama-8b",               the quantized model
      "method": "gptq", "settings": {...},       as requested
      "calibration": {"source": "...", "rows": 128, "row_tokens": 512},
      "totals": {"weights": ..., "quantized_weights": ..., "bits_per_weight": ..., "bytes_before": ...,
                 "bytes_after": ..., "seconds": ...},
      "matrices": [MatrixStatistics, ...]        in the order of the layers
    }

To edit a plan, change "scheme" of a matrix in a report; "plain" leaves it unquantized. `plan_of` reads the result.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvern.errors import ConfigError, shown
from kvern.io.files import read_object
from kvern.quantize.method import Plan, Rounded
from kvern.quantize.scheme import named
from kvern.quantize.watched import Inputs

REPORT_NAME = "quantization_report.json"
VERSION_KEY, VERSION = "kvern_quantization_report", 1


@dataclass(frozen=True)
class MatrixStatistics:
    """One matrix.

    name                the checkpoint's, without ".weight"
    layer               its block's index
    outputs, inputs     its shape
    scheme              its `Scheme.name`, or "plain"
    bits_per_weight     scales and zero points included
    largest_weight      max |w|
    smallest_scale, largest_scale
    clipped_share       share of weights beyond the outermost codes
    weight_error        ||W' - W|| / ||W|| of stored and original weights
    output_error        ||X W'^T - X W^T|| / ||X W^T|| over a sample X of the calibration's rows; None: no row came here
    input_rows          its input rows: all of the calibration, or those routed to its expert
    largest_input       max |x|
    """

    name: str
    layer: int
    outputs: int
    inputs: int
    scheme: str
    bits_per_weight: float
    largest_weight: float
    smallest_scale: float
    largest_scale: float
    clipped_share: float
    weight_error: float
    output_error: float | None
    input_rows: int
    largest_input: float


def statistics_of(
    name: str, layer: int, weight: Tensor, rounded: Rounded, inputs: Inputs, bits_per_weight: float
) -> MatrixStatistics:
    """The statistics of `weight [outputs, inputs]` float32, given before rounding."""
    error = rounded.plain() - weight
    rows = inputs.rows
    before = torch.linalg.vector_norm(rows @ weight.t()) if len(rows) else torch.zeros(())
    output_error = float(torch.linalg.vector_norm(rows @ error.t()) / before) if float(before) > 0 else None
    grid = rounded.grid
    return MatrixStatistics(
        name=name,
        layer=layer,
        outputs=weight.shape[0],
        inputs=weight.shape[1],
        scheme=grid.scheme.name,
        bits_per_weight=round(bits_per_weight, 4),
        largest_weight=float(weight.abs().max()),
        smallest_scale=float(grid.scale.min()),
        largest_scale=float(grid.scale.max()),
        clipped_share=float(grid.clipped(weight).float().mean()),
        weight_error=float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(weight).clamp(min=1e-30)),
        output_error=output_error,
        input_rows=inputs.count,
        largest_input=float(inputs.largest.max()),
    )


def report(matrices: list[MatrixStatistics], **about: Any) -> dict[str, Any]:
    """The report as JSON values; `about`: model, method, settings, calibration and totals."""
    return {VERSION_KEY: VERSION, **about, "matrices": [dataclasses.asdict(item) for item in matrices]}


def plan_of(path: Path) -> Plan:
    """The plan that a report, edited perhaps, holds. Raises ConfigError or CorruptCheckpoint."""
    try:
        matrices = read_object(path).get("matrices")
    except FileNotFoundError:
        raise ConfigError(f"report {path} does not exist") from None
    if not isinstance(matrices, list) or not all(isinstance(item, Mapping) for item in matrices):
        raise ConfigError(f"{path} is no report of kvern quantize: it has no list of matrices")
    plan: Plan = {}
    for item in matrices:
        name, scheme = item.get("name"), item.get("scheme")
        if not isinstance(name, str) or not isinstance(scheme, str):
            raise ConfigError(f"{path}: a matrix has the name {shown(name)} and the scheme {shown(scheme)}")
        if (found := named(scheme)) is not None:
            plan[name] = found
    return plan
