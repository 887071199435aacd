"""Sizes and a price for simulated engines."""

from kvern.engine.step_load import StepLoad
from kvern.simulate.engine import EngineSizes

SIZES = EngineSizes(blocks=64, block_size=16, max_model_len=512, max_batch_requests=4, max_batch_tokens=64)


class EvenPrice:
    """A second for each step, and a hundredth for each token of it."""

    def seconds(self, load: StepLoad, requests: int, joined: int) -> float:
        return 1.0 + 0.01 * load.rows
