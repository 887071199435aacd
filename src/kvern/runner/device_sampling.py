"""From hidden states to tokens on the device, of requests that ask for no more than a temperature; what rows keep."""

from collections.abc import Sequence

from torch import Tensor

from kvern.device.device_batch import DeviceRows
from kvern.drafting.verification import verify
from kvern.kernels.batch import write_sampled
from kvern.kernels.sampling import SampledRows, VocabularyPart, sample
from kvern.layers.embedding import SharedHead
from kvern.models.decoder import Decoder
from kvern.request.step import ScheduledTokens
from kvern.runner.device_states import DeviceStateMemory


def sample_plain(
    decoder: Decoder, hidden: Tensor, slots: Tensor, positions: Tensor, rows: SampledRows
) -> tuple[Tensor, Tensor]:
    """The decoder's `own_logits` of `hidden [N, width]`, and one token [N] int64 for each of them; all ranks call this.

    `slots` and `positions`: as of `sample`. No rank has all logits: ranks show each other what parts of theirs found.
    """
    logits, head = decoder.own_logits(hidden), decoder.lm_head
    part = None
    if isinstance(head, SharedHead):
        part = VocabularyPart(head.held.start, len(head.held), decoder.build.ranks)
    return logits, sample(logits, None, slots, positions, rows, part)


def write_chosen(
    rows: DeviceRows,
    scheduled: Sequence[ScheduledTokens],
    slots: Tensor,
    positions: Tensor,
    chosen: Tensor,
    starts: Tensor | None,
    states: DeviceStateMemory | None,
    unknown: Sequence[int] = (),
) -> Tensor | None:
    """Let rows go on with the tokens `chosen` [S]; how many of them each keeps, of a step with drafts or behind them.

    `slots`, `positions` [S], `starts` [R] and `unknown`: as of `verify`. `starts`: None: another step, which keeps all.
    """
    kept = None
    if starts is not None:
        kept = verify(rows, scheduled, starts, slots, positions, chosen, unknown)
        if kept is not None and states is not None:
            states.accept(kept)
    write_sampled(rows.tokens, slots, positions, chosen)
    return kept
