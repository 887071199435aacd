"""The stored form of a matrix: the kind of codes, and the number of weights that share a scale."""

from dataclasses import dataclass
from typing import Literal

import torch

from kvern.errors import ConfigError, shown

GROUPS = (32, 64, 128)
"""Inputs that may share a scale of 4-bit codes."""

E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Scheme:
    """Codes of `bits` bits: "int", or "float" as float8_e4m3fn.

    A scale belongs to `outputs_per_scale` outputs and `group` inputs; 0: to all inputs of an output. `symmetric` codes
    have no zero points. With `activations` the product rounds each token's activations to as many bits, dynamically.
    """

    kind: Literal["int", "float"]
    bits: int
    group: int = 0
    outputs_per_scale: int = 1
    symmetric: bool = True
    activations: bool = False

    @property
    def name(self) -> str:
        """The name in reports and plans: "fp8", "fp8-block", "int8", "int4-g128", "int4-g128-zero"."""
        if self.kind == "float":
            return "fp8-block" if self.outputs_per_scale > 1 else "fp8"
        group = f"-g{self.group}" if self.group else ""
        return f"int{self.bits}{group}{'' if self.symmetric else '-zero'}"

    @property
    def code_range(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        if self.kind == "float":
            return -E4M3_LARGEST, E4M3_LARGEST
        return -float(1 << (self.bits - 1)), float((1 << (self.bits - 1)) - 1)

    def scales(self, outputs: int, inputs: int) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        return -(-outputs // self.outputs_per_scale), -(-inputs // self.group) if self.group else 1

    def stored_bytes(self, outputs: int, inputs: int, scale_dtype: torch.dtype) -> int:
        """The bytes of a matrix in a file."""
        rows, groups = self.scales(outputs, inputs)
        zeros = 0 if self.symmetric else 4 * -(-rows * self.bits // 32) * groups
        return outputs * -(-inputs * self.bits // 32) * 4 + rows * groups * scale_dtype.itemsize + zeros

    def bits_per_weight(self, outputs: int, inputs: int, scale_dtype: torch.dtype) -> float:
        """The bits per weight, including scales and zero points."""
        return 8 * self.stored_bytes(outputs, inputs, scale_dtype) / (outputs * inputs)

    def check_fits(self, name: str, inputs: int) -> None:
        """Raises ConfigError if the groups do not divide the inputs of the matrix `name`."""
        if not self.group or inputs % self.group == 0:
            return
        fits = [str(group) for group in GROUPS if inputs % group == 0] if self.bits < 8 else []
        raise ConfigError(
            f"{name} has {inputs} inputs, which groups of {self.group} do not divide: "
            + (f"use --group-size {' or '.join(fits)}" if fits else "use --method fp8 or int8, without --blocks")
        )


FP8 = Scheme("float", 8, activations=True)
FP8_BLOCK = Scheme("float", 8, group=128, outputs_per_scale=128, activations=True)
INT8 = Scheme("int", 8, activations=True)


def int4(group: int, symmetric: bool = True) -> Scheme:
    return Scheme("int", 4, group=group, symmetric=symmetric)


def named(name: str) -> Scheme | None:
    """The scheme of a name as `Scheme.name` writes it; None for "plain". Raises ConfigError."""
    schemes = [FP8, FP8_BLOCK, INT8, *(int4(group, symmetric) for group in GROUPS for symmetric in (True, False))]
    known = {scheme.name: scheme for scheme in schemes}
    if name != "plain" and name not in known:
        raise ConfigError(f"precision {shown(name)} is unknown; choose plain, {', '.join(known)}")
    return known.get(name)
