"""Sums over ranks, as one rank launches them when what the others send is there."""

from collections.abc import Iterator
from typing import Any

import torch

from kvern.kernel_list.dense import normed
from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernel_list.rounding import codes_of_norms, coding_of
from kvern.kernels.norm import rms_norm
from kvern.kernels.peer_rows import PeerRows, coded_peer_rows_norm, memory_of, peer_rows, peer_rows_norm, rows_kept
from kvern.kernels.peer_sum import (
    PeerMemory,
    coded_peer_sum_norm,
    peer_sum,
    peer_sum_norm,
    row_words_of,
    slots_of,
    words_of,
)
from kvern.model_spec import ModelSpec

ROWS = 4
WAYS = ("words", "rows", "owners")


def sent_words(parts: torch.Tensor, rows: int, epoch: int) -> torch.Tensor:
    """The words of `PeerMemory` with `parts [size, T, width]` in this epoch."""
    bits = parts.view(torch.int32).long() & 0xFFFFFFFF
    words = torch.zeros(2, len(parts), rows, bits.shape[-1], dtype=torch.int64, device=parts.device)
    words[epoch % 2, :, : parts.shape[1]] = bits | epoch << 32
    return words.flatten()


def sent_rows(parts: torch.Tensor, rows: int, programs: int, epoch: int) -> torch.Tensor:
    """The memory of `PeerRows` with `parts [size, T, width]` in this epoch."""
    numbers = parts.new_zeros(2, len(parts), rows, parts.shape[-1])
    numbers[epoch % 2, :, : parts.shape[1]] = parts
    flags = torch.zeros(2, len(parts), programs, dtype=torch.int32, device=parts.device)
    flags[epoch % 2] = epoch
    return torch.cat((numbers.flatten().view(torch.int64), flags.flatten().view(torch.int64)))


def with_sums(parts: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank has of `parts [size, T, width]` when rows have owners: sums, of all but its own rows."""
    sent, sums = parts.clone(), parts.float().sum(0).to(parts.dtype)
    for row in range(parts.shape[1]):
        if row % len(parts) != rank:
            sent[row % len(parts), row] = sums[row]
    return sent


def _sum(
    spec: ModelSpec, inputs: Inputs, way: str, rank: int, size: int, norm: bool, codes: tuple[str, str] | None = None
) -> Call:
    """`codes`: those that the norm becomes, as of `coding_of`."""
    coding = None if codes is None else coding_of(inputs, *codes)
    width, dtype = spec.hidden_size, inputs.dtype
    parts, hidden = inputs.numbers(size, ROWS, width), inputs.numbers(ROWS, width)
    weight = inputs.numbers(width, dtype=torch.float32 if spec.norm.offset else None)
    if way == "words":
        row_words = row_words_of(width, dtype)
        slots = slots_of(size, row_words)
        own, count, epochs = sent_words(parts, slots, 1), words_of(size, slots, row_words), inputs.zeros(slots)
    else:
        slots, programs = rows_kept(size, width, dtype), inputs.processors
        sent = with_sums(parts, rank) if way == "owners" else parts
        own, count = sent_rows(sent, slots, programs, 1), memory_of(size, slots, width, dtype, programs)
        epochs = inputs.zeros(programs)
    others = inputs.zeros(count, dtype=torch.int64)
    addresses = [own.data_ptr() if index == rank else others.data_ptr() for index in range(size)]
    buffers = inputs.integers(addresses, torch.int64)

    def launch() -> tuple[torch.Tensor, ...]:
        epochs.zero_()  # nobody sends anything of a second epoch
        others.zero_()
        given, owned = (parts[rank], hidden, weight, 1e-6), way == "owners"
        if way == "words":
            words = PeerMemory(own, buffers, epochs, rank, size, slots, row_words)
            if coding is not None:
                return *coded_peer_sum_norm(*given, words, coding), hidden
            return (peer_sum_norm(*given, words), hidden) if norm else (peer_sum(parts[rank], words),)
        memory = PeerRows(own, buffers, epochs, rank, size, slots, width)
        if coding is not None:
            return *coded_peer_rows_norm(*given, memory, coding, owned), hidden
        return (peer_rows_norm(*given, memory, owned), hidden) if norm else (peer_rows(parts[rank], memory, owned),)

    def reference() -> tuple[torch.Tensor, ...]:
        total = parts.double().sum(0)
        if not norm:
            return (total,)
        if coding is not None:
            added = hidden + parts.float().sum(0).to(dtype)
            return *(part.double() for part in coding(rms_norm(added, weight, 1e-6))), added.double()
        return normed(hidden.double() + total, weight, 1e-6), hidden.double() + total

    moved = 2 * (size - 1) * ROWS * width * dtype.itemsize
    return Call(f"{ROWS} x {width} of {size} ranks", launch, reference, 2 * moved if way == "words" else moved)


def _launched(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if inputs.ranks[1] > 1 and row_words_of(spec.hidden_size, inputs.dtype):
        normed_too = spec.norm.kind == "rms" and spec.norm.weight
        yield from ((way, *inputs.ranks, norm) for way in WAYS for norm in (False, True)[: 1 + normed_too])
        for codes in codes_of_norms(inputs) if normed_too else ():
            coding = coding_of(inputs, *codes)
            rounds = coding.group <= spec.hidden_size and coding.block(spec.hidden_size)
            if rounds and not coding.columns:  # which compile nothing else
                yield from ((way, *inputs.ranks, True, codes) for way in WAYS)


KERNELS = (Kernel("sum of ranks", "peer_sum", _sum, _launched),)
