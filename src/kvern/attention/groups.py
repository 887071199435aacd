"""Groups of layers that share block tables, and the division of a block's memory between layers.

Layers with a window have block tables of their own, whose blocks are given back as the window passes. All tables take
blocks from one pool. A block has as many places as there are layers without a window, and layers with one are dealt out
to as many tables as they then need: two layers of different tables share the memory of a place, never a block. Gemma 3
27B has 10 layers without a window and 52 with one: 10 places and 1 + 6 tables. gpt-oss-20b has 12 of each: 12 places
and 1 + 1 tables. Places that no layer has cost memory (70 places for 62 layers in the former). Where all layers have a
window, they share one table, and the first table numbers blocks without memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvern.device.rows import NO_WINDOWS, WindowTables
from kvern.spec.mixers import AttentionSpec

MOST_TABLES = 12
"""The most block tables of layers with a window: each costs a step a little."""
MOST_WASTE = 0.25
"""The share of a token's memory that unused parts of blocks may add."""


@dataclass(frozen=True)
class LayerGroups:
    """For each layer its block table, its place in a block, and its part of that place.

    A block of the pool has as many places as layers without a window need; those with one are dealt out to as many
    tables as they then need. Two layers of different tables have the same memory, and never the same block of it. A
    place is as wide as the wider kind of layer; narrower ones, as many as fit, have parts of it: see
    `attention/memory.py`. Table 0 names blocks of the pool; what the others are, `windows` says.
    """

    tables: Sequence[int]
    places: Sequence[int]
    parts: Sequence[int]
    owners: Sequence[int]
    """For each place in a block a layer that is as wide as it."""
    window: int | None = None
    """The widest, where there are such tables."""
    windows: WindowTables = NO_WINDOWS
    reason: str = field(default="", compare=False)
    """The reason why layers with a window share the block table of the other layers; "" if they do not."""

    @classmethod
    def one_table(cls, layers: Sequence[AttentionSpec], reason: str = "") -> "LayerGroups":
        """All layers share one, and each has its place."""
        places = range(len(layers))
        return cls([0] * len(layers), places, [0] * len(layers), places, reason=reason)

    @property
    def window_tables(self) -> int:
        """The number of block tables of layers with a window."""
        return self.windows.tables

    @property
    def whole(self) -> bool:
        """Some layers keep all tokens; if none does, blocks of table 0 have no memory."""
        return 0 in self.tables or self.windows.whole_parts > 1

    @property
    def blocks_of_column(self) -> int:
        """Blocks of the pool that a sequence has for as many tokens as a block holds, before a window passes."""
        return self.whole + self.window_tables


def group_layers(layers: Sequence[AttentionSpec]) -> LayerGroups:
    """Block tables for a model's layers: several where some have a window and others have none, if blocks fit both."""
    windowed = [index for index, layer in enumerate(layers) if layer.window is not None]
    whole = [index for index, layer in enumerate(layers) if layer.window is None]
    if not windowed:
        return LayerGroups.one_table(layers)
    widest = max(layer.window or 0 for layer in layers)
    if not whole:
        one = LayerGroups.one_table(layers)
        return replace(one, tables=[1] * len(layers), window=widest, windows=WindowTables(1))
    kinds = [{(layers[index].stored, layers[index].width) for index in kind} for kind in (whole, windowed)]
    (stored, width), (others_stored, window_width) = (max(kind) for kind in kinds)
    wide = max(width, window_width)
    if max(map(len, kinds)) > 1 or stored != others_stored or wide % width or wide % window_width:
        return LayerGroups.one_table(layers, "layers store keys and values of shapes that do not divide")
    fitting, windows_fitting = wide // width, wide // window_width
    size = -(-len(whole) // fitting)
    count = -(-len(windowed) // (size * windows_fitting))
    used = len(whole) / fitting + len(windowed) / windows_fitting
    if count > MOST_TABLES or size * (1 + count) > used * (1 + MOST_WASTE):
        return LayerGroups.one_table(
            layers,
            f"{len(windowed)} layers with a window do not divide into runs of what {len(whole)} without one take",
        )
    tables, places, parts = ([0] * len(layers) for _ in range(3))
    for number, index in enumerate(whole):
        tables[index] = 0 if fitting == 1 else 1 + count
        places[index], parts[index] = divmod(number, fitting)
    for number, index in enumerate(windowed):
        table, within = divmod(number, size * windows_fitting)
        tables[index], (places[index], parts[index]) = 1 + table, divmod(within, windows_fitting)
    owners = [(whole if fitting == 1 else windowed)[0]] * size
    return LayerGroups(tables, places, parts, owners, widest, WindowTables(count, windows_fitting, fitting))
