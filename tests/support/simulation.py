"""Sizes and prices for simulated engines."""

import random
from typing import Any

from kvern.engine.step_load import StepLoad
from kvern.simulate.engine import EngineSizes
from kvern.simulate.executor import Price

SIZES = EngineSizes(blocks=64, block_size=16, max_model_len=512, max_batch_requests=4, max_batch_tokens=64)


class EvenPrice(Price):
    """A second for each step, and a hundredth for each token of it."""

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        return 1.0 + 0.01 * load.rows


class DrawnPrice(Price):
    """A price of which every step draws a part."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        return (0.01 + 0.001 * load.rows + 1e-6 * load.keys) * (0.5 + self._dice.random())

    def mark(self) -> Any:
        return self._dice.getstate()

    def back(self, mark: Any) -> None:
        self._dice.setstate(mark)
