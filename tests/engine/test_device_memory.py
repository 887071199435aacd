"""How much of a device's memory an engine takes."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvern import EngineConfig
from kvern.errors import ConfigError
from kvern.runner.memory import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    DeviceMemory,
    bytes_of_drafting,
    bytes_of_reading,
    cache_bytes,
    left_of_share,
)

GIB = 1 << 30
TOTAL = 80 * GIB


def test_without_a_share_all_that_is_free_is_there() -> None:
    assert left_of_share(70 * GIB, TOTAL, 10 * GIB, None) == 70 * GIB


def test_a_share_counts_what_the_engine_holds_and_not_what_others_hold() -> None:
    alone = left_of_share(64 * GIB, TOTAL, 16 * GIB, 0.4)
    assert alone == 32 * GIB - 16 * GIB - CONTEXT_BYTES
    assert left_of_share(32 * GIB, TOTAL, 16 * GIB, 0.4) == alone


def test_two_shares_of_which_each_fits_fit_together() -> None:
    weights, free = 4 * GIB, TOTAL
    for _ in range(2):
        free -= CONTEXT_BYTES + weights
        cache = left_of_share(free, TOTAL, weights, 0.5)
        assert cache > 34 * GIB
        free -= cache
    assert free >= 0


def test_a_share_is_no_promise() -> None:
    assert left_of_share(GIB, TOTAL, 16 * GIB, 0.9) == GIB
    assert left_of_share(64 * GIB, TOTAL, 40 * GIB, 0.4) == 0


def test_a_cpu_has_no_shares_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        shared = DeviceMemory(torch.device("cpu"), 0.4)
    assert "gpu_memory_share is 0.4 and has no effect: the model runs on a CPU" in caplog.text
    assert cache_bytes(shared, 1024) == cache_bytes(DeviceMemory(torch.device("cpu")), 1024)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_is_a_part_of_the_whole(share: float) -> None:
    with pytest.raises(ConfigError, match=f"gpu_memory_share is {share}"):
        EngineConfig(gpu_memory_share=share)


def test_what_an_earlier_engine_gave_back_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps it until the check of kernels empties its cache; the share does not grow by it."""
    kept = [45 * GIB]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - kept[0], TOTAL))
    memory = DeviceMemory(torch.device("cuda"), 0.4)
    torch.cuda.empty_cache()
    assert memory.free_and_total() == (left_of_share(TOTAL, TOTAL, 0, 0.4), TOTAL)
    memory.mapped = GIB
    assert memory.free_and_total() == (left_of_share(TOTAL, TOTAL, GIB, 0.4), TOTAL), "what other GPUs write to is held"


def test_what_drafts_take_is_counted() -> None:
    """Scores of all rows and graphs; or what drafts were drawn from, which no graph draws."""
    spec: Any = SimpleNamespace(vocab_size=1000)
    assert bytes_of_drafting(spec, 2, 64, 14, 0) == 14 * GRAPH_BYTES + 64 * 1000 * 6
    assert bytes_of_drafting(spec, 2, 64, 14, 256) == 4 * 256 * 1000 * 4
    spec = SimpleNamespace(hidden_size=64)
    assert bytes_of_reading(spec, 2, [512, 128]) == 2 * GRAPH_BYTES + 512 * 16 * 64 * 2
    assert bytes_of_reading(spec, 2, []) == 0
