"""The encoder of images: pixels of patches in, rows of embeddings for the language model out."""

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.device.transfer import upload
from kvern.images.views import Grid, Order
from kvern.layers.attention import Attention
from kvern.layers.block import Places, Residual, SequentialLayer
from kvern.layers.build import Build
from kvern.layers.embedding import Table
from kvern.layers.halves import Update
from kvern.layers.linear import column
from kvern.layers.linear_format import linear_methods
from kvern.layers.module import Identity, Module
from kvern.layers.norm import Norm
from kvern.layers.rope import Rotation, positions_alone, rows_of_table
from kvern.layers.step_context import Attend, SlicedAttend, StepContext
from kvern.layers.unquantized import Unquantized
from kvern.models.checkpoint import read_headers
from kvern.models.loader import LoadOptions, check_fits, filled_model, parse_dtype
from kvern.models.projectors import projector
from kvern.models.weighted import WeightedModel
from kvern.plugins import imported
from kvern.spec.model import ModelSpec
from kvern.spec.vision import LeadSpec, PatchRopeSpec, VisionSpec

CHANNELS = 3
BETWEEN: Mapping[str, dict[str, Any]] = {
    "corners": {"mode": "bilinear", "align_corners": True},
    "centres": {"mode": "bilinear", "antialias": True},
    "cubic": {"mode": "bicubic"},
}
"""PyTorch's options for positions between learned ones; see `VisionSpec.between`."""
MakeAttend = Callable[[Sequence[int], bool], Attend]
"""Makes an `Attend` of the lengths of runs of patches that see themselves; with True a `SlicedAttend` of one run."""


class Patches(Module):
    """The patches' pixels as states: `[P, channels * patch * patch] -> [P, hidden]`."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__()
        build = build.at("patches")
        inputs = CHANNELS * spec.patch**2
        self.patch_proj = column(build, inputs, {"patch_proj": spec.tower.hidden_size}, bias=spec.patch_bias)

    def forward(self, pixels: Tensor) -> Tensor:
        states: Tensor = self.patch_proj(pixels)
        return states


class PatchRope(Module):
    """The cosines and signed sines of patches by their rows and columns."""

    def __init__(self, spec: PatchRopeSpec, build: Build) -> None:
        super().__init__()
        dim = spec.dim if spec.order == "alternate" else spec.dim // 2
        inverse = spec.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=build.device) / dim)
        halves = (inverse[::2], inverse[1::2]) if spec.order == "alternate" else (inverse, inverse)
        self._of_rows, self._of_columns = halves
        self._in_pairs = spec.order == "pairs"
        self._dtype = build.dtype
        self._is_whole = not build.kernels.isdisjoint(("cpu_layers", "rotary"))

    def forward(self, grids: Sequence[Grid], order: Tensor | None) -> Rotation:
        """The rotation of all patches, row by row or in another order."""
        angles = torch.cat([self._angles(grid) for grid in grids])
        angles = angles if order is None else angles[order]
        cosine, sine = angles.cos(), angles.sin()
        whole = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        table = torch.stack(whole, 1).unsqueeze(2).to(self._dtype)
        rotation = Rotation(table, torch.arange(len(table), device=table.device))
        return rotation if self._is_whole else rows_of_table(rotation)

    def _angles(self, grid: Grid) -> Tensor:
        device = self._of_rows.device
        rows, columns = (torch.arange(count, dtype=torch.float32, device=device) for count in grid)
        by_row = (rows[:, None] * self._of_rows)[:, None].expand(-1, grid.columns, -1)
        by_column = (columns[:, None] * self._of_columns)[None].expand(grid.rows, -1, -1)
        if self._in_pairs:
            return torch.stack((by_column, by_row), -1).flatten(2).flatten(0, 1)
        return torch.cat((by_row, by_column), -1).flatten(0, 1)


class PositionTable(Module):
    """A square table of learned positions, `side` on each side, between which the patches of any grid lie evenly."""

    def __init__(self, side: int, width: int, build: Build, *, between: str, lead: bool) -> None:
        super().__init__()
        self._side = side
        self._how = BETWEEN[between]
        self.pos_embed = Table("pos_embed", side * side + lead, width, build)

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """The positions of all patches, row by row: `[P, width]`, in interpolation of the nearest ones."""
        table = self.pos_embed.weight[-(self._side**2) :].float().view(self._side, self._side, -1)
        return torch.cat([self._between(table, grid) for grid in grids]).to(self.pos_embed.weight.dtype)

    def _between(self, table: Tensor, grid: Grid) -> Tensor:
        """One axis after the other: a product with few rows takes less than what PyTorch has for both."""
        rows, columns = (self._weights(count, table.device) for count in grid)
        found = (rows @ table.flatten(1)).view(grid.rows, self._side, -1)
        return (columns @ found).flatten(0, 1)

    def _weights(self, count: int, device: torch.device) -> Tensor:
        """The share `[count, side]` that each entry of one axis has in each of `count` places between them."""
        entries = torch.eye(self._side, device=device)[None, :, None]
        found = F.interpolate(entries, (1, count), **self._how)  # with the axis before it PyTorch takes means wrongly
        return found[0, :, 0].t()


class AxisTables(Module):
    """Learned positions of columns, and as many of rows, which are added."""

    def __init__(self, count: int, width: int, build: Build) -> None:
        super().__init__()
        self._count = count
        self.pos_embed = Table("pos_embed", 2 * count, width, build)

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """The positions of all patches, row by row: `[P, width]`."""
        columns, rows = torch.split(self.pos_embed.weight, self._count)
        return torch.cat([(rows[: grid.rows, None] + columns[: grid.columns]).flatten(0, 1) for grid in grids])


class VisionTower(WeightedModel):
    """An encoder of images over a flat line of patches, each of which sees those of its own image."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__(spec.tower, build)
        self.vision = spec
        width = spec.tower.hidden_size
        self.patches = Patches(spec, build)
        self.patch_norm = Norm(spec.tower.norm, width, "patch_norm", build) if spec.patch_norm else Identity()
        self.positions = _positions(spec, build)
        self.ln_pre = Norm(spec.tower.norm, width, "ln_pre", build) if spec.first_norm else Identity()
        self.lead = Table("lead", 1, width, build) if spec.lead else None
        self.layers = nn.ModuleList(
            SequentialLayer(Places(index, 0), spec.tower, layer, build.at(f"layers.{index}"))
            for index, layer in enumerate(spec.tower.layers)
        )
        self.last_norm = Norm(spec.tower.norm, width, "last_norm", build) if spec.last_norm else Identity()
        self.projector = projector(spec.projector, width, build.at("projector"))
        self.deep = nn.ModuleList(
            projector(tap.projector, width, build.at(f"deep.{number}")) for number, tap in enumerate(spec.taps)
        )
        self.newline = Table("newline", 1, spec.projector.hidden, build) if "newline" in spec.learned else None
        self._tapped = [tap.layer for tap in spec.taps]
        windows = spec.windows
        self._side = 0 if windows is None else windows.side
        self._whole = range(len(self.layers)) if windows is None else windows.whole
        self.rope = None if spec.rope is None else PatchRope(spec.rope, build)

    def forward(self, pixels: Tensor, grids: Sequence[Grid], attend: MakeAttend) -> Tensor:
        """The rows `[N, (1 + taps) * hidden of the language model]` of images, one after the other.

        `pixels [P, channels * patch * patch]` are those of their patches, row by row, normalized.
        """
        *_, rows = self.by_parts(pixels, grids, attend)
        assert rows is not None
        return rows

    def by_parts(self, pixels: Tensor, grids: Sequence[Grid], attend: MakeAttend) -> Iterator[Tensor | None]:
        """Yields None after each part but the last (`VisionSpec.parts`), and then the rows of `forward`.

        A step may go on with others between parts.
        """
        hidden = self.patch_norm(self.patches(pixels.to(self.build.dtype)))
        if self.positions is not None:
            hidden = hidden + self.positions(grids)
        order, runs = windows_of(grids, self._side) if self._side else (None, [])
        if order is not None:
            order = upload(order.tolist(), torch.int64, hidden.device)
            hidden = hidden.index_select(0, order)
        update: Update = None
        hidden = self.ln_pre(self._led(hidden, grids))
        lengths = [grid.cells + self.vision.lead for grid in grids]
        slices = self.vision.slices([grid.cells for grid in grids])
        whole = StepContext(self.rotation(grids, order), attend(lengths, max(slices) > 1))
        within = whole._replace(attend=attend(runs, False)) if runs else whole
        tapped: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if slices[index] > 1:
                whole_layer = cast("SequentialLayer", layer)
                hidden, update = yield from in_slices(whole_layer, (hidden, update), whole, slices[index])
            else:
                hidden, update = layer(hidden, update, whole if index in self._whole else within)
            if index in self._tapped:
                hidden, update = hidden if update is None else hidden + update, None
                tapped.append(self.deep[len(tapped)](_in_rows(hidden, order), grids))
            if index + 1 < len(self.layers):
                yield None
        states = self.last_norm(_in_rows(hidden if update is None else hidden + update, order))
        yield torch.cat((self.projector(self._projected(states, grids), grids), *tapped), 1)

    def rotation(self, grids: Sequence[Grid], order: Tensor | None) -> Rotation:
        """The rotation of all states, as layers take it; `order`: as of `windows_of`, on the device."""
        if self.rope is None:
            count = sum(grid.cells + self.vision.lead for grid in grids)
            return positions_alone(torch.arange(count, device=self.build.device))
        found: Rotation = self.rope(grids, order)
        return found

    def _led(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The states of patches, each piece's after the leading state if there is one."""
        if self.lead is None:
            return states
        first: Tensor = self.lead.weight
        if isinstance(self.positions, PositionTable):
            first = first + self.positions.pos_embed.weight[:1]
        pieces = torch.split(states, [grid.cells for grid in grids])
        return torch.cat([part for piece in pieces for part in (first, piece)])

    def _projected(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The states that the projector reads: the leading ones, or all others."""
        if self.lead is None:
            return states
        read = slice(0, 1) if isinstance(self.vision.projector, LeadSpec) else slice(1, None)
        return torch.cat([piece[read] for piece in torch.split(states, [grid.cells + 1 for grid in grids])])

    def in_order(self, rows: Tensor, order: Order | None) -> Tensor:
        """The rows of an image's tokens from `forward`'s rows of its pieces; see `Resizing.order`."""
        if order is None:
            return rows
        assert self.newline is not None, "no row ends lines"
        return torch.cat((rows, self.newline.weight))[upload(order.tolist(), torch.int64, rows.device)]


def _positions(spec: VisionSpec, build: Build) -> Module | None:
    """The learned positions of patches."""
    if not spec.table:
        return None
    if spec.by_axis:
        return AxisTables(spec.table, spec.tower.hidden_size, build)
    return PositionTable(spec.table, spec.tower.hidden_size, build, between=spec.between, lead=spec.lead)


def in_slices(
    layer: SequentialLayer, residual: Residual, step: StepContext, count: int
) -> Generator[None, None, Residual]:
    """A layer over one piece, whose `step.attend` is a SlicedAttend, in slices of its rows.

    Yields before each slice, when keys and values of all rows are there.
    """
    hidden, normal = layer.attention_in.after(*residual)
    attention, attend = cast("Attention", layer.self_attn), cast("SlicedAttend", step.attend)
    queries = attention.attended(attention.qkv_proj(normal), step).view(len(hidden), attention.heads, -1)
    ended: list[Residual] = []
    for rows, query in zip(hidden.tensor_split(count), queries.tensor_split(count), strict=True):
        yield None
        attended = attend.of(attention.attended.index, query).flatten(1)
        ended.append(layer.after_mixer(rows, attention.o_proj(attended), step))
    updates = [update for _, update in ended if isinstance(update, Tensor)]
    return torch.cat([rows for rows, _ in ended]), torch.cat(updates) if updates else None


def windows_of(grids: Sequence[Grid], side: int) -> tuple[Tensor, list[int]]:
    """The order `[P]` in which patches stand window by window, and how many each window has; see WindowSpec.

    Both are on the host.
    """
    orders: list[Tensor] = []
    counts: list[int] = []
    first = 0
    for grid in grids:
        rows, columns = (torch.arange(count) // side for count in grid)
        window = (rows[:, None] * (-(-grid.columns // side)) + columns).flatten()
        orders.append(window.argsort(stable=True) + first)
        counts += window.bincount().tolist()
        first += grid.cells
    return torch.cat(orders), counts


def _in_rows(states: Tensor, order: Tensor | None) -> Tensor:
    """States that stand in an order, row by row again."""
    return states if order is None else torch.empty_like(states).index_copy_(0, order, states)


def check_weights(folder: Path, spec: VisionSpec) -> None:
    """Raises CorruptCheckpoint if the files of a folder lack weights of the encoder, by their headers."""
    check_fits(
        VisionTower(spec, vision_build(spec, torch.float32, LoadOptions(device="meta"))), folder, read_headers(folder)
    )


def load_vision(folder: Path, spec: VisionSpec, options: LoadOptions) -> VisionTower:
    """Builds the encoder of images and loads its weights, which a checkpoint does not quantize.

    Raises CorruptCheckpoint.
    """

    def make(tower: ModelSpec, build: Build) -> VisionTower:
        return VisionTower(replace(spec, tower=tower), build)

    stored = options.tensors(folder)
    build = vision_build(spec, parse_dtype(options.dtype), options)
    return filled_model(make, spec.tower, build, folder, stored)


def vision_build(spec: VisionSpec, dtype: torch.dtype, options: LoadOptions) -> Build:
    """The options of the layers of an encoder."""
    linear = linear_methods({}, Unquantized(), options.quantization)
    if spec.clipped:
        clipped = imported("kvern.formats.clipped:Clipped")(linear.default)
        linear = replace(linear, rules=((re.compile(r"\.layers\."), clipped), *linear.rules))
    return Build(dtype, torch.device(options.device), 1, options.kernels, options.deterministic, linear=linear)
