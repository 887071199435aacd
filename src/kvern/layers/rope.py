"""Rotary position embeddings: a table of cosines and sines, and the rotation of queries and keys by its rows."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.module import Module
from kvern.spec.model import QueryScaling, RopeSpec


class Rotation(NamedTuple):
    """Cosines and signed sines of a run of tokens, each `[T, 1, dim]`; for kernels the whole table and the positions.

    `query_scale [T, 1, 1]` is what queries are multiplied by; None: they stay.
    """

    cosine: Tensor
    sine: Tensor
    query_scale: Tensor | None = None


def positions_alone(positions: Tensor) -> Rotation:
    """The rotation of layers without rotary embeddings, which read no more than positions, `[T]` int64."""
    return Rotation(positions, positions)


class RopeTable(Module):
    """Cosines and signed sines of every position, `[max_model_len, 2, 1, dim]`, in the dtype of the model."""

    def __init__(self, spec: RopeSpec, build: Build) -> None:
        super().__init__()
        inverse, factor = spec.scaling.frequencies(spec.theta, spec.dim, build.max_model_len)
        positions = torch.arange(build.max_model_len, dtype=torch.float32, device=build.device)
        angles = positions[:, None] * torch.tensor(inverse, dtype=torch.float32, device=build.device)
        cosine, sine = angles.cos() * factor, angles.sin() * factor
        if spec.interleaved:
            rows = cosine.repeat_interleave(2, -1), torch.stack((-sine, sine), -1).flatten(-2)
        else:
            rows = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        self.table: Tensor
        self.register_buffer("table", torch.stack(rows, 1).unsqueeze(2).to(build.dtype), persistent=False)
        scales = None if spec.query_scaling is None else _query_scales(spec.query_scaling, positions).to(build.dtype)
        self.query_scales: Tensor | None
        self.register_buffer("query_scales", scales, persistent=False)
        self.whole = not build.kernels.isdisjoint(("rotary", "cpu_layers"))
        axes = torch.tensor(spec.axes, dtype=torch.int64, device=build.device)
        self._axes = axes.repeat_interleave(2) if spec.interleaved else torch.cat((axes, axes))

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of `positions`, `[T]` int64, or `[T, 3]` by the axes of each plane."""
        if positions.dim() == 2:
            rotation = Rotation(self._rows(positions), torch.arange(len(positions), device=positions.device))
            return rotation if self.whole else rows_of_table(rotation)
        scale = None if self.query_scales is None else self.query_scales.index_select(0, positions)
        rotation = Rotation(self.table, positions, scale)
        return rotation if self.whole else rows_of_table(rotation)

    def _rows(self, positions: Tensor) -> Tensor:
        """A table with a row for each token: `[T, 2, 1, dim]`."""
        planes = torch.arange(self.table.shape[-1], device=positions.device)
        rows = self.table[positions[:, self._axes], :, 0, planes]
        return rows.transpose(1, 2).unsqueeze(2).contiguous()


def _query_scales(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """The scale of the query at each position, `[positions, 1, 1]`."""
    return (1 + scaling.beta * (positions / scaling.trained_len).floor().log1p())[:, None, None]


def _rotate_halves(x: Tensor, rotation: Rotation) -> Tensor:
    cosine, sine, _ = rotation
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


def _rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    cosine, sine, _ = rotation
    return torch.addcmul(x * cosine, x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2), sine)


def _no_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    return x


def rows_of_table(rotation: Rotation) -> Rotation:
    """From the whole table and the positions to the cosines and sines of each token."""
    table, positions, query_scale = rotation
    cosine, sine = table.index_select(0, positions).unbind(1)
    return Rotation(cosine, sine, query_scale)


def make_rotate(spec: RopeSpec | None, head_dim: int) -> Callable[[Tensor, Rotation], Tensor]:
    """Return the function that turns `x [T, heads, head_dim]` by a row of the table for each token."""
    if spec is None:
        return _no_rotation
    rotate = _rotate_pairs if spec.interleaved else _rotate_halves
    if spec.dim == head_dim:
        return rotate
    dim = spec.dim

    def rotate_first(x: Tensor, rotation: Rotation) -> Tensor:
        return torch.cat((rotate(x[..., :dim], rotation), x[..., dim:]), -1)

    return rotate_first
