"""Tiers of simulated engines by their options, such as host:64GB or disk:1TB?bandwidth=6GB&latency=1ms."""

from collections.abc import Sequence

import msgspec

from kvern.config import read_seconds
from kvern.errors import ConfigError
from kvern.simulate.engine import EngineSizes
from kvern.simulate.tiers import HOST, StoreSizes, TierSizes
from kvern.tiers.shelved import LOCAL
from kvern.tiers.store import read_bytes

ASSUMED = {
    (HOST, True): (0.001, 47e9, "as it was measured on an H200"),
    (HOST, False): (0.0012, 0.85e9, "as it was measured on a CPU of two cores"),
    ("disk", True): (*LOCAL, "as an engine expects of a disk"),
    ("disk", False): (*LOCAL, "as an engine expects of a disk"),
}
"""The latency, bytes a second, and who says so, by kind, and by whether the KV cache is a GPU's."""


def with_tier(sizes: EngineSizes, options: Sequence[str]) -> EngineSizes:
    """Returns the sizes of an engine with these stores, or without any. Raises ConfigError."""
    if not options:
        return msgspec.structs.replace(sizes, tier=None)
    shown = " ".join(options)
    if not sizes.token_bytes:
        raise ConfigError(f"kv_tier is {shown!r:.80}, and the record does not say what a token takes: record anew")
    stores = tuple(_store(option, sizes) for option in options)
    if len({store.name for store in stores}) < len(stores):
        raise ConfigError(f"kv_tier is {shown!r:.80}: one store of each kind is simulated")
    return msgspec.structs.replace(sizes, tier=TierSizes(stores))


def _store(option: str, sizes: EngineSizes) -> StoreSizes:
    place, _, query = option.partition("?")
    kind, _, rest = place.partition(":")
    if (kind, sizes.on_device) not in ASSUMED:
        raise ConfigError(f"kv_tier is {option!r:.60}: simulated are {HOST}:SIZE and disk:SIZE")
    latency, bandwidth, basis = ASSUMED[kind, sizes.on_device]
    for store in () if sizes.tier is None else sizes.tier.stores:
        if store.name == kind:  # a record of an engine with a tier has measured it
            latency, bandwidth, basis = msgspec.structs.astuple(store)[2:]
    try:
        size = read_bytes(rest.rpartition(":")[2])
        for part in filter(None, query.split("&")):
            name, _, value = part.partition("=")
            if name == "bandwidth":
                bandwidth, basis = read_bytes(value), "as given"
            elif name == "latency":
                latency, basis = read_seconds("latency", value), "as given"
            else:
                raise ValueError(f"{name!r:.40} is not bandwidth or latency")
    except ValueError as error:
        raise ConfigError(f"kv_tier is {option!r:.60}: {error}") from None
    return StoreSizes(kind, size, latency, bandwidth, basis)


def told(sizes: EngineSizes) -> list[str]:
    """Returns a line for each store: how fast it is, and who says that."""
    stores = () if sizes.tier is None else sizes.tier.stores
    return [
        f"{store.name} moves {store.bandwidth / 1e9:.3g} GB/s after {1000 * store.latency:.3g} ms, {store.basis}"
        for store in stores
    ]
