"""Engines on hardware of which there are no records: as `kvern plan` estimates them."""

from collections.abc import Sequence

from kvern.engine.step_load import StepLoad
from kvern.engine.step_timing import DECODES, SIZES
from kvern.errors import ConfigError
from kvern.planning.choice import ranked
from kvern.planning.estimate import Estimate, Model, Workload, step_factors
from kvern.planning.hardware import Card
from kvern.runner.plan import BATCH_REQUESTS, BATCH_TOKENS
from kvern.simulate.costs import RooflinePrice
from kvern.simulate.engine import EngineSizes, PaceSizes
from kvern.simulate.study import Condition

BLOCK_SIZE = 16
TARGET_STEPS = 3
"""The target of the time between tokens, in plain decode steps, as an engine on a GPU chooses it."""


def estimated_condition(model: Model, cards: Sequence[Card], workload: Workload) -> tuple[Condition, Estimate]:
    """Returns the best way for one engine to use all cards, as a condition. Raises ConfigError if there is none."""
    ways = ranked(model, cards, workload, lambda split: split.data == split.pipeline == 1)
    if not ways:
        raise ConfigError(f"no engine can use {len(cards)} cards for this model: give fewer with --hardware")
    best = ways[0]
    if best.lacks:
        raise ConfigError(f"the model does not fit on this hardware: with {best.split} {best.lacks}")
    card = cards[0]
    price = RooflinePrice(step_factors(model, card, best.split, best.token_bytes))
    device = "cpu" if card.host else "cuda"
    longest = model.spec.max_position_embeddings
    sizes = EngineSizes(
        blocks=min(best.cache_tokens, longest * BATCH_REQUESTS[device]) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=min(longest, best.cache_tokens),
        max_batch_requests=BATCH_REQUESTS[device],
        max_batch_tokens=BATCH_TOKENS[device],
        depth=1 if card.host else 2,
    )
    pace = None if card.host else _pace(price)
    return Condition(sizes, lambda seed: price, pace), best


def _pace(price: RooflinePrice) -> PaceSizes:
    """Returns the costs that such an engine would measure at its start."""

    def seconds(keys: int, pairs: float, rows: int) -> float:
        return price.seconds(StepLoad(rows, keys, pairs, 0.0, rows - DECODES), DECODES, 0)

    times = [seconds(0, 0.0, rows) for rows in SIZES]
    plain = seconds(0, 0.0, DECODES)
    many = 1e6
    per_key = (price.seconds(StepLoad(DECODES, int(many)), DECODES, 0) - plain) / many
    per_pair = (seconds(0, many, SIZES[0]) - times[0]) / many
    return PaceSizes(TARGET_STEPS * plain, True, SIZES, tuple(times), per_key, per_pair)
