"""The choice of tokens by ranks: those of the last stage choose, and the first of them decides some for all.

Grammars, as what they allow depends on the time it takes, and logits processors, whose code may do anything.
"""

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.ranks.ranks import Ranks
from kvern.request.step import SchedulerOutput
from kvern.runner.needs import RowNeeds, SamplingNeeds
from kvern.runner.processor_rows import ProcessorRows
from kvern.structured.masks import GrammarRows

CHOSEN_BY_FIRST = SamplingNeeds.GRAMMAR | SamplingNeeds.PROCESSORS


def change_choices(
    ranks: Ranks,
    output: SchedulerOutput,
    rows: BatchRows,
    grammars: GrammarRows,
    processors: ProcessorRows,
    needs: RowNeeds,
) -> None:
    """Tell what chooses tokens here of the `rows` that a step let fork and join."""
    if not ranks.stage.is_last or not (output.forked or output.joined):
        return
    grammars.fork(output.forked)
    processors.fork(output.forked, rows)
    needs.fork(output.forked)
    grammars.join(output.joined if ranks.rank == 0 else ())
    processors.join(output.joined)
    needs.join(output.joined)


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
