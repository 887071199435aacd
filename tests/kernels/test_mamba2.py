"""Mamba-2 and gated convolutions against float64, token by token: any runs, any sizes, states that others keep."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.kernels import mamba2
from kvern.kernels.convolution import Taps, convolve_runs, convolve_tokens
from kvern.kernels.mamba2 import CHUNK, StateSizes, advance_runs, advance_tokens
from kvern.runner.device_states import runs_of
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.support.kernel_list import Inputs, Kernel
from tests.support.kernel_list import convolution as convolution_list
from tests.support.kernel_list import mamba2 as mamba2_list
from tests.support.kernel_list.convolution import convolved
from tests.support.kernel_list.mamba2 import advanced, verify
from tests.support.kernels.state_inputs import ACCEPTED, DRAFTED, KERNEL, Random, assert_near, drafts_of, steps

SIZES = [StateSizes(4, 16, 2, 16), StateSizes(3, 40, 1, 20)]
COUNTS = [1, 3, CHUNK, CHUNK + 5, 2]
STATES = [3, 0, 5, 6, 1]
MODELS = ("lfm2", "nemotron_h", "falcon_h1")


def launch(kernel: Kernel, model: str) -> None:
    """In its last form, of the size that models have."""
    spec, inputs = spec_of(model, LARGE_MODELS), Inputs(torch.device("cpu"), torch.bfloat16, "empty")
    for arguments in list(kernel.launched(spec, inputs))[-1:]:
        kernel.make(spec, inputs, *arguments).launch()


LAUNCHES: list[Callable[[], object]] = [
    partial(launch, kernel, model) for kernel in (*mamba2_list.KERNELS, *convolution_list.KERNELS) for model in MODELS
]


def memory(random: Random, sizes: StateSizes) -> torch.Tensor:
    return random(8, sizes.groups, sizes.state_dim, sizes.heads // sizes.groups * sizes.head_dim)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_single_tokens(sizes: StateSizes, device: torch.device) -> None:
    random, states = Random(0, device), [4, 1, 2]
    inputs, given, kept = random(3, sizes.channels), steps(random, 3, sizes, 1.0), memory(random, sizes)
    expected = advanced(inputs, given, kept, [1, 1, 1], states, sizes)
    sent = torch.tensor(states, dtype=torch.int32, device=device)
    assert_near(advance_tokens(inputs, given, kept, sent, sizes), expected[0])
    assert_near(kept, expected[1])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rate", [0.01, 20.0])
def test_runs(sizes: StateSizes, rate: float, device: torch.device) -> None:
    """Of whole chunks and of parts of one; what is forgotten at once, and late."""
    random, tokens = Random(1, device), sum(COUNTS)
    runs = runs_of(torch.tensor(STATES, dtype=torch.int32, device=device), COUNTS)
    inputs, given, kept = random(tokens, sizes.channels), steps(random, tokens, sizes, rate), memory(random, sizes)
    expected = advanced(inputs, given, kept, COUNTS, STATES, sizes)
    assert_near(advance_runs(inputs, given, kept, runs, sizes), expected[0])
    assert_near(kept, expected[1])


@pytest.mark.parametrize("sizes", [SIZES[0], StateSizes(2, 64, 1, 128)], ids=str)
def test_runs_in_the_tiles_of_cards_of_amds(
    sizes: StateSizes, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the smaller ones of the long states below, for all states."""
    monkeypatch.setattr(mamba2, "is_amd", lambda device: True)
    random, tokens = Random(1, device), sum(COUNTS)
    runs = runs_of(torch.tensor(STATES, dtype=torch.int32, device=device), COUNTS)
    inputs, given, kept = random(tokens, sizes.channels), steps(random, tokens, sizes, 0.1), memory(random, sizes)
    expected = advanced(inputs, given, kept, COUNTS, STATES, sizes)
    for found, wanted in zip((advance_runs(inputs, given, kept, runs, sizes), kept), expected, strict=True):
        assert (found - wanted).norm() < 1e-6 * wanted.norm()


def test_runs_of_long_states(device: torch.device) -> None:
    """Whose chunks are half as long, so that their keys and queries fit every card."""
    random, tokens, sizes = Random(4, device), sum(COUNTS), StateSizes(2, 16, 1, 256)
    runs = runs_of(torch.tensor(STATES, dtype=torch.int32, device=device), COUNTS)
    inputs, given, kept = random(tokens, sizes.channels), steps(random, tokens, sizes, 0.1), memory(random, sizes)
    expected = advanced(inputs, given, kept, COUNTS, STATES, sizes)
    for found, wanted in zip((advance_runs(inputs, given, kept, runs, sizes), kept), expected, strict=True):
        assert (found - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_states_behind_accepted_drafts(sizes: StateSizes, device: torch.device) -> None:
    random, tokens = Random(2, device), sum(DRAFTED)
    states = STATES[: len(DRAFTED)]
    drafts, accepted, first = drafts_of(states, device)
    inputs, given, kept = random(tokens, sizes.channels), steps(random, tokens, sizes, 1.0), memory(random, sizes)
    expected = advanced(inputs, given, kept, DRAFTED, states, sizes)[0]
    behind = advanced(inputs[first], given._replace(step=given.step[first]), kept, ACCEPTED, states, sizes)[1]
    assert_near(verify(inputs, given, kept, drafts, sizes, accepted), expected)
    assert_near(kept, behind)


def test_runs_in_16_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bfloat16 is multiplied, which the interpreter cannot: a sum of two numbers is nearer than one would be.

    On a GPU tokens of a chunk meet in TF32, which keeps 11 bits.
    """
    monkeypatch.setitem(mamba2.PRECISIONS, torch.float16, "split")
    random, tokens, sizes = Random(3, device), sum(COUNTS), SIZES[0]
    runs = runs_of(torch.tensor(STATES, dtype=torch.int32, device=device), COUNTS)
    inputs, given, kept = random(tokens, sizes.channels), steps(random, tokens, sizes, 0.1), memory(random, sizes)
    inputs = inputs.half()
    expected = advanced(inputs, given, kept, COUNTS, STATES, sizes)
    for found, wanted in zip((advance_runs(inputs, given, kept, runs, sizes), kept), expected, strict=True):
        assert (found - wanted).norm() < (1e-5 if device.type == "cpu" else 1e-3) * wanted.norm()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "activated"])
def test_convolutions_with_a_bias(gated: bool, device: torch.device) -> None:
    random, channels = Random(2, device), 40
    width = 3 * channels if gated else channels
    taps = Taps(random(KERNEL, channels), random(channels))
    sent = torch.tensor(STATES, dtype=torch.int32, device=device)
    for counts in (COUNTS, [1] * len(COUNTS)):
        mixed, kept = random(sum(counts), width + 3)[:, :width], random(8, KERNEL - 1, channels)
        expected = convolved(mixed, taps, kept, counts, STATES, gated)
        if counts == COUNTS:
            found = convolve_runs(mixed, taps, kept, runs_of(sent, counts), gated=gated)
        else:
            found = convolve_tokens(mixed, taps, kept, sent, gated=gated)
        assert_near(found, expected[0])
        assert_near(kept, expected[1])
