"""Who attends in each phase is measured at start, PyTorch's attention beside kvern's kernels on cards without tiles."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.attention import selection
from kvern.attention.gathered import GatheredKernels
from kvern.attention.selection import AttentionChoice, Shapes, choose, make_queries, reference_attention
from kvern.attention.triton import cached_layer
from kvern.config import EngineConfig
from kvern.device.measurements import Measurements
from kvern.spec.mixers import AttentionSpec

PLAIN = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25)
WINDOWED = AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.3, window=9)
REQUESTS = [(0, 7), (13, 1), (29, 12), (0, 1), (5, 3)]


def shapes_of(*layers: AttentionSpec) -> Shapes:
    return Shapes(layers, 4, torch.float32, torch.float32, torch.device("cpu"), 4, 64)


@pytest.mark.parametrize("layer", [PLAIN, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("masked", [1 << 26, 100], ids=["whole", "cut"])
def test_gathered_attention_is_that_of_the_reference(
    layer: AttentionSpec, masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvern.attention.gathered.MASKED", masked)
    shapes = shapes_of(layer)
    queries, query, cache = make_queries(REQUESTS, shapes, layer)
    out = torch.full_like(query, float("nan"))
    GatheredKernels([layer]).prefill(queries)(0, query, cached_layer(layer, cache), out)
    torch.testing.assert_close(out, reference_attention(queries, query, cache, layer), rtol=1e-5, atol=1e-5)


def test_blocks_that_a_window_has_passed_are_not_read() -> None:
    queries, query, cache = make_queries([(29, 2)], shapes_of(WINDOWED), WINDOWED)
    expected = reference_attention(queries, query, cache, WINDOWED)
    cache[:, queries.block_table[0, :5].long()] = float("nan")
    out = torch.empty_like(query)
    GatheredKernels([WINDOWED]).prefill(queries)(0, query, cached_layer(WINDOWED, cache), out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., AttentionChoice]:
    """Chooses on a card of an architecture, where launches take so many microseconds, by a part of their name."""
    monkeypatch.setattr(selection, "PACKAGES", {})

    def on(
        card: int | str, times: Mapping[str, float], layer: AttentionSpec = PLAIN, **options: Any
    ) -> AttentionChoice:
        def timed(launch: Any) -> float:
            return next(1e-6 * time for name, time in times.items() if name in launch.func.__qualname__)

        monkeypatch.setattr(selection, "architecture", lambda device: card)
        monkeypatch.setattr(selection, "time_launches", timed)
        measurements = Measurements(tmp_path, torch.device("cpu"))
        found = choose("auto", EngineConfig(model="none", **options), shapes_of(layer), measurements)
        measurements.save()
        return found

    return on


SLOW_TRITON = {"Triton": 30.0, "SplitPrefill": 30.0, "Gathered": 20.0}
FAST_TRITON = {"Triton": 10.0, "SplitPrefill": 10.0, "Gathered": 20.0}


@pytest.mark.parametrize("card", ["gfx942", 80])
def test_the_faster_attends_and_the_table_says_so(card: int | str, chosen: Callable[..., AttentionChoice]) -> None:
    found = chosen(card, SLOW_TRITON, cuda_graphs=False)
    assert set(found.phases.values()) == {"torch"}
    head, *lines = found.table
    assert head.split() == ["attention,", "us", "a", "layer", "triton", "torch", "chosen"]
    assert lines[0].split() == ["decode,", "short", "30.0", "20.0", "torch"]


def test_decodes_stay_with_what_graphs_capture(chosen: Callable[..., AttentionChoice]) -> None:
    phases = chosen("gfx950", SLOW_TRITON).phases
    assert phases.pop("decode") == "triton"
    assert set(phases.values()) == {"torch"}


def test_a_choice_is_remembered(chosen: Callable[..., AttentionChoice]) -> None:
    assert set(chosen("gfx942", FAST_TRITON).phases.values()) == {"triton"}
    again = chosen("gfx942", SLOW_TRITON)
    assert set(again.phases.values()) == {"triton"} and not again.table


@pytest.mark.parametrize(
    ("card", "layer", "options"),
    [
        (90, PLAIN, {}),
        (0, PLAIN, {}),
        ("gfx942", PLAIN, {"deterministic": True}),
        ("gfx942", AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.3, softcap=5.0), {}),
        ("gfx942", AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.3, sinks=True), {}),
    ],
    ids=["Hopper", "interpreted", "deterministic", "softcap", "sinks"],
)
def test_nothing_is_timed_where_there_is_no_choice(
    card: int | str, layer: AttentionSpec, options: dict[str, Any], chosen: Callable[..., AttentionChoice]
) -> None:
    found = chosen(card, {}, layer, **options)
    assert set(found.phases.values()) == {"triton"} and not found.table
