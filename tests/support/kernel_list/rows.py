"""What reads the batch on the device and writes to it, and masks of grammars."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvern.attention.groups import group_layers
from kvern.kernels import batch, drafts, masks
from kvern.spec.model import ModelSpec
from kvern.structured.masks import restrict
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]
SLOTS, LENGTH = 3, 64


def _once(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield ()


def _rows(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [SLOTS, LENGTH] and a block table of a batch."""
    tokens = inputs.integers(range(SLOTS * LENGTH)).view(SLOTS, LENGTH)
    blocks = -(-LENGTH // inputs.block_size)
    return tokens, inputs.permutation(SLOTS * blocks).view(SLOTS, blocks)


def _turns(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose positions are shifted from some token on."""
    return inputs.integers((21, 0, 0), torch.int64), inputs.integers((-9, 0, 0), torch.int64)


def _slot_mapping(inputs: Inputs, table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    blocks = table[slots.long(), positions // inputs.block_size].long()
    return blocks * inputs.block_size + positions % inputs.block_size


def _read_tokens(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, table = _rows(inputs)
    runs = batch.TokenRuns(*(inputs.integers(row) for row in ((2, 0), (5, 20), (0, 3), (3, 40))))
    launch = partial(batch.read_tokens, tokens, table, _turns(inputs), runs, 43, 40, inputs.block_size)

    def reference() -> torch.Tensor:
        row = inputs.integers([2] * 3 + [0] * 40, torch.int64)
        positions = inputs.integers([*range(5, 8), *range(20, 60)], torch.int64)
        turned = inputs.integers([*range(5, 8), 20, *range(12, 51)], torch.int64)
        return torch.stack((tokens[row, positions].long(), turned, _slot_mapping(inputs, table, row, positions)))

    return Call("43 tokens", launch, reference)


def _read_decodes(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, table = _rows(inputs)
    slots, starts = inputs.integers((2, 0)), inputs.integers((9, 33))

    def reference() -> tuple[torch.Tensor, ...]:
        positions = starts.long()
        turned = inputs.integers((9, 24), torch.int64)
        return tokens[slots.long(), positions], turned, _slot_mapping(inputs, table, slots, positions), positions + 1

    launch = partial(batch.read_decodes, tokens, table, _turns(inputs), slots, starts, inputs.block_size)
    return Call("2 tokens", launch, reference)


def _read_slots(spec: ModelSpec, inputs: Inputs, longest: int) -> Call:
    blocks = -(-LENGTH // inputs.block_size)
    tables = inputs.permutation(3 * SLOTS * blocks).view(3 * SLOTS, blocks)
    counts = (min(3, longest), longest)
    runs = batch.TokenRuns(*(inputs.integers(row) for row in ((2, 0), (5, 20), (0, counts[0]), counts)))
    sizes = sum(counts), longest, inputs.block_size
    launch = partial(batch.read_slots, tables, SLOTS, runs, *sizes)

    def reference() -> torch.Tensor:
        row = inputs.integers([2] * counts[0] + [0] * counts[1], torch.int64)
        positions = inputs.integers([*range(5, 5 + counts[0]), *range(20, 20 + counts[1])], torch.int64)
        return torch.stack(
            [_slot_mapping(inputs, table, row, positions) for table in tables.view(3, SLOTS, blocks).unbind(0)[1:]]
        )

    return Call(f"2 x {sum(counts)} tokens", launch, reference)


def _read_slots_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if group_layers(spec.attentions).window_tables:
        yield from ((1,), (40,))


def _read_drafts(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, table = _rows(inputs)
    computed, exact = inputs.integers((7, 8, 9)), inputs.zeros(3)
    runs = batch.TokenRuns(*(inputs.integers(row) for row in ((1, 0, 2), (-1, 33, 0), (0, 3, 4), (3, 1, 2))))

    def launch() -> tuple[torch.Tensor, ...]:
        return *drafts.read_drafts(tokens, table, computed, _turns(inputs), runs, exact, 6, inputs.block_size), exact

    def reference() -> tuple[torch.Tensor, ...]:
        row = inputs.integers((1, 1, 1, 0, 2, 2))
        positions = inputs.integers((8, 9, 10, 33, 0, 1), torch.int64)
        turned = inputs.integers((8, 9, 10, 24, 0, 1), torch.int64)
        read = tokens[row.long(), positions].long(), turned, _slot_mapping(inputs, table, row, positions)
        return torch.stack((*read, positions + 1)), row, inputs.integers((8, 33, 0))

    return Call("3 runs, 6 tokens", launch, reference)


def _accept_drafts(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, _ = _rows(inputs)
    computed, kept = inputs.zeros(SLOTS), inputs.zeros(3, dtype=torch.int64)
    runs = batch.TokenRuns(*(inputs.integers(row) for row in ((1, 0, 2), (7, 33, 0), (0, 4, 5), (4, 1, 40))))
    right = tokens[1, 8:10].tolist()  # two of three drafts; the last row pads
    sampled = inputs.integers((*right, 1000, 1001, 1002, *range(40)), torch.int64)

    def launch() -> tuple[torch.Tensor, ...]:
        drafts.accept_drafts(tokens, computed, runs, sampled, kept)
        return tokens, computed, kept

    def reference() -> tuple[torch.Tensor, ...]:
        expected = tokens.clone()
        expected[1, 10:12], expected[0, 34] = inputs.integers((1000, 1001)), 1002
        return expected, inputs.integers((34, 10, 0)), inputs.integers((3, 1, 0), torch.int64)

    return Call("3 runs", launch, reference)


def _begin_drafts(spec: ModelSpec, inputs: Inputs) -> Call:
    computed, asked = inputs.integers((7, 8, 1)), inputs.integers((2, 0, 1, 0, 3, 1, 2, 0))
    pairs, state = inputs.zeros(2, 8), inputs.zeros(3, 4)

    def launch() -> tuple[torch.Tensor, ...]:
        drafts.begin_drafts(computed, asked.view(2, 4), pairs, state, SLOTS)
        return pairs, state

    def reference() -> tuple[torch.Tensor, ...]:
        both = inputs.integers((2, 2, 0, 0, 1, 1, 3, 3, 0, 1, 6, 7, 7, 8, 0, 0)).view(2, 8)
        return both, inputs.integers((2, 0, 1, 3, 1, 7, 8, 0, 3, 1, 2, 0)).view(3, 4)

    return Call("4 rows", launch, reference)


def _write_drafts(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, _ = _rows(inputs)
    state = inputs.integers((0, 1, 2, 7, 8, 0, 2, 1, 0)).view(3, 3)
    chosen = inputs.integers((1000, 1001, 1002), torch.int64)

    def launch() -> tuple[torch.Tensor, ...]:
        drafts.write_drafts(tokens, state, chosen)
        return tokens, state

    def reference() -> tuple[torch.Tensor, ...]:
        expected = tokens.clone()
        expected[0, 8], expected[1, 9] = 1000, 1001
        return expected, inputs.integers((0, 2, 2, 8, 0, 0, 1, 0, -1)).view(3, 3)

    return Call("3 rows", launch, reference)


def _drafts_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if inputs.drafts:
        yield ()


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
    yield torch.int32, False


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
    attention = spec.attentions[0]
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


def _logits_dtypes(inputs: Inputs) -> list[torch.dtype]:
    """The model's own, and what logits are kept in when something is computed with them."""
    return list(dict.fromkeys((inputs.dtype, torch.float32)))


def _restrict(spec: ModelSpec, inputs: Inputs, dtype: torch.dtype) -> Call:
    logits = inputs.numbers(4, spec.vocab_size, dtype=dtype)
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


def _restrict_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((dtype,) for dtype in _logits_dtypes(inputs))


KERNELS = (
    Kernel("read tokens", "batch", _read_tokens, _once),
    Kernel("read decodes", "batch", _read_decodes, _once),
    Kernel("read slots of windows", "windows", _read_slots, _read_slots_launched),
    Kernel("read drafts", "batch", _read_drafts, _drafts_launched),
    Kernel("accept drafts", "batch", _accept_drafts, _drafts_launched),
    Kernel("begin drafts", "batch", _begin_drafts, _drafts_launched),
    Kernel("write drafts", "batch", _write_drafts, _drafts_launched),
    Kernel("write sampled tokens", "batch", _write_sampled, _write_sampled_launched),
    Kernel("write runs", "batch", _write_runs, _once),
    Kernel("copy blocks", "batch", _copy_blocks, _once),
    Kernel("masks", "masks", _restrict, _restrict_launched),
)
