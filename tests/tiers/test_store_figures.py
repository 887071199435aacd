"""Figures of stores for people: the rows of a final table."""

from pathlib import Path

import pytest

from kvern import LLM, SamplingParams
from kvern.request.store_figures import StoreFigures, StorePrice, store_rows
from tests.support.idle import core_here
from tests.support.tiers import tier_of


def test_rows_say_what_a_store_gave_and_what_a_load_costs() -> None:
    well = StoreFigures(hit_tokens=12_800, stored_tokens=64, latency_seconds=0.0005, bandwidth=4e9)
    ill = StoreFigures(refused_tokens=3, late_tokens=4, corrupt_pages=1, failures=3, bandwidth=2e8, is_on=False)
    assert store_rows({"host": well, "disk": ill}) == [
        ("KV tier host", "12,800 tokens loaded, 64 stored, 0.5 ms + 4.0 GB/s a load"),
        (
            "KV tier disk",
            "0 tokens loaded, 0 stored, 7 computed instead, 1 corrupt pages, 3 failures, 0.0 ms + 0.2 GB/s a load, off",
        ),
    ]
    assert store_rows({}) == []


def test_a_load_is_priced_in_tokens_that_are_computed_in_its_time(tiny_model: Path) -> None:
    """Nothing is said while nobody knows what computing takes, nor of a store that is off."""
    with LLM(str(tiny_model), threads=1, dtype="float32", kv_cache_tokens=512, kv_tier=("host:32MB",)) as llm:
        core, tier = core_here(llm), tier_of(llm)
        llm.generate([[5] * 200], SamplingParams(max_tokens=2))
        tier.computing = lambda start, end: (end - start) / 1000
        figures = tier.figures()["host"]
        size = tier._bytes[tier._counted] / 64
        prices = core.store_prices()
        assert prices is not None
        price = prices["host"]
        assert price.latency == pytest.approx(1000 * figures.latency_seconds)
        assert price.share == pytest.approx(1000 * size / figures.bandwidth)
        assert price.capacity == int(32e6 / size)
        for _ in range(3):
            tier.shelf.stores[0].breaker.failed(tier.shelf._clock())
        assert core.store_prices() == {}
        tier.computing = None
        assert core.store_prices() is None
    assert StorePrice(20.0, 0.25).gain(1000) == 730 and StorePrice(20.0, 0.25).gain(10) == 0
