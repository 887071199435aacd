"""Makes the tier of a rank from its options: the identity of its pages, and its stores."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from kvern.attention.eight_bit import EightBit
from kvern.attention.groups import LayerGroups
from kvern.cache.keys import model_identity
from kvern.cache.messages import blocks_of_page
from kvern.config import EngineConfig
from kvern.errors import ConfigError, without_passwords
from kvern.models.fallback.spec import TransformersSpec
from kvern.ranks.ranks import Ranks
from kvern.runner.cached_model import StateStack
from kvern.runner.memory import bytes_of_packed
from kvern.runner.page_groups import DRAFTS, STATES, HeadGroup, PageMover
from kvern.runner.page_mover import TorchMover, head_groups, state_groups
from kvern.runner.plan import Layout, Plan
from kvern.runner.tier import Tier
from kvern.spec.mixers import AttentionSpec, RecurrentSpec
from kvern.spec.model import ModelSpec
from kvern.tiers.arena import HOST, host_size, map_arena
from kvern.tiers.host import HostStore
from kvern.tiers.pages import FORMAT_VERSION
from kvern.tiers.peer import PEER, PeerStore
from kvern.tiers.shelf import Shelf
from kvern.tiers.store import Identity, Store, make_store, read_age


class CachedDraft(NamedTuple):
    """A draft model or head: its `name` says which and how its weights are stored.

    `attentions` are those of whole layers.
    """

    name: str
    is_head: bool
    attentions: Sequence[AttentionSpec]
    caches: Sequence[torch.Tensor]


@dataclass(frozen=True)
class TieredCache:
    """The KV cache of a rank, for which a tier is made.

    `spec`: of the whole model in `folder`. `caches`: of the rank's layers, as of `Runner`. `groups`: of these layers.
    `states`: of its layers that have any.
    """

    folder: Path
    spec: ModelSpec
    plan: Plan
    layout: Layout
    ranks: Ranks
    caches: Sequence[torch.Tensor]
    states: Sequence[StateStack]
    groups: LayerGroups
    eight_bit: EightBit | None
    draft: CachedDraft | None


def start_tier(config: EngineConfig, cache: TieredCache) -> tuple[Tier, list[str]]:
    """The tier of a rank, and lines for the report of a start. Raises ConfigError."""
    spec = cache.spec
    layout = cache.layout
    ranks = cache.ranks
    stage = ranks.stage.layers
    caching = zip(spec.caching_layers, spec.attentions, strict=True)
    places = [(layer, kept) for layer, kept in caching if stage is None or layer in stage]
    scales = None if cache.eight_bit is None else cache.eight_bit.scales
    layers = [layer for layer, _ in places]
    tables, caches = tables_of(cache)
    groups = head_groups(caches, [kept for _, kept in places], layers, tables, ranks, scales)
    if (draft := cache.draft) is not None:
        places_of_draft = range(len(draft.caches))
        tables = [0 if draft.is_head else DRAFTS for _ in places_of_draft]
        groups += head_groups(draft.caches, draft.attentions, places_of_draft, tables, ranks, None, draft.name)
    token_bytes = sum(len(group.kinds) * group.block_bytes for group in groups) // layout.block_size
    here = [(place, layer) for place, layer in enumerate(spec.layers) if stage is None or place in stage]
    mixers = [(place, mixer) for place, layer in here for mixer in layer.mixers]
    states = state_groups([place for place, mixer in mixers if isinstance(mixer, RecurrentSpec)], cache.states, ranks)
    state_bytes = sum(len(group.kinds) * group.block_bytes for group in states)
    mover = make_mover([*groups, *states], layout.block_size, bytes_of_packed(cache.plan, token_bytes, state_bytes))
    identity = identity_of(config, cache, mover.sums)
    stores: dict[str, Store] = {}
    lines = []
    for option in config.kv_tier:
        kind = option.partition(":")[0]
        if kind == HOST:
            store, line = _host_store(option, config, ranks, mover)
        elif option == PEER:
            store, line = _peer_store(config, ranks, mover)
        else:
            store, line = make_store(option, identity), ""
        lines.append(line or f"pages of the KV cache are kept in {without_passwords(option)}")
        number = sum(name.partition("-")[0] == kind for name in stores)
        stores[f"{kind}-{number + 1}" if number else kind] = store
    lines.append(f"pages are those of {identity.digest.hex()}")
    shelf = Shelf(stores, memory=mover, by_heads=config.kv_tier_heads)
    return Tier(mover, shelf, identity.digest, layout.block_size), lines


def tables_of(cache: TieredCache) -> tuple[list[int], list[torch.Tensor]]:
    """The block table of each layer, 0 without a window, and its memory, where blocks are those of the pool."""
    if not cache.layout.window_tables:
        return [0] * len(cache.caches), list(cache.caches)
    windows = cache.groups.windows
    tables = [table if table <= windows.tables else 0 for table in cache.groups.tables]
    fitting = [windows.parts if table else windows.whole_parts for table in tables]
    return tables, [own[:, ::count] for own, count in zip(cache.caches, fitting, strict=True)]


def make_mover(groups: Sequence[HeadGroup], block_size: int, most_packed: int) -> PageMover:
    """The mover of these caches: with kernels and copies beside steps on NVIDIA GPUs.

    `most_packed`: the bytes of the pages of a large step.
    """
    if groups[0].caches[0].device.type == "cuda" and torch.version.hip is None:
        from kvern.runner.device_page_mover import DeviceMover

        return DeviceMover(
            groups, [1 if group.table == STATES else blocks_of_page(block_size) for group in groups], most_packed
        )
    return TorchMover(groups)


def identity_of(config: EngineConfig, cache: TieredCache, sums: str) -> Identity:
    """The identity of all pages of an engine, however many ranks it has: weights, number formats, positions.

    `sums`: the name of the mover's checksum.
    """
    plan, layout = cache.plan, cache.layout
    turns = {
        repr((rope.theta, rope.dim, rope.scaling.frequencies(rope.theta, rope.dim, layout.max_model_len)))
        for layer in cache.spec.layers
        if (rope := layer.rope) is not None
    }
    if isinstance(cache.spec, TransformersSpec):
        turns = {f"those of transformers {version('transformers')}"}
    head = ", int8 head" if config.has_int8_head(layout.device) else ""
    described = {
        "weights": f"{config.load_format} {config.quantization or 'as stored'}{head}",
        "dtype": plan.dtype,
        "cache": layout.dtype,
        "block_size": str(layout.block_size),
        "positions": hashlib.blake2b(repr(sorted(turns)).encode(), digest_size=8).hexdigest(),
        "format": f"{FORMAT_VERSION} {sums}",
    }
    if config.pipeline_parallel_size > 1:  # the last stage alone knows the draft
        described["draft"] = f"{config.draft_model} {config.draft_format}"
    if config.deterministic:
        sizes = config.tensor_parallel_size, config.pipeline_parallel_size
        described["bits"] = repr((layout.device, sizes, sorted(plan.kernels), sorted(layout.attention.items())))
    digest = model_identity(cache.folder, sorted(described.items()))
    return Identity(digest, {"model": config.model or cache.folder.name, **described}, _max_age(config))


def _max_age(config: EngineConfig) -> float | None:
    if config.kv_tier_max_age is None:
        return None
    try:
        return read_age(config.kv_tier_max_age)
    except ValueError as error:
        raise ConfigError(f"kv_tier_max_age: {error}") from error


def _host_store(option: str, config: EngineConfig, ranks: Ranks, mover: PageMover) -> tuple[Store, str]:
    """This rank's part of the memory of an option host:SIZE, and a line for the report."""
    number, parts = _part(config, ranks)
    size = host_size(option)
    each = size // parts
    line = f"pages of the KV cache are kept in {size / 1e9:.2f} GB of host memory"
    memory = map_arena(each, number, parts)
    size = each if memory is None else len(memory)
    if config.kv_tier_heads:
        return HostStore(size, memory), f"{line}, by heads"
    store = HostStore(size, memory, mover.cell)
    mover.pin(store)
    return store, line


def _peer_store(config: EngineConfig, ranks: Ranks, mover: PageMover) -> tuple[Store, str]:
    """The part of the other engines' host memory that this rank reads, and a line for the report."""
    store = PeerStore(*_part(config, ranks), None if mover.cell is None else mover.pin)
    store.watch()
    return store, "pages of the KV cache are read from the host memory of other engines"


def _part(config: EngineConfig, ranks: Ranks) -> tuple[int, int]:
    """This rank's number among all that share an engine's memory, and how many these are."""
    if ranks.dp_attention is not None:
        return ranks.dp_attention.ranks.rank, config.ranks
    return ranks.number, config.ranks
