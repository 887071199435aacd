"""Sums over ranks, as one rank launches them when the words of all others are there."""

from collections.abc import Iterator
from typing import Any

import torch

from kvern.kernel_list.dense import normed
from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernels.peer_sum import PeerMemory, peer_sum, peer_sum_norm, slots_of, takes, words_of
from kvern.model_spec import ModelSpec

ROWS = 4


def sent(parts: torch.Tensor, rows: int, epoch: int) -> torch.Tensor:
    """Words that hold `parts [size, T, width]` of 16 bits in this epoch, [2, size, rows, width / 2] int64, flat."""
    size, count, width = parts.shape
    words = torch.zeros(2, size, rows, width // 2, dtype=torch.int64, device=parts.device)
    words[epoch % 2, :, :count] = (parts.view(torch.int32).long() & 0xFFFFFFFF) | epoch << 32
    return words.flatten()


def _sum(spec: ModelSpec, inputs: Inputs, rank: int, size: int, norm: bool) -> Call:
    width = spec.hidden_size
    slots = slots_of(size, width)
    parts, hidden = inputs.numbers(size, ROWS, width), inputs.numbers(ROWS, width)
    weight = inputs.numbers(width, dtype=torch.float32 if spec.norm.offset else None)
    own, others = sent(parts, slots, 1), inputs.zeros(words_of(size, slots, width), dtype=torch.int64)
    addresses = [own.data_ptr() if index == rank else others.data_ptr() for index in range(size)]
    epochs = inputs.zeros(slots)
    memory = PeerMemory(own, inputs.integers(addresses, torch.int64), epochs, rank, size, slots, width)

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

    return Call(f"{ROWS} x {width} of {size} ranks", launch, reference, (8 * size) * ROWS * width)


def _launched(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if inputs.ranks[1] > 1 and takes(inputs.dtype, spec.hidden_size):
        yield *inputs.ranks, False
        if spec.norm.kind == "rms" and spec.norm.weight:
            yield *inputs.ranks, True


KERNELS = (Kernel("sum of ranks", "peer_sum", _sum, _launched),)
