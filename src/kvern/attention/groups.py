"""Which layers share block tables, and how layers divide the memory of a block."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvern.mixer_spec import AttentionSpec

MOST_TABLES = 8
"""Of layers with a window: each costs a step a little."""
MOST_WASTE = 0.25
"""Of the memory of a token that all layers keep: what blocks without a use may take besides."""


@dataclass(frozen=True)
class LayerGroups:
    """For each layer its block table, 0 or one of those of layers with a window from 1 on, and its place in a block.

    A block of the pool has as many places as there are layers without a window; those with one are dealt out to as many
    tables as they need. Two layers of different tables have the same memory, and never the same block of it.
    """

    tables: Sequence[int]
    places: Sequence[int]
    window: int | None = None
    """The widest, where there are such tables."""
    reason: str = field(default="", compare=False)
    """Why layers with a window have none of their own, if there are both kinds."""

    @classmethod
    def one_table(cls, layers: Sequence[AttentionSpec], reason: str = "") -> "LayerGroups":
        """All layers share one, and each has its place."""
        return cls([0] * len(layers), range(len(layers)), None, reason)

    @property
    def window_tables(self) -> int:
        """How many block tables layers with a window have."""
        return max(self.tables, default=0)

    @property
    def owners(self) -> list[int]:
        """For each place in a block the first layer that has it."""
        return [self.places.index(place) for place in range(max(self.places, default=-1) + 1)]


def group_layers(layers: Sequence[AttentionSpec]) -> LayerGroups:
    """Block tables for a model's layers: several where some have a window and others have none, if blocks fit both."""
    windowed = [index for index, layer in enumerate(layers) if layer.window is not None]
    whole = len(layers) - len(windowed)
    if not windowed or not whole:
        return LayerGroups.one_table(layers)
    if len({(layer.stored, layer.kv_heads, layer.head_dim) for layer in layers}) > 1:
        return LayerGroups.one_table(layers, "layers store keys and values of different shapes")
    count = -(-len(windowed) // whole)
    padded = whole * (1 + count)
    if count > MOST_TABLES or padded > len(layers) * (1 + MOST_WASTE):
        return LayerGroups.one_table(
            layers, f"{len(windowed)} layers with a window do not divide into runs of {whole}, as many as have none"
        )
    tables, places = [0] * len(layers), [0] * len(layers)
    for place, index in enumerate(index for index, layer in enumerate(layers) if layer.window is None):
        places[index] = place
    for number, index in enumerate(windowed):
        tables[index], places[index] = 1 + number // whole, number % whole
    return LayerGroups(tables, places, max(layer.window or 0 for layer in layers))
