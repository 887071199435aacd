"""Sums over ranks and rows between them, as one rank launches them when what the others send is there."""

from collections.abc import Iterator
from typing import Any

import torch

from kvern.kernels.norm import rms_norm
from kvern.kernels.peer_exchange import peer_gather, peer_sum_scattered
from kvern.kernels.peer_sum import coded_peer_sum_norm, peer_sum, peer_sum_norm
from kvern.kernels.peer_words import PeerMemory, addresses_of, memory_of, row_words_of, rows_kept
from kvern.kernels.shared_norm import await_flags, shared_norm
from kvern.layers.block import adds_by_norms
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.dense import normed
from tests.support.kernel_list.entry import Call, Inputs, Kernel
from tests.support.kernel_list.rounding import codes_of_norms, coding_of

ROWS = 4


def sent(parts: torch.Tensor, rank: int, rows: int, epoch: int, *, in_parts: bool = False) -> torch.Tensor:
    """A rank's memory for `rows` behind so many epochs, when all others have sent their `parts [size, T, width]`.

    `in_parts`: of those what this rank sums, and sums of their own.
    """
    size, count, _ = parts.shape
    bits = parts.contiguous().view(torch.int32)
    words = torch.full((2, size, rows, bits.shape[-1]), -1, dtype=torch.int32, device=parts.device)
    now, width = words[epoch % 2, :, :count], -(-bits.shape[-1] // size)
    sums = parts.float().sum(0).to(parts.dtype).view(torch.int32)
    for other in set(range(size)) - {rank}:
        if in_parts:
            own, theirs = (slice(who * width, (who + 1) * width) for who in (rank, other))
            now[other, :, own], now[other, :, theirs] = bits[other, :, own], sums[:, theirs]
        else:
            now[other] = bits[other]
    return words.flatten().view(torch.int64)


def _sum(
    spec: ModelSpec,
    inputs: Inputs,
    rank: int,
    size: int,
    norm: bool,
    in_parts: bool,
    codes: tuple[str, str] | None = None,
) -> Call:
    """`codes`: those that the norm becomes, as of `coding_of`."""
    coding = None if codes is None else coding_of(inputs, *codes)
    width, dtype = spec.hidden_size, inputs.dtype
    parts, hidden = inputs.numbers(size, ROWS, width), inputs.numbers(ROWS, width)
    weight = inputs.numbers(width, dtype=torch.float32 if spec.norm.offset else None)
    row_words = row_words_of(width, dtype)
    slots = rows_kept(size, row_words)
    was_sent = sent(parts, rank, slots, 0, in_parts=in_parts)
    own, epochs = was_sent.clone(), inputs.zeros(slots)
    others = inputs.zeros(memory_of(size, slots, row_words), dtype=torch.int64)
    none = inputs.zeros(1, dtype=torch.int32)
    buffers = inputs.integers(
        addresses_of([own if index == rank else others for index in range(size)], none), torch.int64
    )
    memory = PeerMemory(own, buffers, epochs, rank, size, slots, row_words, inputs.processors)

    def launch() -> tuple[torch.Tensor, ...]:
        epochs.zero_()  # nobody sends anything of a second epoch
        own.copy_(was_sent)
        others.zero_()
        given = parts[rank], hidden, weight, 1e-6, memory
        if coding is not None:
            return *coded_peer_sum_norm(*given, coding, parts=in_parts), hidden
        if norm:
            return peer_sum_norm(*given, parts=in_parts), hidden
        return (peer_sum(parts[rank], memory, parts=in_parts),)

    def reference() -> tuple[torch.Tensor, ...]:
        total = parts.double().sum(0)
        if not norm:
            return (total,)
        if coding is not None:
            added = hidden + parts.float().sum(0).to(dtype)
            return *(part.double() for part in coding(rms_norm(added, weight, 1e-6))), added.double()
        return normed(hidden.double() + total, weight, 1e-6), hidden.double() + total

    return Call(f"{ROWS} x {width} of {size} ranks", launch, reference, 2 * (size - 1) * ROWS * width * dtype.itemsize)


def _launched(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if inputs.ranks[1] > 1 and row_words_of(spec.hidden_size, inputs.dtype):
        normed_too = spec.norm.kind == "rms" and spec.norm.weight
        ways = (False, True)[: 1 + (inputs.ranks[1] > 2)]
        yield from ((*inputs.ranks, norm, in_parts) for in_parts in ways for norm in (False, True)[: 1 + normed_too])
        for codes in codes_of_norms(inputs) if normed_too else ():
            coding = coding_of(inputs, *codes)
            rounds = coding.group <= spec.hidden_size and coding.block(spec.hidden_size)
            if rounds and not coding.columns:  # which compile nothing else
                yield from ((*inputs.ranks, True, in_parts, codes) for in_parts in ways)


def _exchange(spec: ModelSpec, inputs: Inputs, rank: int, size: int) -> Call:
    width, dtype = spec.hidden_size, inputs.dtype
    parts, others = inputs.numbers(size, ROWS, width), inputs.numbers(size, size * ROWS, width)
    row_words = row_words_of(width, dtype)
    slots = rows_kept(size, row_words)
    gathered = sent(parts, rank, slots, 0)
    scattered = sent(others[:, rank * ROWS : (rank + 1) * ROWS], rank, slots, 1)
    none, own = inputs.zeros(1, dtype=torch.int32), gathered.clone()
    nobody = inputs.zeros(memory_of(size, slots, row_words), dtype=torch.int64)
    addresses = addresses_of([own if index == rank else nobody for index in range(size)], none)
    epochs, buffers = inputs.zeros(slots), inputs.integers(addresses, torch.int64)
    memory = PeerMemory(own, buffers, epochs, rank, size, slots, row_words, inputs.processors)

    def launch() -> tuple[torch.Tensor, ...]:
        epochs.zero_()
        own.copy_(gathered)
        nobody.zero_()
        rows = peer_gather(parts[rank], memory)
        own.copy_(scattered)
        return rows, peer_sum_scattered(others[rank], memory)

    def reference() -> tuple[torch.Tensor, ...]:
        sums = others.double().sum(0)[rank * ROWS : (rank + 1) * ROWS]
        return parts.double().flatten(0, 1), sums

    return Call(f"{ROWS} x {width} of {size} ranks", launch, reference, 4 * (size - 1) * ROWS * width * dtype.itemsize)


def _shared(spec: ModelSpec, inputs: Inputs, rank: int, size: int) -> Call:
    width, dtype, own = spec.hidden_size, inputs.dtype, range(rank * ROWS, (rank + 1) * ROWS)
    parts, hidden = inputs.numbers(size, size * ROWS, width), inputs.numbers(size * ROWS, width)
    weight = inputs.numbers(width, dtype=torch.float32 if spec.norm.offset else None)
    sent, flags = parts[:, own.start : own.stop].contiguous(), inputs.integers([2] * size)
    none = inputs.zeros(1, dtype=torch.int32)
    normals, wholes = torch.zeros_like(hidden), torch.zeros_like(hidden)

    def launch() -> tuple[torch.Tensor, ...]:
        given = own, flags, 2, none, rank
        shared_norm(parts[rank], sent, hidden, wholes, *given)
        shared_norm(parts[rank], sent, hidden, normals, *given, weight, 1e-6)
        await_flags(flags, 2, none, rank)
        return normals, wholes, hidden

    def reference() -> tuple[torch.Tensor, ...]:
        added, rows = hidden.double(), slice(own.start, own.stop)
        added[rows] += parts.double().sum(0)[rows]
        mine = torch.zeros_like(added)
        mine[rows] = added[rows]
        return normed(mine, weight, 1e-6), mine, added

    return Call(f"{ROWS} x {width} of {size} ranks", launch, reference, 2 * (size + 2) * ROWS * width * dtype.itemsize)


def _shared_by(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if inputs.ranks[1] > 1 and row_words_of(spec.hidden_size, inputs.dtype) and adds_by_norms(spec):
        yield inputs.ranks


def _exchanged(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    if inputs.dp_attention is not None and row_words_of(spec.hidden_size, inputs.dtype):
        yield inputs.dp_attention


KERNELS = (
    Kernel("sum of ranks", "peer_sum", _sum, _launched),
    Kernel("rows between ranks", "peer_exchange", _exchange, _exchanged),
    Kernel("shared norms", "shared_norm", _shared, _shared_by),
)
