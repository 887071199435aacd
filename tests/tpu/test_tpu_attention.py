"""The Pallas kernel for TPUs under JAX's interpreter, which simulates HBM, VMEM and copies, and finds races."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvern.spec.mixers import AttentionSpec
from tests.support.tpu import Case, needs_jax

pytestmark = needs_jax

GROUPED = AttentionSpec(4, 2, 64, 0.125)
DECODES = {"spec": GROUPED, "block_size": 16, "starts": (0, 30, 47, 0), "counts": (1, 1, 1, 0)}
CHUNK = {"spec": GROUPED, "block_size": 8, "starts": (13,), "counts": (20,)}
WINDOW = {"spec": AttentionSpec(2, 2, 32, 0.2, window=9), "block_size": 8, "starts": (21, 0), "counts": (20, 11)}
CASES = {"decodes": DECODES, "chunk": CHUNK, "window": WINDOW}


def interpreted(dma_execution_mode: str = "on_wait") -> Any:
    from jax.experimental.pallas import tpu as pltpu

    from kvern.tpu.attention import paged

    return partial(paged, interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode=dma_execution_mode))


@pytest.fixture
def races() -> Iterator[Any]:
    """Whether the interpreter found a race since the test began."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()
    yield lambda: interpret_pallas_call.races.races_found
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_attends_as_float64_does_and_has_no_race(
    name: str, races: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvern.tpu.attention.TILE_BYTES", 1)  # tiles of 8 queries
    assert max(Case.drawn(**CASES[name]).differences(interpreted())) < 2e-6
    assert not races()


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_attends_so_in_bfloat16_and_with_copies_that_are_made_at_once(name: str, races: Any) -> None:
    case = Case.drawn(**CASES[name])
    assert max(case.differences(interpreted("eager"))) < 2e-6
    assert 1e-4 < max(case.differences(interpreted(), "bfloat16")) < 2e-2
    assert not races()


@pytest.mark.parametrize("name", CASES)
def test_plain_attention_is_that_of_float64(name: str) -> None:
    from kvern.tpu.attention import plain

    assert max(Case.drawn(**CASES[name]).differences(plain)) < 2e-6


def test_a_kernel_that_does_not_wait_for_its_copies_is_found(races: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas import tpu as pltpu

    make = pltpu.make_async_copy

    class Hasty:
        def __init__(self, *places: Any) -> None:
            self.start = make(*places).start

        def wait(self) -> None:
            pass

    monkeypatch.setattr(pltpu, "make_async_copy", Hasty)
    Case.drawn(GROUPED, 16, (30,), (1,)).differences(interpreted("eager"))
    assert races()


def test_a_tile_of_queries_takes_no_more_memory_than_there_is_for_it() -> None:
    from kvern.tpu.attention import tile_of

    tiles = [
        tile_of(AttentionSpec(heads, 8, 128, 0.1), dtype) for heads in (32, 64) for dtype in ("bfloat16", "float32")
    ]
    assert tiles == [48, 32, 24, 16]
