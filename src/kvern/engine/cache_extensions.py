"""The extensions of the KV cache that an engine has: those that its model needs, and those that were registered."""

from collections.abc import Callable
from functools import partial

from kvern.cache.manager import MakeExtension
from kvern.cache.states import StatePool
from kvern.cache.tier import TierIndex, TierTraffic
from kvern.cache.windows import WindowedBlocks, WindowLimits
from kvern.config import EngineConfig
from kvern.runner.plan import Layout

STATES_APART = 512
"""Tokens of a prompt that a GPU computes in about the time of one more small step."""


def windows(config: EngineConfig, layout: Layout) -> MakeExtension | None:
    """The block tables of layers with a window, if they have some of their own."""
    if not layout.window_tables:
        return None
    sizes = layout.window, layout.window_tables, layout.max_batch_tokens, layout.positions
    return partial(WindowedBlocks, WindowLimits(*sizes))


def states(config: EngineConfig, layout: Layout) -> MakeExtension | None:
    """The states of recurrent layers, if the model has some."""
    apart = STATES_APART if layout.device == "cuda" else 1
    return partial(StatePool, layout.states, apart) if layout.states else None


EXTENSIONS: list[Callable[[EngineConfig, Layout], MakeExtension | None]] = [windows, states]
"""Each says how its extension is made for an engine, or None if the engine does not need it."""


def make_extensions(config: EngineConfig, layout: Layout, tier: TierIndex | None) -> list[MakeExtension]:
    """All extensions of an engine, a tier's last."""
    found = [made for make in EXTENSIONS if (made := make(config, layout)) is not None]
    return [*found, partial(TierTraffic, tier)] if tier is not None else found
