"""Figures of a store of the KV cache's tier, as statistics and metrics have them."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace


class StorePrice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The price of loads from a store, in tokens of a prompt that the engine computes in the same time.

    latency   of each load
    share     of each loaded token; 1 and more: computing is faster
    capacity  tokens whose pages the store holds; 0: that is not known
    """

    latency: float
    share: float
    capacity: int = 0

    def gain(self, tokens: int) -> int:
        """Returns the tokens whose computing a load of `tokens` saves; 0: it does not pay."""
        return max(0, int(tokens * (1 - self.share) - self.latency))


class StoreFigures(msgspec.Struct, array_like=True, gc=False):
    """Counters of a store since the engine started, and its price and state now.

    hit_tokens       tokens that were loaded from it, whole and right
    missed_tokens    tokens of pages that it did not have
    stored_tokens    tokens whose pages it keeps since
    evicted_pages    pages that made room for others, if the store counts them
    late_tokens      tokens that had not come in time, and were computed
    corrupt_pages    pages with a wrong header or sum
    refused_tokens   tokens that were computed because loading them would have taken longer
    skipped_tokens   tokens that were not saved: too many bytes were on their way, or the store did not take them
    failures         calls that raised, or lied about how much they did
    read_bytes, written_bytes, read_seconds, written_seconds
    latency_seconds, bandwidth  the price, in seconds and bytes a second
    is_on            False while it is not asked, since it failed
    """

    hit_tokens: int = 0
    missed_tokens: int = 0
    stored_tokens: int = 0
    evicted_pages: int = 0
    late_tokens: int = 0
    corrupt_pages: int = 0
    refused_tokens: int = 0
    skipped_tokens: int = 0
    failures: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    written_seconds: float = 0.0
    latency_seconds: float = 0.0
    bandwidth: float = 0.0
    is_on: bool = True


GAUGES = frozenset({"latency_seconds", "bandwidth", "is_on"})
"""The fields that are values of now."""


def store_rows(stores: Mapping[str, StoreFigures]) -> list[tuple[str, str]]:
    """Returns rows for a final table: what each store gave and got, its price, and what went wrong; none without
    stores."""
    return [(f"KV tier {name}", _said(figures)) for name, figures in stores.items()]


def _said(figures: StoreFigures) -> str:
    parts = [f"{figures.hit_tokens:,} tokens loaded", f"{figures.stored_tokens:,} stored"]
    also = {
        "computed instead": figures.refused_tokens + figures.late_tokens,
        "not stored": figures.skipped_tokens,
        "corrupt pages": figures.corrupt_pages,
        "failures": figures.failures,
    }
    parts += [f"{count:,} {what}" for what, count in also.items() if count]
    parts.append(f"{1000 * figures.latency_seconds:.1f} ms + {figures.bandwidth / 1e9:.1f} GB/s a load")
    return ", ".join(parts if figures.is_on else [*parts, "off"])


def summed(each: Iterable[Mapping[str, StoreFigures]]) -> dict[str, StoreFigures]:
    """The figures of stores of several engines, by name: sums of counters, and the last engine's values of now."""
    found: dict[str, StoreFigures] = {}
    for stores in each:
        for name, figures in stores.items():
            before = found.get(name, StoreFigures())
            counters = [field for field in StoreFigures.__struct_fields__ if field not in GAUGES]
            sums = {field: getattr(before, field) + getattr(figures, field) for field in counters}
            found[name] = replace(figures, **sums)
    return found
