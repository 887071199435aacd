"""Sampling in one call for all rows of a step: constraints, masks, the choice of tokens, log-probabilities.

The results are those of `sample.constraints`, `structured.masks`, `sample.sampler` and `sample.logprobs`, except for
DRY, rare filters and beams.
"""

import ctypes
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, POINTER, function

_sample = function("kvern_sample", *(POINTER,) * 5, INTEGER, INTEGER, CODE)
_write = function("kvern_write_tokens", POINTER, INTEGER, *(POINTER,) * 3, INTEGER)
_read = function("kvern_read_decodes", POINTER, POINTER, INTEGER, POINTER, INTEGER, INTEGER, *(POINTER,) * 6, INTEGER)
_constrain = function("kvern_constrain", *(POINTER,) * 5, INTEGER, INTEGER, INTEGER)
_restrict = function("kvern_restrict", *(POINTER,) * 3, INTEGER, INTEGER, INTEGER, CODE)
_logprobs = function("kvern_logprobs", *(POINTER,) * 6, INTEGER, INTEGER, INTEGER, CODE)

SAMPLED = ("seeds", "top_k", "temperature", "top_p", "min_p", "typical_p")
CONSTRAINED = ("changes", "prompt_lengths", "lists", "repetition", "presence", "frequency")
"""The fields of `Rows` in the order of the C++ struct."""


class Rows(Protocol):
    """The batch, a row for each slot.

    tokens  [slots, positions] int32
    seeds, top_k, changes, prompt_lengths, lists  [slots] int64
    temperature, top_p, min_p, typical_p, repetition, presence, frequency  [slots] float32
    """

    tokens: Tensor


class RowSampler:
    """Chooses tokens for rows of a batch, whose tensors must not move.

    logits     [N, vocabulary] float32 or bfloat16, without gaps
    slots      [N] int64: rows of the batch
    positions  [N] int64: positions of the sampled tokens
    """

    def __init__(self, rows: Rows) -> None:
        self.tokens = rows.tokens
        self._rows = rows
        self._sampled, self._constrained = (_addresses(rows, names) for names in (SAMPLED, CONSTRAINED))

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """One token [N] int64 for each row, which depends on no other row; 0 where nothing can be sampled."""
        assert logits.is_contiguous()
        count, vocabulary = logits.shape
        tokens = torch.empty(count, dtype=torch.int64)
        _sample(
            self._sampled, logits.data_ptr(), slots.data_ptr(), positions.data_ptr(), tokens.data_ptr(), count,
            vocabulary, DTYPES[logits.dtype],
        )  # fmt: skip
        return tokens

    def constrain(self, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Applies each request's constraints to `logits`, float32, in place."""
        assert logits.is_contiguous() and logits.dtype == torch.float32
        tokens = self.tokens
        _constrain(
            self._constrained, logits.data_ptr(), slots.data_ptr(), positions.data_ptr(), tokens.data_ptr(),
            tokens.stride(0), *logits.shape,
        )  # fmt: skip

    def write(self, slots: Tensor, positions: Tensor, chosen: Tensor) -> None:
        """Appends the chosen tokens [N] int64 to their rows."""
        tokens = self.tokens
        _write(
            tokens.data_ptr(), tokens.stride(0), slots.data_ptr(), positions.data_ptr(), chosen.data_ptr(), len(chosen)
        )


class DecodeInputs(NamedTuple):
    """The model's inputs for requests with one token each, `[R]` int64; see `device.input_batch`.

    `following`: the positions of the tokens that are sampled.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    following: Tensor


def read_decodes(
    requests: Tensor, tokens: Tensor, block_table: Tensor, turns: tuple[Tensor, Tensor], block_size: int
) -> DecodeInputs:
    """Slots and positions of requests, [2 or more, R] int64. The tables [slots, ...] int32 may have gaps.

    `turns`: those of the rows, [slots] int64 each.
    """
    count = requests.shape[1]
    inputs = DecodeInputs(*(torch.empty(count, dtype=torch.int64) for _ in DecodeInputs._fields))
    _read(
        requests.data_ptr(), tokens.data_ptr(), tokens.stride(0), block_table.data_ptr(), block_table.stride(0),
        block_size, *(item.data_ptr() for item in (*turns, *inputs)), count,
    )  # fmt: skip
    return inputs


def _addresses(rows: Rows, names: tuple[str, ...]) -> ctypes.Array[ctypes.c_void_p]:
    """A C++ struct of pointers to these tensors."""
    return (ctypes.c_void_p * len(names))(*(getattr(rows, name).data_ptr() for name in names))


def restrict(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Bans tokens of `rows` [R] int64 of `logits` [N, vocabulary] without a bit in `masks` [R, words] int32.

    If bans have left a row none of the tokens of its mask, the mask takes precedence.
    """
    assert logits.is_contiguous()
    vocabulary, (count, width) = logits.shape[1], masks.shape
    _restrict(
        logits.data_ptr(), rows.data_ptr(), masks.data_ptr(), count, vocabulary, width, DTYPES[logits.dtype]
    )  # fmt: skip


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` [N] int64 and of the `count` most probable ones, from logits [N, vocabulary].

    Log-probabilities [N] float32, ranks [N] int64, ids [N, count] int64 of the most probable ones, their
    log-probabilities. Of equally probable tokens the one with the lowest id comes first.
    """
    assert logits.is_contiguous()
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    own, best = torch.empty(rows), torch.empty(rows, count)
    ranks, ids = torch.empty(rows, dtype=torch.int64), torch.empty(rows, count, dtype=torch.int64)
    _logprobs(
        logits.data_ptr(), tokens.data_ptr(), own.data_ptr(), ranks.data_ptr(), ids.data_ptr(), best.data_ptr(), rows,
        vocabulary, count, DTYPES[logits.dtype],
    )  # fmt: skip
    return own, ranks, ids, best
