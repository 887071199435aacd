"""Sums over ranks, as one rank launches them when the words of all others are there."""

from collections.abc import Iterator
from typing import Any

import torch

from kvern.kernel_list.dense import normed
from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernels.peer_sum import PeerMemory, peer_sum, peer_sum_norm, row_words_of, slots_of, words_of
from kvern.model_spec import ModelSpec

ROWS = 4


def sent(parts: torch.Tensor, rows: int, epoch: int) -> torch.Tensor:
    """Words that hold `parts [size, T, width]` in this epoch, [2, size, rows, row_words] int64, flat."""
    bits = parts.view(torch.int32).long() & 0xFFFFFFFF
    words = torch.zeros(2, len(parts), rows, bits.shape[-1], dtype=torch.int64, device=parts.device)
    words[epoch % 2, :, : parts.shape[1]] = bits | epoch << 32
    return words.flatten()


def _sum(spec: ModelSpec, inputs: Inputs, rank: int, size: int, norm: bool) -> Call:
    width = spec.hidden_size
    row_words = row_words_of(width, inputs.dtype)
    slots = slots_of(size, row_words)
    parts, hidden = inputs.numbers(size, ROWS, width), inputs.numbers(ROWS, width)
    weight = inputs.numbers(width, dtype=torch.float32 if spec.norm.offset else None)
    own, others = sent(parts, slots, 1), inputs.zeros(words_of(size, slots, row_words), dtype=torch.int64)
    addresses = [own.data_ptr() if index == rank else others.data_ptr() for index in range(size)]
    epochs = inputs.zeros(slots)
    memory = PeerMemory(own, inputs.integers(addresses, torch.int64), epochs, rank, size, slots, row_words)

    def launch() -> tuple[torch.Tensor, ...]:
        epochs.zero_()  # the others have sent words of the first epoch alone
        others.zero_()
        if not norm:
            return (peer_sum(parts[rank], memory),)
        return peer_sum_norm(parts[rank], hidden, weight, 1e-6, memory), hidden

    def reference() -> tuple[torch.Tensor, ...]:
        total = parts.double().sum(0)
        if not norm:
            return (total,)
        return normed(hidden.double() + total, weight, 1e-6), hidden.double() + total

    return Call(f"{ROWS} x {width} of {size} ranks", launch, reference, 16 * (size - 1) * ROWS * row_words)


def _launched(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if inputs.ranks[1] > 1 and row_words_of(spec.hidden_size, inputs.dtype):
        yield *inputs.ranks, False
        if spec.norm.kind == "rms" and spec.norm.weight:
            yield *inputs.ranks, True


KERNELS = (Kernel("sum of ranks", "peer_sum", _sum, _launched),)
