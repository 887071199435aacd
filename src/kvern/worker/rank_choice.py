"""What of a step one rank decides for all.

Grammars, as what they allow depends on the time it takes, and logits processors, whose code may do anything.
"""

import torch

from kvern.device.ranks import Ranks
from kvern.device.transfer import upload
from kvern.worker.needs import Needs

CHOSEN_BY_FIRST = Needs.GRAMMAR | Needs.PROCESSORS


def chosen_by_first(ranks: Ranks, chosen: torch.Tensor, unknown: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The first rank's tokens `chosen` [S] int64, and its `unknown` rows, on all ranks; several wait for the device."""
    if ranks.size == 1:
        return chosen, unknown
    marked = chosen.clone()
    if unknown:
        rows = upload(unknown, torch.int64, chosen.device)
        marked[rows] = ~marked[rows]
    marked = ranks.first(marked)
    below = marked < 0
    return torch.where(below, ~marked, marked), below.nonzero()[:, 0].tolist()
