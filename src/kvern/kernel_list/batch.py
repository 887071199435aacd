"""What reads the batch on the device and writes to it, and the choice of tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kvern.attention.groups import group_layers
from kvern.device.device_batch import DeviceRows
from kvern.kernel_list.entry import Call, Inputs, Kernel
from kvern.kernels import batch, constraints, drafts, logprobs, masks, sampling
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest
from kvern.sample import sampler
from kvern.sample.constraints import constrain
from kvern.sample.logprobs import token_logprobs
from kvern.spec.model import ModelSpec
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


def _read_slots(spec: ModelSpec, inputs: Inputs, longest: int) -> Call:
    blocks = -(-LENGTH // inputs.block_size)
    tables = inputs.permutation(3 * SLOTS * blocks).view(3 * SLOTS, blocks)
    counts = (min(3, longest), longest)
    slots, starts, firsts, lengths = (inputs.integers(row) for row in ((2, 0), (5, 20), (0, counts[0]), counts))
    sizes = sum(counts), longest, inputs.block_size
    launch = partial(batch.read_slots, tables, SLOTS, slots, starts, firsts, lengths, *sizes)

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
    slots, starts, firsts, counts = (inputs.integers(row) for row in ((1, 0, 2), (-1, 33, 0), (0, 3, 4), (3, 1, 2)))
    runs = slots, starts, firsts, counts

    def launch() -> tuple[torch.Tensor, ...]:
        return *drafts.read_drafts(tokens, table, computed, *runs, exact, 6, inputs.block_size), exact

    def reference() -> tuple[torch.Tensor, ...]:
        row = inputs.integers((1, 1, 1, 0, 2, 2))
        positions = inputs.integers((8, 9, 10, 33, 0, 1), torch.int64)
        read = tokens[row.long(), positions].long(), positions, _slot_mapping(inputs, table, row, positions)
        return torch.stack((*read, positions + 1)), row, inputs.integers((8, 33, 0))

    return Call("3 runs, 6 tokens", launch, reference)


def _accept_drafts(spec: ModelSpec, inputs: Inputs) -> Call:
    tokens, _ = _rows(inputs)
    computed, kept = inputs.zeros(SLOTS), inputs.zeros(3, dtype=torch.int64)
    slots, starts, firsts, counts = (inputs.integers(row) for row in ((1, 0, 2), (7, 33, 0), (0, 4, 5), (4, 1, 40)))
    right = tokens[1, 8:10].tolist()  # two of three drafts; the last row pads
    sampled = inputs.integers((*right, 1000, 1001, 1002, *range(40)), torch.int64)

    def launch() -> tuple[torch.Tensor, ...]:
        drafts.accept_drafts(tokens, computed, slots, starts, firsts, counts, sampled, kept)
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


ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.1, "logit_bias": {1: 2.0, 7: -1.0}},
    {"temperature": 1.0, "typical_p": 0.8, "min_tokens": 60, "allowed_token_ids": list(range(1, 40)), "logprobs": 0},
)


def _asking(inputs: Inputs, count: int, asked: Sequence[dict[str, Any]]) -> DeviceRows:
    """Rows with LENGTH tokens each, which ask for these in turn."""
    rows = DeviceRows(count, LENGTH, 1, inputs.device, scratch_block=0)
    for row in range(count):
        params = ResolvedParams(**asked[row % len(asked)])
        words, ends = ((3, 4, 5), (6,), (8, 9)), frozenset((2, 11))
        spec = RequestSpec("", PromptInput([0]), params, LENGTH // 2, bad_word_ids=words, stop_token_ids=ends)
        tokens = [place * (row + 1) % 50 for place in range(LENGTH)]
        rows.join([NewRequest(row, spec, params, row, tokens, [])])
    return rows


def _logits_dtype(spec: ModelSpec, inputs: Inputs) -> torch.dtype:
    """In which scores of the vocabulary reach sampling: something may be computed with them before."""
    return inputs.dtype if spec.scales.logit == 1.0 and spec.scales.softcap is None else torch.float32


def _change(spec: ModelSpec, inputs: Inputs, count: int, everything: bool, slot_type: torch.dtype) -> Call:
    logits = inputs.numbers(count, spec.vocab_size, deviation=3.0, dtype=_logits_dtype(spec, inputs))
    rows = _asking(inputs, count, ASKED)
    slots, positions = inputs.integers(range(count), slot_type), inputs.integers([LENGTH] * count, torch.int64)

    def reference() -> torch.Tensor:
        expected = logits.float().clone()
        constrain(expected, rows, range(count), [LENGTH] * count)
        return expected

    moved = logits.numel() * (logits.element_size() + 4)
    launch = partial(constraints.change, logits, slots, positions, rows, everything=everything)
    return Call(f"{count} x {spec.vocab_size}", launch, reference, moved)


def _change_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((3, everything, slots) for everything in (False, True) for slots in (torch.int32, torch.int64))


def _change_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield 64, False, torch.int32


def _sample(
    spec: ModelSpec,
    inputs: Inputs,
    count: int,
    options: bool,
    changed: bool,
    slot_type: torch.dtype = torch.int32,
    exact: bool = False,
) -> Call:
    """`changed`: what is drawn from are scores of float32; `exact`: they were so from the first."""
    dtype = torch.float32 if changed or exact else _logits_dtype(spec, inputs)
    logits = inputs.numbers(count, spec.vocab_size, deviation=3.0, dtype=dtype)
    filters = [{"temperature": asked["temperature"]} for asked in ASKED]
    if options:
        filters = [{"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0}]
        filters += [{"temperature": 0.8, "typical_p": 0.7, "top_p": 0.95}] if changed else []
    rows = _asking(inputs, count, filters)
    rows.changes.zero_()  # biases and bans are in `scores` already
    scores = inputs.numbers(count, spec.vocab_size, dtype=torch.float32) if options and not changed else logits
    slots, positions = inputs.integers(range(count), slot_type), inputs.integers(range(5, 5 + count), torch.int64)
    launch = partial(sampling.sample, logits, scores if options else None, slots, positions, rows)
    moved = logits.numel() * logits.element_size()
    reference = partial(sampler.sample, logits.float(), rows, range(count), positions)
    return Call(f"{count} x {spec.vocab_size}{' filtered' if options else ''}", launch, reference, moved)


def _sample_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for slots in (torch.int32, torch.int64):
        yield from ((3, False, False, slots), (3, True, False, slots), (3, True, True, slots))
        if inputs.has_head:  # which scores in float32
            yield 3, False, False, slots, True


def _logits_dtypes(inputs: Inputs) -> list[torch.dtype]:
    """The model's own, and what logits are kept in when something is computed with them."""
    return list(dict.fromkeys((inputs.dtype, torch.float32)))


def _sample_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((1, False, False), (64, False, False), (64, True, False), (64, True, True))


def _report(spec: ModelSpec, inputs: Inputs, count: int, dtype: torch.dtype) -> Call:
    logits = inputs.numbers(count, spec.vocab_size, dtype=dtype)
    rows = _asking(inputs, count, [{"logprobs": 5}])
    slots, chosen = inputs.integers(range(count)), inputs.integers(range(3, 3 + count), torch.int64)
    out = logprobs.empty(count, inputs.device)

    def launch() -> tuple[torch.Tensor, ...]:
        logprobs.logprobs(logits, slots, rows.logprobs, chosen, out)
        own, ranks, ids, values = out
        return own, ranks, ids[:, :5], values[:, :5]

    def reference() -> tuple[torch.Tensor, ...]:
        found = token_logprobs(logits, chosen, 5)
        return found.chosen, found.ranks, found.best_ids, found.best

    moved = logits.numel() * logits.element_size()
    return Call(f"{count} x {spec.vocab_size}", launch, reference, moved)


def _report_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((3, dtype) for dtype in dict.fromkeys((_logits_dtype(spec, inputs), torch.float32)))


def _report_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield 64, _logits_dtype(spec, inputs)


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
    Kernel("constraints", "sampling", _change, _change_launched, _change_timed),
    Kernel("copy blocks", "batch", _copy_blocks, _once),
    Kernel("sampling", "sampling", _sample, _sample_launched, _sample_timed),
    Kernel("log-probabilities", "sampling", _report, _report_launched, _report_timed),
    Kernel("masks", "masks", _restrict, _restrict_launched),
)
