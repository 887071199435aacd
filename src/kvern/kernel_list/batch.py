"""What reads the batch on the device and writes to it, and the choice of tokens."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvern.device.rows import BatchRows
from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernels import batch, masks, sampling
from kvern.model_spec import ModelSpec
from kvern.request import PromptInput, RequestSpec
from kvern.sample import sampler
from kvern.sampling_params import ResolvedParams
from kvern.step import NewRequest
from kvern.structured.masks import restrict

Sizes = Iterator[tuple[Any, ...]]
SLOTS, LENGTH = 3, 64


def _once(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield ()


def _rows(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [SLOTS, LENGTH] and a block table of a batch."""
    tokens = inputs.integers(range(SLOTS * LENGTH)).view(SLOTS, LENGTH)
    blocks = -(-LENGTH // inputs.block_size)
    return tokens, inputs.permutation(SLOTS * blocks).view(SLOTS, blocks)


def _slot_mapping(inputs: Inputs, table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    blocks = table[slots.long(), positions // inputs.block_size].long()
    return blocks * inputs.block_size + positions % inputs.block_size


def _read_tokens(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, table = _rows(inputs)
    slots, starts, firsts, counts = (inputs.integers(row) for row in ((2, 0), (5, 20), (0, 3), (3, 40)))
    launch = partial(batch.read_tokens, tokens, table, slots, starts, firsts, counts, 43, 40, inputs.block_size)

    def reference() -> tuple[torch.Tensor, ...]:
        row = inputs.integers([2] * 3 + [0] * 40, torch.int64)
        positions = inputs.integers([*range(5, 8), *range(20, 60)], torch.int64)
        return tokens[row, positions], positions, _slot_mapping(inputs, table, row, positions)

    return Call("43 tokens", launch, reference)


def _read_decodes(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, table = _rows(inputs)
    slots, starts = inputs.integers((2, 0)), inputs.integers((9, 33))

    def reference() -> tuple[torch.Tensor, ...]:
        positions = starts.long()
        return tokens[slots.long(), positions], positions, _slot_mapping(inputs, table, slots, positions), positions + 1

    return Call("2 tokens", partial(batch.read_decodes, tokens, table, slots, starts, inputs.block_size), reference)


def _write_sampled(spec: ModelSpec, inputs: Inputs, slot_type: torch.dtype, advances: bool) -> Call:
    tokens, _ = _rows(inputs)
    slots, positions = inputs.integers((0, 2), slot_type), inputs.integers((7, 9), torch.int64)
    chosen, starts = inputs.integers((1000, 1001), torch.int64), inputs.integers((6, 8))

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        batch.write_sampled(tokens, slots, positions, chosen, starts if advances else None)
        return tokens, starts

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        expected = tokens.clone()
        expected[slots.long(), positions] = chosen.int()
        return expected, starts + inputs.integers((1, 0)) if advances else starts.clone()  # the last row pads

    return Call("2 tokens", launch, reference)


def _write_sampled_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield torch.int32, True
    yield torch.int64, False


def _write_runs(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, _ = _rows(inputs)
    data = inputs.integers((0, 4, 8, 2, 2, 1, 10, 3, *range(7000, 7005)))

    def launch() -> torch.Tensor:
        batch.write_runs(tokens, data[:8].view(2, 4), data)
        return tokens

    def reference() -> torch.Tensor:
        expected = tokens.clone()
        expected[0, 4:6], expected[2, 1:4] = data[8:10], data[10:13]
        return expected

    return Call("2 runs", launch, reference)


def _copy_blocks(spec: ModelSpec, inputs: Inputs) -> Call:
    attention = spec.layers[0].attention
    pool = inputs.numbers(4, 5, inputs.block_size, attention.kv_heads, attention.head_dim)
    sources, targets, order = (inputs.integers(row, torch.int64) for row in ((1, 3, 4), (3, 0, 2), range(3)))

    def launch() -> torch.Tensor:
        batch.copy_pool_blocks(pool, sources, targets, order)
        return pool

    def reference() -> torch.Tensor:
        expected = pool.clone()
        expected[:, targets] = pool[:, sources]
        return expected

    return Call("3 of 5 blocks", launch, reference, 4 * 3 * pool[:, 0].numel() * pool.element_size())


def _sample(spec: ModelSpec, inputs: Inputs, count: int, filtered: bool, slot_type: torch.dtype = torch.int64) -> Call:
    logits = inputs.numbers(count, spec.vocab_size, deviation=3.0)
    filters: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.01} if filtered else {}
    rows = BatchRows(count, 1, 1, inputs.device)
    for row in range(count):
        params = ResolvedParams(temperature=0.0 if row == 1 else 0.8, **filters)
        asked = RequestSpec("", PromptInput([0]), params, 1)
        rows.join([NewRequest(row, asked, params, row, [0], [])])
    positions = inputs.integers(range(5, 5 + count), torch.int64)
    launch = partial(
        sampling.sample,
        logits,
        inputs.integers(range(count), slot_type),
        positions,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seeds,
        filtered=filtered,
    )
    moved = logits.numel() * logits.element_size()
    reference = partial(sampler.sample, logits.float(), rows, range(count), positions)
    return Call(f"{count} x {spec.vocab_size}", launch, reference, moved)


def _sample_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((3, filtered, slot_type) for filtered in (False, True) for slot_type in (torch.int32, torch.int64))


def _sample_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((rows, False) for rows in (1, 64))


def _restrict(spec: ModelSpec, inputs: Inputs) -> Call:
    logits = inputs.numbers(4, spec.vocab_size)
    rows = inputs.integers((3, 1), torch.int64)
    words = inputs.integers(0x5A5A5A5A >> word % 7 for word in range(2 * -(-spec.vocab_size // 32))).view(2, -1)

    def launch() -> torch.Tensor:
        masks.restrict(logits, rows, words)
        return logits

    def reference() -> torch.Tensor:
        expected = logits.clone()
        restrict(expected, rows, words)
        return expected

    return Call(f"2 x {spec.vocab_size}", launch, reference, 4 * spec.vocab_size * logits.element_size())


KERNELS = (
    Kernel("read tokens", "batch", _read_tokens, _once),
    Kernel("read decodes", "batch", _read_decodes, _once),
    Kernel("write sampled tokens", "batch", _write_sampled, _write_sampled_launched),
    Kernel("write runs", "batch", _write_runs, _once),
    Kernel("copy blocks", "batch", _copy_blocks, _once),
    Kernel("sampling", "sampling", _sample, _sample_launched, _sample_timed),
    Kernel("masks", "masks", _restrict, _once),
)
