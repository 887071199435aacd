"""The choice of tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kvern.device.device_batch import DeviceRows
from kvern.kernels import constraints, logprobs, sampling
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest
from kvern.sample import sampler
from kvern.sample.constraints import constrain
from kvern.sample.logprobs import token_logprobs
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]
SLOTS, LENGTH = 3, 64


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


KERNELS = (
    Kernel("constraints", "sampling", _change, _change_launched, _change_timed),
    Kernel("sampling", "sampling", _sample, _sample_launched, _sample_timed),
    Kernel("log-probabilities", "sampling", _report, _report_launched, _report_timed),
)
