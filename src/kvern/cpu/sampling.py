"""Sampling in one call for all rows of a step: constraints, masks, the choice of tokens, log-probabilities.

The results are those of `sample.constraints`, `structured.masks`, `sample.sampler` and `sample.logprobs`, except for
DRY, rare filters and beams.
"""

import ctypes
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, POINTER, close_to, function

_sample = function("kvern_sample", *(POINTER,) * 5, INTEGER, INTEGER, CODE)
_write = function("kvern_write_tokens", POINTER, INTEGER, *(POINTER,) * 3, INTEGER)
_read = function("kvern_read_decodes", POINTER, POINTER, INTEGER, POINTER, INTEGER, INTEGER, *(POINTER,) * 4, INTEGER)
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


def read_decodes(requests: Tensor, tokens: Tensor, block_table: Tensor, block_size: int) -> DecodeInputs:
    """Slots and positions of requests, [2 or more, R] int64. The tables [slots, ...] int32 may have gaps."""
    count = requests.shape[1]
    inputs = DecodeInputs(*(torch.empty(count, dtype=torch.int64) for _ in DecodeInputs._fields))
    _read(
        requests.data_ptr(), tokens.data_ptr(), tokens.stride(0), block_table.data_ptr(), block_table.stride(0),
        block_size, *(item.data_ptr() for item in inputs), count,
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


class _ThreeRows:
    """Three rows, as in `kvern.device.row_lists`, with the text 1 2 2: greedy, sampled, and sampled with top-k 1.

    The prompt is token 1, token 2 is penalized, token 3 is banned in the last row.
    """

    tokens = torch.tensor([[1, 2, 2, 7]] * 3, dtype=torch.int32)
    seeds = torch.tensor([5, -6, 7])
    top_k = torch.tensor([0, 0, 1])
    changes = torch.tensor([0, 1, 3])
    prompt_lengths = torch.tensor([1, 1, 1])
    temperature = torch.tensor([0.0, 0.7, 1.3])
    top_p, min_p, typical_p = torch.tensor([[1.0, 1.0, 0.9], [0.0, 0.0, 0.1], [1.0, 1.0, 0.8]])
    repetition, presence, frequency = torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.5, 0.5], [0.0, 0.25, 0.25]])
    ban = torch.tensor([0, 0, 1, 1000, 0, 0, 3], dtype=torch.int32)
    """Lists of the last row: no biases, one token that ends, and that only from position 1000 on."""
    lists = torch.tensor([0, 0, ban.data_ptr()])


def check() -> None:
    """Compare with PyTorch. Raises AssertionError."""
    generator = torch.Generator().manual_seed(0)
    slots, positions = torch.arange(3), torch.tensor([3, 3, 3])
    sampler = RowSampler(_ThreeRows())
    for dtype, vocabulary in ((torch.float32, 5003), (torch.bfloat16, 4096)):
        logits = torch.randn(3, vocabulary, generator=generator).to(dtype)
        greedy, drawn, best = sampler.sample(logits, slots, positions).tolist()
        highest = logits.argmax(-1).tolist()
        assert [greedy, best] == [highest[0], highest[2]], "the most probable tokens are wrong"
        times = torch.tensor([-math.log1p(-_uniform(-6, 3, token)) for token in range(vocabulary)])
        assert drawn == int((logits[1].double() / 0.7 - times.log()).argmax()), "the draw is wrong"
        own, ranks, ids, values = logprobs(logits, slots, 5)
        expected = logits.double().log_softmax(-1)
        close_to(own, expected[slots, slots], 1e-5)
        close_to(values, expected.topk(5).values, 1e-5)
        assert torch.equal(expected.gather(1, ids), expected.topk(5).values), "the most probable tokens are wrong"
        assert ranks.tolist() == [int((row > row[token]).sum()) + 1 for token, row in enumerate(logits)], "wrong ranks"
        masks = torch.randint(-(2**31), 2**31, (1, -(-vocabulary // 32)), generator=generator).int()
        allowed = (masks.view(torch.uint8)[0, :, None] >> torch.arange(8)).flatten()[:vocabulary] & 1
        masked = logits.clone()
        restrict(masked, slots[1:2], masks)
        assert torch.equal(masked[1], logits[1].where(allowed > 0, -torch.inf)), "the mask is wrong"
    scores = logits.float()
    changed = scores.clone()
    sampler.constrain(changed, slots, positions)
    scores[1, 1:3] = torch.where(scores[1, 1:3] > 0, scores[1, 1:3] / 2, scores[1, 1:3] * 2)
    scores[1:, 2] -= 0.5 + 2 * 0.25
    scores[2, 3] = -torch.inf
    assert torch.allclose(changed, scores), "the constraints are wrong"
    sampler.write(slots, positions, slots + 20)
    assert sampler.tokens[:, 3].tolist() == [20, 21, 22], "the tokens stand elsewhere"
    blocks = torch.tensor([[5, 9], [6, 4], [7, 8]], dtype=torch.int32)
    inputs = read_decodes(torch.tensor([[2, 0], [3, 1]]), sampler.tokens, blocks, 2)
    wanted = [[22, 2], [3, 1], [17, 11], [4, 2]]
    assert [item.tolist() for item in inputs] == wanted, "other tokens or places are read"


def _uniform(seed: int, position: int, token: int) -> float:
    """The number of `kvern.sample.random.uniform`."""
    golden = 0x9E3779B97F4A7C15
    wide = 2**64 - 1
    narrow = 2**32 - 1
    key = (seed + golden) & wide
    for added in (0, position * golden):
        key = (key + added) & wide
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & wide
        key = (key ^ key >> 27) * 0x94D049BB133111EB & wide
        key ^= key >> 31
    value = token * 0x9E3779B1 & narrow ^ key & narrow
    value = (value ^ value >> 16) * 0x7FEB352D & narrow
    value = (value ^ value >> 15 ^ key >> 32) * 0x846CA68B & narrow
    value = (value ^ value >> 16) & 0x7FFFFFFF
    return min((float(torch.tensor(value, dtype=torch.float32)) + 0.5) * 2.0**-31, 1 - 2.0**-24)
