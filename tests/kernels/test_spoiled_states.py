"""A request whose tokens or states are no numbers changes nothing of what those beside it are told."""

from collections.abc import Callable, Sequence

import pytest
import torch

from kvern.kernels import delta_net, mamba2
from kvern.kernels.accepted_drafts import Written, accept_writes
from kvern.kernels.convolution import Drafts, Taps, accept_inputs, convolve_drafts, convolve_runs, convolve_tokens
from kvern.kernels.delta_net import Heads
from kvern.kernels.delta_net_drafts import read_drafts
from kvern.kernels.mamba2 import StateSizes
from kvern.runner.device_states import runs_of
from tests.support.kernel_list.mamba2 import verify
from tests.support.kernels.state_inputs import KERNEL, Random, steps

RUNS, TOKENS = [3, 2, 18, 1], [1, 1, 1, 1]
STATES = [3, 0, 5, 1]
SPOILED = 1
HEADS, SIZES, CHANNELS = Heads(1, 2, 16, 16), StateSizes(2, 16, 1, 16), 40
Change = Callable[[torch.Tensor, torch.Tensor, Random, Sequence[int]], torch.Tensor]
"""Lets states see inputs [T, ...] of runs; what these read."""


def _drafts(device: torch.device, counts: Sequence[int]) -> tuple[Drafts, torch.Tensor]:
    """Runs, all of whose tokens but the last are accepted, and of runs of one that."""
    runs = runs_of(torch.tensor(STATES, dtype=torch.int32, device=device), counts)
    return Drafts(runs.states, runs.firsts, runs.counts, runs.requests), (runs.counts - 1).clamp(min=1)


def convolution(inputs: torch.Tensor, memory: torch.Tensor, random: Random, counts: Sequence[int]) -> torch.Tensor:
    taps, states = Taps(random(KERNEL, CHANNELS)), torch.tensor(STATES, dtype=torch.int32, device=random.device)
    if max(counts) == 1:
        return convolve_tokens(inputs, taps, memory, states)
    return convolve_runs(inputs, taps, memory, runs_of(states, counts))


def drafted_convolution(
    inputs: torch.Tensor, memory: torch.Tensor, random: Random, counts: Sequence[int]
) -> torch.Tensor:
    (drafts, kept), noted = _drafts(random.device, counts), torch.empty_like(inputs)
    found = convolve_drafts(inputs, Taps(random(KERNEL, CHANNELS)), memory, drafts, noted)
    accept_inputs(memory[None], noted[None], drafts, kept)
    return found


def delta(inputs: torch.Tensor, memory: torch.Tensor, random: Random, counts: Sequence[int]) -> torch.Tensor:
    gates, states = random.gates(len(inputs), HEADS, 1.0), torch.tensor(STATES, dtype=torch.int32, device=random.device)
    if max(counts) == 1:
        return delta_net.advance_tokens(inputs, gates, memory, states, HEADS)
    return delta_net.advance_runs(inputs, gates, memory, runs_of(states, counts), HEADS)


def drafted_delta(inputs: torch.Tensor, memory: torch.Tensor, random: Random, counts: Sequence[int]) -> torch.Tensor:
    (drafts, kept), tokens = _drafts(random.device, counts), len(inputs)
    shapes = (HEADS.key_heads, HEADS.key_dim), (HEADS.value_heads, HEADS.value_dim), (HEADS.value_heads,)
    written = Written(*(torch.empty(tokens, *shape, device=random.device) for shape in shapes))
    found = torch.empty_like(written.values)
    read_drafts(inputs, random.gates(tokens, HEADS, 1.0), memory, drafts, HEADS, written, found)
    accept_writes(memory[None], Written(*(part[None] for part in written)), drafts, kept)
    return found


def mamba(inputs: torch.Tensor, memory: torch.Tensor, random: Random, counts: Sequence[int]) -> torch.Tensor:
    given, states = (
        steps(random, len(inputs), SIZES, 1.0),
        torch.tensor(STATES, dtype=torch.int32, device=random.device),
    )
    if max(counts) == 1:
        return mamba2.advance_tokens(inputs, given, memory, states, SIZES)
    return mamba2.advance_runs(inputs, given, memory, runs_of(states, counts), SIZES)


def drafted_mamba(inputs: torch.Tensor, memory: torch.Tensor, random: Random, counts: Sequence[int]) -> torch.Tensor:
    drafts, kept = _drafts(random.device, counts)
    return verify(inputs, steps(random, len(inputs), SIZES, 1.0), memory, drafts, SIZES, kept)


KINDS: dict[str, tuple[Change, int, tuple[int, ...]]] = {
    "convolution": (convolution, CHANNELS, (KERNEL - 1, CHANNELS)),
    "drafted convolution": (drafted_convolution, CHANNELS, (KERNEL - 1, CHANNELS)),
    "delta net": (delta, HEADS.channels, (2, 16, 16)),
    "drafted delta net": (drafted_delta, HEADS.channels, (2, 16, 16)),
    "mamba": (mamba, SIZES.channels, (1, 16, 32)),
    "drafted mamba": (drafted_mamba, SIZES.channels, (1, 16, 32)),
}
"""How each is launched, the numbers of a token, and the shape of a state."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [TOKENS, RUNS], ids=["tokens", "runs"])
def test_what_is_no_number_stays_where_it_is(kind: str, counts: list[int], device: torch.device) -> None:
    change, width, state = KINDS[kind]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for spoiled in (False, True):
        random = Random(0, device)
        inputs, memory = random(sum(counts), width), random(8, *state)
        if spoiled:
            inputs[sum(counts[:SPOILED]) : sum(counts[: SPOILED + 1])] = float("nan")
            memory[[place for place in range(8) if place == STATES[SPOILED] or place not in STATES]] = float("inf")
        found.append((change(inputs, memory, random, counts), memory))
    own = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)) != SPOILED
    others = [place for place in STATES if place != STATES[SPOILED]]
    (expected, before), (beside, after) = found
    assert torch.equal(beside[own.to(device)], expected[own.to(device)])
    assert torch.equal(after[others], before[others])
    assert beside[~own.to(device)].isnan().any()
