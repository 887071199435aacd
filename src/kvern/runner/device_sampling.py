"""Sampling on the device from hidden states, by kernels alone: what graphs can do."""

from torch import Tensor

from kvern.device import marks
from kvern.device.device_batch import DeviceRows
from kvern.kernels.constraints import change
from kvern.kernels.logprobs import Found, logprobs
from kvern.kernels.sampling import SampledRows, VocabularyPart, sample
from kvern.layers.embedding import SharedHead
from kvern.models.decoder import DeviceLanguageModel


def sample_plain(
    decoder: DeviceLanguageModel, hidden: Tensor, slots: Tensor, positions: Tensor, rows: SampledRows
) -> tuple[Tensor, Tensor]:
    """Sample for rows that ask for a temperature alone: `own_logits` of `hidden [N, width]`, and tokens [N] int64.

    `slots` and `positions`: as of `sample`. All ranks call this: each samples from its logits, and they compare.
    """
    logits, head = decoder.own_logits(hidden), decoder.lm_head
    part = None
    if isinstance(head, SharedHead):
        part = VocabularyPart(head.held.start, len(head.held), decoder.build.ranks)
    marks.begin(marks.SAMPLING)
    return logits, sample(logits, None, slots, positions, rows, part)


def sample_as_asked(
    decoder: DeviceLanguageModel, hidden: Tensor, slots: Tensor, positions: Tensor, rows: DeviceRows, reported: Found
) -> tuple[Tensor, Tensor]:
    """Sample for rows that may ask for more than a temperature; returns the logits of all ranks, and tokens.

    The log-probabilities that rows ask for are written to `reported`.
    """
    logits = decoder.logits(hidden, upcast=False)
    marks.begin(marks.SAMPLING)
    scores = change(logits, slots, positions, rows, everything=False)
    sampled = sample(logits, scores, slots, positions, rows)
    logprobs(logits, slots, rows.logprobs, sampled, reported)
    return logits, sampled
