"""Engines on hardware of which there are no records: as `kvern plan` estimates them."""

import math
from collections.abc import Sequence

from kvern.errors import ConfigError
from kvern.planning.choice import ranked
from kvern.planning.estimate import Estimate, Model, Workload, step_factors
from kvern.planning.hardware import Card
from kvern.runner.plan import BATCH_REQUESTS, BATCH_TOKENS
from kvern.simulate.costs import RooflinePrice
from kvern.simulate.engine import EngineSizes
from kvern.simulate.prediction import predicted
from kvern.simulate.study import Condition

BLOCK_SIZE = 16


def left_out(model: Model) -> list[str]:
    """Returns what a model's layers do that a simulation does not, in words."""
    found = []
    if any(item.window for item in model.spec.attentions):
        found.append("left out: a server frees the blocks behind its windows, and here they stay taken")
    if model.spec.recurrent:
        found.append("left out: a server finds prefixes only where it kept a state, and here it finds all")
    return found


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
        token_bytes=math.ceil(best.token_bytes),
        on_device=not card.host,
    )
    pace = None if card.host else predicted(price, has_target=True)
    return Condition(sizes, lambda seed: price, pace), best
