"""The times that an engine predicts for its steps: the costs that it would measure at its start."""

from kvern.engine.step_load import StepLoad
from kvern.engine.step_timing import DECODES, SIZES
from kvern.simulate.engine import PaceSizes
from kvern.simulate.executor import Price

TARGET_STEPS = 3
"""The target of the time between tokens, in plain decode steps, as an engine on a GPU chooses it."""


def predicted(price: Price, has_target: bool) -> PaceSizes:
    """Returns the costs of steps, and the target of an engine on a GPU if it `has_target`."""

    def seconds(keys: int, pairs: float, rows: int) -> float:
        return price.seconds(StepLoad(rows, keys, pairs, 0.0, rows - DECODES), DECODES, 0)

    times = [seconds(0, 0.0, rows) for rows in SIZES]
    plain = seconds(0, 0.0, DECODES)
    many = 1e6
    per_key = (price.seconds(StepLoad(DECODES, int(many)), DECODES, 0) - plain) / many
    per_pair = (seconds(0, many, SIZES[0]) - times[0]) / many
    target = TARGET_STEPS * plain if has_target else 0.0
    return PaceSizes(target, has_target, SIZES, tuple(times), per_key, per_pair)
