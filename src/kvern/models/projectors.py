"""The ways from an encoder's states of patches to rows of embeddings for the language model."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.images.views import Grid
from kvern.layers.build import Build
from kvern.layers.embedding import Table
from kvern.layers.linear import column, row
from kvern.layers.loadable import Loadable, copy_rows
from kvern.layers.mlp import GatedMLP, make_mlp
from kvern.layers.module import Identity, Module
from kvern.layers.norm import Norm
from kvern.spec.model import MlpSpec
from kvern.spec.vision import (
    GatedSpec,
    LeadSpec,
    MatrixSpec,
    MergingSpec,
    PoolingSpec,
    ProbeSpec,
    ProjectorSpec,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}


class MergingProjector(Module):
    """The way from the states of patches to rows; see MergingSpec."""

    def __init__(self, spec: MergingSpec, width: int, build: Build) -> None:
        super().__init__()
        self.merge = spec.merge
        self._late = spec.late
        beside = width * spec.merge**2
        self.norm = Identity() if spec.norm is None else Norm(spec.norm, beside if spec.late else width, "norm", build)
        self.merging_layer = column(build, beside, {"merging_layer": width}) if spec.reduces else None
        inputs = width if spec.reduces else beside
        self.linear_1 = column(build, inputs, {"linear_1": spec.inner}, bias=spec.bias)
        self.linear_2 = row(build, spec.inner, "linear_2", spec.hidden, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        normal = states if self._late else self.norm(states)
        merged = side_by_side(normal, grids, self.merge, channels_first=self.merging_layer is not None)
        if self._late:
            merged = self.norm(merged)
        if self.merging_layer is not None:
            merged = self.merging_layer(merged)
        rows: Tensor = self.linear_2(self.activation(self.linear_1(merged)))
        return rows


class GatedProjector(Module):
    """The projector of GLM's encoders, from the states of patches to rows through a gated MLP; see GatedSpec."""

    def __init__(self, spec: GatedSpec, width: int, build: Build) -> None:
        super().__init__()
        self.merge = spec.merge
        self.downsample = column(build, width * spec.merge**2, {"downsample": spec.hidden}, bias=True)
        self.proj = column(build, spec.hidden, {"proj": spec.hidden})
        self.norm = Norm(spec.norm, spec.hidden, "norm", build)
        self.mlp = GatedMLP(spec.hidden, MlpSpec(spec.inner, spec.activation), build)

    def forward(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        merged = self.downsample(side_by_side(states, grids, self.merge))
        rows: Tensor = self.mlp(F.gelu(self.norm(self.proj(merged))))
        return rows


class Standard(Loadable):
    """The bias and the factor of each channel `[width]`."""

    def __init__(self, width: int, build: Build) -> None:
        super().__init__(build.path)
        self.bias, self.factor = build.empty(width), build.empty(width)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("std_bias", "std_scale"), tuple(self.bias.shape))

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_rows(self.bias if part == "std_bias" else self.factor, tensor, first_row)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.bias.float()) * self.factor.float()


class PoolingProjector(Module):
    """The way from the states of patches to rows, in float32 up to the norm; see PoolingSpec."""

    def __init__(self, spec: PoolingSpec, width: int, build: Build) -> None:
        super().__init__()
        self._spec = spec
        self.standard = Standard(width, build) if spec.standard else Identity()
        self.norm = Norm(spec.norm, width, "norm", build)
        self.linear = column(build, width, {"linear": spec.hidden})

    def forward(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        parts = torch.split(states, [grid.cells for grid in grids])
        pooled = torch.cat([self._pooled(part, grid) for part, grid in zip(parts, grids, strict=True)])
        scaled = self.standard(pooled.to(states.dtype).float() * self._spec.scale)
        rows: Tensor = self.linear(self.norm(scaled.to(states.dtype)))
        return rows

    def _pooled(self, states: Tensor, grid: Grid) -> Tensor:
        """The means of neighbours: `[tokens, width]` float32."""
        size = self._spec.merge
        squares = states.float().view(grid.rows // size, size, grid.columns // size, size, -1)
        return squares.mean((1, 3)).flatten(0, 1)


class MatrixProjector(Module):
    """The way from the states of patches to rows; see MatrixSpec."""

    def __init__(self, spec: MatrixSpec, width: int, build: Build) -> None:
        super().__init__()
        self._merge = spec.merge
        self.linear = column(build, width * spec.merge**2, {"linear": spec.hidden})

    def forward(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        rows: Tensor = self.linear(side_by_side(states, grids, self._merge))
        return rows


class LeadProjector(Module):
    """The row of each piece from the state that leads it; see LeadSpec."""

    def __init__(self, spec: LeadSpec, width: int, build: Build) -> None:
        super().__init__()
        self.linear = column(build, width, {"linear": spec.hidden})

    def forward(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        rows: Tensor = self.linear(states)
        return rows


class ProbeProjector(Module):
    """The row of each piece that a learned query finds; see ProbeSpec."""

    def __init__(self, spec: ProbeSpec, width: int, build: Build) -> None:
        super().__init__()
        self._heads = spec.heads
        self.probe = Table("probe", 1, width, build)
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        self.qkv_proj = column(build, width, parts, bias=True, fused="qkv_proj")
        self.o_proj = row(build, width, "o_proj", spec.hidden, bias=True)
        self.norm = Norm(spec.norm, spec.hidden, "norm", build)
        self.mlp = make_mlp(spec.hidden, spec.mlp, build.at("mlp"))

    def forward(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        query, key, value = self.qkv_proj(torch.cat((self.probe.weight, states))).chunk(3, 1)
        found, first = [], 1
        for cells, group in groupby(grid.cells for grid in grids):  # pieces of one size attend together
            count = len(list(group))
            rows = slice(first, first + count * cells)
            shape = (count, cells, self._heads, -1)
            keys, values = (part[rows].reshape(shape).transpose(1, 2) for part in (key, value))
            probes = query[:1].reshape(1, 1, self._heads, -1).transpose(1, 2).expand(count, -1, -1, -1)
            found.append(F.scaled_dot_product_attention(probes, keys, values).flatten(1))
            first = rows.stop
        attended = self.o_proj(torch.cat(found))
        rows_found: Tensor = attended + self.mlp(self.norm(attended))
        return rows_found


def side_by_side(states: Tensor, grids: Sequence[Grid], size: int, *, channels_first: bool = False) -> Tensor:
    """The states of `size` x `size` neighbours side by side, or the channels of all: `[tokens, width * size^2]`."""
    order = (0, 2, 4, 1, 3) if channels_first else (0, 2, 1, 3, 4)
    merged = []
    for part, grid in zip(torch.split(states, [grid.cells for grid in grids]), grids, strict=True):
        squares = part.view(grid.rows // size, size, grid.columns // size, size, -1)
        merged.append(squares.permute(order).flatten(2).flatten(0, 1))
    return torch.cat(merged)


PROJECTORS: Mapping[type, Callable[[Any, int, Build], Module]] = {
    MergingSpec: MergingProjector,
    PoolingSpec: PoolingProjector,
    GatedSpec: GatedProjector,
    MatrixSpec: MatrixProjector,
    LeadSpec: LeadProjector,
    ProbeSpec: ProbeProjector,
}
"""The projector of each kind of spec: called with the spec, the width of the states, and the build."""


def projector(spec: ProjectorSpec, width: int, build: Build) -> Module:
    """Returns the projector of a spec. Its forward takes the states `[P, width]` of all patches and the images' grids,
    and returns rows `[N, spec.hidden]`."""
    return PROJECTORS[type(spec)](spec, width, build)
