"""The thing that the best waiting request lacks, as the scheduler says it after each step."""

import pytest

from kvern.request.record import Lack
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

ROOMY = Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=60)
SHORT = {
    "rows": Setup(slots=1, max_model_len=60, spare_blocks=60, spare_budget=60),
    "blocks": Setup(slots=4, max_model_len=24, spare_blocks=0, spare_budget=60),
    "budget": Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=0, chunked=False),
    "batch": Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=60, continuous=False),
    "adapter": Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=60, adapter_places=1),
}


@pytest.mark.parametrize("lack", SHORT)
def test_what_is_short_is_named(lack: Lack) -> None:
    engine = SimulatedEngine(SHORT[lack])
    length = 50 if lack == "budget" else 18
    adapter = 1 if lack == "adapter" else None
    engine.add([0] * length, 5, adapter=adapter)
    if lack != "budget":
        engine.step()
        assert engine.scheduler.blocked is None, "nobody waits"
    engine.add([1] * length, 5, adapter=None if adapter is None else 2)
    engine.step()
    assert engine.scheduler.blocked == lack
    engine.run()
    engine.step()
    assert engine.scheduler.blocked is None


def test_nothing_is_short_where_all_find_a_place() -> None:
    engine = SimulatedEngine(ROOMY)
    for token in range(3):
        engine.add([token] * 9, 5)
        engine.step()
        assert engine.scheduler.blocked is None
