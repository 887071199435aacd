"""The format of plain weights on a GPU, whose products are timed."""

from typing import Literal

import torch

from kvern.layers.build_options import BuildOptions
from kvern.layers.few_rows import matvec_shape, streamed_row
from kvern.layers.hopper_linear import HopperMethod, hopper_candidates
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.tuned_linear import DETERMINISTIC, MOST_TILES, TunedMethod, candidates_of
from kvern.layers.unquantized import Unquantized, UnquantizedMethod


class TunedLinear(Unquantized):
    """Plain weights on a GPU. `backend`: by cuBLAS alone, by Triton alone, or by whichever is faster ("auto")."""

    def __init__(self, device: torch.device, backend: Literal["auto", "cublas", "triton"]) -> None:
        self._backend = backend
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        if shape.dtype != build.dtype:  # of a router: small, and the kernels are checked in the model's dtype
            return UnquantizedMethod(shape)
        default = DETERMINISTIC if build.deterministic or self._backend == "triton" else None
        if build.deterministic or self._backend == "cublas":
            return TunedMethod(shape, default, default, self._arrived, {}, "unquantized")
        single = matvec_shape(shape.outputs, shape.inputs)
        if "hopper_linear" in build.kernels and self._backend == "auto":
            own = hopper_candidates(shape)
            if own:
                method = HopperMethod(shape, default, single, self._arrived, own, "unquantized on Hopper")
                method.row = streamed_row(shape.outputs, shape.inputs) if build.late_sums else None
                return method
        candidates, name = candidates_of(shape.dtype), "unquantized"
        if self._backend == "triton":
            candidates = {most: tuple(filter(None, shapes)) for most, shapes in candidates.items()}
            name = "unquantized by triton"
        return TunedMethod(shape, default, single, self._arrived, candidates, name)

    def embedding(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return self.linear(shape, build)
