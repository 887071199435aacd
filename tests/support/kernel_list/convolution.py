"""Convolutions of layers with states, activated or gated, of single tokens, of runs and of drafts."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from kvern.kernels import convolution
from kvern.kernels.convolution import Drafts, Runs, Taps
from kvern.kernels.delta_net import CHUNK
from kvern.runner.device_states import runs_of
from kvern.spec.mixers import Mamba2Spec, RecurrentSpec, ShortConvSpec
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]
SINGLE = (1, 1, 1)
COUNTS = (1, CHUNK + 3, 2)
"""Runs that are launched: shorter than the convolution, and of more than a chunk."""
DRAFTED, ACCEPTED = (2, 3, 5), (1, 3, 4)
"""Tokens of runs that may be rejected, and as many of them as are not."""
ALIGNED = 16
"""Bytes, as kernels are compiled for pointers to a multiple of them or for any."""
TIMED_TOKENS = (1, 64)
TIMED_COUNTS = ((8192,), (1024,) * 8)
TIMED_DRAFTS = ((5,), (5,) * 32)


def runs(inputs: Inputs, counts: Sequence[int]) -> Runs:
    """Of these lengths, whose states are in a mixed order."""
    return runs_of(inputs.integers(reversed(range(len(counts)))), counts)


def drafts(inputs: Inputs, counts: Sequence[int]) -> Drafts:
    """The same of runs that may be rejected."""
    described = runs(inputs, counts)
    return Drafts(described.states, described.firsts, described.counts, described.requests)


def accepted_tokens(counts: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Of runs of these lengths the first tokens, so many of each."""
    firsts = accumulate(counts, initial=0)
    return [first + place for first, count in zip(firsts, accepted, strict=False) for place in range(count)]


def projected(inputs: Inputs, mixer: RecurrentSpec, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a projection's outputs what is convolved and the gates [tokens, ...], in rows as far apart as in the model.

    How far that is decides how kernels are compiled. A short convolution's gates are among what is convolved.
    """
    if isinstance(mixer, Mamba2Spec):
        rows = inputs.numbers(tokens, mixer.inner + mixer.channels + mixer.heads)
        return rows[:, mixer.inner : mixer.inner + mixer.channels], rows[:, : mixer.inner]
    if isinstance(mixer, ShortConvSpec):
        rows = inputs.numbers(tokens, 3 * mixer.channels)
        return rows, rows
    gates = mixer.value_heads * mixer.value_dim
    if mixer.grouped:  # what is projected key head by key head is copied
        return inputs.numbers(tokens, mixer.channels), inputs.numbers(tokens, gates)
    rows = inputs.numbers(tokens, mixer.channels + gates + 2 * mixer.value_heads)
    return rows[:, : mixer.channels], rows[:, mixer.channels : mixer.channels + gates]


def convolved(
    mixed: torch.Tensor,
    taps: Taps,
    memory: torch.Tensor,
    counts: Sequence[int],
    states: Sequence[int],
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: what the convolution of runs gives, and the states' inputs behind them."""
    memory = memory.double()
    found = []
    first = 0
    weights = taps.weights.double()
    before, behind, x = torch.chunk(mixed.double(), 3, 1) if gated else (None, None, mixed.double())
    given = x if before is None else (before * x).to(mixed.dtype).double()  # as a state keeps them
    for count, state in zip(counts, states, strict=True):
        window = torch.cat((memory[state], given[first : first + count]))
        found += [(window[at : at + len(weights)] * weights).sum(0) for at in range(count)]
        memory[state] = window[count:]
        first += count
    sums = torch.stack(found)
    if taps.bias is not None:
        sums += taps.bias.double()
    return F.silu(sums) if behind is None else sums * behind, memory


def _convolve(
    spec: ModelSpec,
    inputs: Inputs,
    mixer: RecurrentSpec,
    counts: Sequence[int],
    single: bool,
    accepted: Sequence[int] | None = None,
    before: int = 0,
) -> Call:
    """Behind so many tokens of others; of runs that may be rejected if it is said what is `accepted` of them."""
    requests = len(counts)
    tokens = sum(counts)
    channels = mixer.channels
    gated = isinstance(mixer, ShortConvSpec)
    mixed = projected(inputs, mixer, before + tokens)[0][before:]
    taps = Taps(inputs.numbers(mixer.kernel, channels, dtype=torch.float32))
    if (isinstance(mixer, ShortConvSpec) and mixer.bias) or (isinstance(mixer, Mamba2Spec) and mixer.conv_bias):
        taps = taps._replace(bias=inputs.numbers(channels, dtype=torch.float32))
    memory, described = inputs.numbers(requests, mixer.kernel - 1, channels), runs(inputs, counts)
    states = list(reversed(range(requests)))
    unsure, kept = drafts(inputs, counts), inputs.integers(counts if accepted is None else accepted)
    noted = inputs.numbers(1, tokens, channels)

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        if accepted is not None:
            found = convolution.convolve_drafts(mixed, taps, memory, unsure, noted[0], gated=gated)
            convolution.accept_inputs(memory[None], noted, unsure, kept)
            return found, memory
        if single:
            return convolution.convolve_tokens(mixed, taps, memory, described.states, gated=gated), memory
        return convolution.convolve_runs(mixed, taps, memory, described, gated=gated), memory

    moved = (mixed.numel() + tokens * channels + 2 * memory.numel()) * memory.element_size() + 4 * taps.weights.numel()
    sizes = f"{'x'.join(map(str, dict.fromkeys((requests, max(counts)))))} x {channels}"

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        found, behind = convolved(mixed, taps, memory, counts, states, gated)
        if accepted is not None:
            first = mixed[accepted_tokens(counts, accepted)]
            behind = convolved(first, taps, memory, accepted, states, gated)[1]
        return found, behind

    return Call(sizes, launch, reference, moved)


def _tokens_before(mixer: RecurrentSpec, inputs: Inputs) -> tuple[int, ...]:
    """How many there are before runs, in each form: of rows that are not aligned these decide if the runs' first is."""
    rows, _ = projected(inputs.without_device(), mixer, 1)
    return (0,) if rows.stride(0) * rows.element_size() % ALIGNED == 0 else (0, 1)


def _single_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, SINGLE, True) for mixer in dict.fromkeys(spec.recurrent))


def _runs_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for mixer in dict.fromkeys(spec.recurrent):
        yield from ((mixer, COUNTS, False, None, before) for before in _tokens_before(mixer, inputs))


def _single_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, (1,) * tokens, True) for mixer in dict.fromkeys(spec.recurrent) for tokens in TIMED_TOKENS)


def _runs_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, counts, False) for mixer in dict.fromkeys(spec.recurrent) for counts in TIMED_COUNTS)


def _drafts_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if inputs.drafts:
        for mixer in dict.fromkeys(spec.recurrent):
            yield from ((mixer, DRAFTED, False, ACCEPTED, before) for before in _tokens_before(mixer, inputs))


def _drafts_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    mixers = dict.fromkeys(spec.recurrent)
    yield from ((mixer, counts, False, counts) for mixer in mixers for counts in TIMED_DRAFTS)


_entry = partial(Kernel, group="states", make=_convolve)
KERNELS = (
    _entry(name="convolve_tokens", launched=_single_launched, timed=_single_timed),
    _entry(name="convolve_runs", launched=_runs_launched, timed=_runs_timed),
    _entry(name="convolve_drafts", launched=_drafts_launched, timed=_drafts_timed),
)
