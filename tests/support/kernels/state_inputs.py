"""Random inputs of recurrent layers, and drafts of which some are accepted."""

import torch

from kvern.kernels.accepted_drafts import TOKENS
from kvern.kernels.convolution import Drafts
from kvern.kernels.delta_net import Gates, Heads
from kvern.kernels.mamba2 import StateSizes, Steps
from kvern.runner.device_states import runs_of
from tests.support.kernel_list.convolution import accepted_tokens

KERNEL = 4


class Random:
    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator, self.device = torch.Generator(device).manual_seed(seed), device

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def gates(self, tokens: int, heads: Heads, decay: float) -> Gates:
        """Views with a stride of their own, as parts of one product are."""
        both = self(tokens, 2 * heads.value_heads + 3)
        beta, step = both[:, : heads.value_heads], both[:, heads.value_heads : 2 * heads.value_heads]
        return Gates(beta, step, -decay * self(heads.value_heads).abs(), self(heads.value_heads))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


DRAFTED, ACCEPTED = [2, 1, 6, TOKENS + 3], [1, 1, 4, TOKENS + 2]
"""Lengths of runs that may be rejected: shorter and longer than the convolution, and than a state is read by."""


def drafts_of(states: list[int], device: torch.device) -> tuple[Drafts, torch.Tensor, list[int]]:
    """Runs, how many of their tokens are accepted, and which tokens that are."""
    runs = runs_of(torch.tensor(states, dtype=torch.int32, device=device), DRAFTED)
    kept = torch.tensor(ACCEPTED, dtype=torch.int32, device=device)
    return Drafts(runs.states, runs.firsts, runs.counts, runs.requests), kept, accepted_tokens(DRAFTED, ACCEPTED)


def steps(random: Random, tokens: int, sizes: StateSizes, rate: float) -> Steps:
    """A view with a stride of its own, as a part of a product is."""
    step = random(tokens, sizes.heads + 3)[:, 3:]
    return Steps(step, -rate * random(sizes.heads).abs(), random(sizes.heads), random(sizes.heads), 0.7)
