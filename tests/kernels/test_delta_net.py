"""Gated delta nets against float64, token by token: any runs, any sizes of heads, states that others keep."""

import pytest
import torch
import torch.nn.functional as F

from kvern.kernels.accepted_drafts import Written, accept_writes
from kvern.kernels.convolution import Drafts, Taps, accept_inputs, convolve_drafts, convolve_runs, convolve_tokens
from kvern.kernels.delta_net import CHUNK, LENGTH_FLOOR, Heads, advance_runs, advance_tokens, gated_norm
from kvern.kernels.delta_net_drafts import read_drafts
from kvern.layers import delta_net
from kvern.runner.device_states import runs_of
from tests.kernels.recorded import recorded
from tests.support.kernel_list.convolution import convolved
from tests.support.kernel_list.delta_net import advanced
from tests.support.kernels.state_inputs import ACCEPTED, DRAFTED, KERNEL, Random, assert_near, drafts_of

SIZES = [Heads(1, 2, 16, 16), Heads(1, 1, 20, 40)]
COUNTS = [1, 3, CHUNK, CHUNK + 5, 2]


@pytest.mark.parametrize("heads", SIZES, ids=str)
def test_single_tokens(heads: Heads, device: torch.device) -> None:
    random, states = Random(0, device), [4, 1, 2]
    mixed, taps = random(3, heads.channels + 5)[:, : heads.channels], Taps(random(KERNEL, heads.channels))
    kept = random(6, KERNEL - 1, heads.channels)
    expected = convolved(mixed, taps, kept, [1, 1, 1], states)
    sent = torch.tensor(states, dtype=torch.int32, device=device)
    assert_near(convolve_tokens(mixed, taps, kept, sent), expected[0])
    assert_near(kept, expected[1])

    inputs, gates = random(3, heads.channels), random.gates(3, heads, 1.0)
    memory = random(6, heads.value_heads, heads.key_dim, heads.value_dim)
    expected = advanced(inputs, gates, memory, [1, 1, 1], states, heads)
    assert_near(advance_tokens(inputs, gates, memory, sent, heads), expected[0])
    assert_near(memory, expected[1])


@pytest.mark.parametrize("heads", SIZES, ids=str)
@pytest.mark.parametrize("decay", [0.01, 20.0])
def test_runs(heads: Heads, decay: float, device: torch.device) -> None:
    """Runs shorter than the convolution, of whole chunks and of parts of one; what is forgotten at once, and late."""
    random, states = Random(1, device), [3, 0, 5, 6, 1]
    tokens, runs = sum(COUNTS), runs_of(torch.tensor(states, dtype=torch.int32, device=device), COUNTS)
    mixed, taps = random(tokens, heads.channels + 3)[:, : heads.channels], Taps(random(KERNEL, heads.channels))
    kept = random(8, KERNEL - 1, heads.channels)
    expected = convolved(mixed, taps, kept, COUNTS, states)
    assert_near(convolve_runs(mixed, taps, kept, runs), expected[0])
    assert_near(kept, expected[1])

    inputs, gates = random(tokens, heads.channels), random.gates(tokens, heads, decay)
    memory = random(8, heads.value_heads, heads.key_dim, heads.value_dim)
    expected = advanced(inputs, gates, memory, COUNTS, states, heads)
    assert_near(advance_runs(inputs, gates, memory, runs, heads), expected[0])
    assert_near(memory, expected[1])


@pytest.mark.parametrize("gated", [False, True], ids=["activated", "gated"])
def test_inputs_of_accepted_drafts(gated: bool, device: torch.device) -> None:
    """Of two layers at once; until then states stay as they are."""
    random, states, channels = Random(4, device), [4, 1, 2, 6], 40
    (drafts, kept, accepted), width = drafts_of(states, device), channels * (3 if gated else 1)
    memory, taps = random(2, 8, KERNEL - 1, channels), Taps(random(KERNEL, channels))
    noted, before, expected = random(2, sum(DRAFTED), channels), memory.clone(), []
    for layer in range(2):
        mixed = random(sum(DRAFTED), width + 3)[:, :width]
        found = convolve_drafts(mixed, taps, memory[layer], drafts, noted[layer], gated=gated)
        assert_near(found, convolved(mixed, taps, memory[layer], DRAFTED, states, gated)[0])
        expected.append(convolved(mixed[accepted], taps, memory[layer], ACCEPTED, states, gated)[1])
    assert torch.equal(memory, before)
    accept_inputs(memory, noted, drafts, kept)
    assert_near(memory, torch.stack(expected))


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded by Triton's interpreter")
def test_more_tokens_are_the_same_launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of an odd multiple of eight numbers: what is not aligned alike is compiled again."""
    memory, taps, states = torch.zeros(2, 8, KERNEL - 1, 40), Taps(torch.zeros(KERNEL, 40)), torch.zeros(1).int()
    with recorded(monkeypatch) as launched:
        for tokens in (33, 34, 48):
            counts, runs = states + tokens, runs_of(states, [tokens])
            convolve_runs(torch.zeros(tokens, 56)[:, :40], taps, memory[0], runs)
            accept_inputs(memory, torch.zeros(2, tokens, 40), Drafts(*runs[:4]), counts)
    assert sorted(name for name, _ in launched) == ["_convolve_runs_kernel", "_remember_kernel"]


@pytest.mark.parametrize("heads", [*SIZES, Heads(2, 4, 16, 8)], ids=str)
def test_matrices_behind_accepted_drafts(heads: Heads, device: torch.device) -> None:
    """Likewise; of heads that share keys, and of more columns than a program has."""
    random, states = Random(5, device), [4, 1, 2, 6]
    drafts, kept, accepted = drafts_of(states, device)
    memory, expected = random(2, 8, heads.value_heads, heads.key_dim, heads.value_dim), []
    shapes = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim), (heads.value_heads,)
    written, before = Written(*(random(2, sum(DRAFTED), *shape) for shape in shapes)), memory.clone()
    for layer in range(2):
        inputs, gates = random(sum(DRAFTED), heads.channels), random.gates(sum(DRAFTED), heads, 1.0)
        own, found = Written(*(part[layer] for part in written)), torch.empty_like(written.values[layer])
        read_drafts(inputs, gates, memory[layer], drafts, heads, own, found)
        assert_near(found, advanced(inputs, gates, memory[layer], DRAFTED, states, heads)[0])
        first = gates._replace(beta=gates.beta[accepted], step=gates.step[accepted])
        expected.append(advanced(inputs[accepted], first, memory[layer], ACCEPTED, states, heads)[1])
    assert torch.equal(memory, before)
    accept_writes(memory, written, drafts, kept)
    assert_near(memory, torch.stack(expected))


def test_drafts_of_two_bytes_read_all_digits_of_a_state(device: torch.device) -> None:
    random, heads, states = Random(6, device), Heads(1, 2, 128, 128), [4, 1, 2, 6]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # which are all that the interpreter multiplies
    drafts, tokens = drafts_of(states, device)[0], sum(DRAFTED)
    memory, inputs = random(8, heads.value_heads, heads.key_dim, heads.value_dim), random(tokens, heads.channels)
    shapes = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim), (heads.value_heads,)
    written, gates = Written(*(random(tokens, *shape) for shape in shapes)), random.gates(tokens, heads, 1.0)
    found = torch.empty_like(written.values)
    read_drafts(inputs.to(dtype), gates, memory, drafts, heads, written, found)
    assert_near(found, advanced(inputs.to(dtype), gates, memory, DRAFTED, states, heads)[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("alike", [0.0, 3.0], ids=["keys differ", "keys are alike"])
@pytest.mark.parametrize("decay", [0.0001, 0.1, 20.0])
def test_runs_of_two_bytes_at_the_width_of_real_heads(decay: float, alike: float, device: torch.device) -> None:
    """Rounded to 11 bits a few times. Keys that are alike make systems whose inverse is far from 1."""
    random, heads, counts = Random(2, device), Heads(1, 2, 128, 128), [2 * CHUNK + 6, 9]
    tokens, runs = sum(counts), runs_of(torch.tensor([1, 0], dtype=torch.int32, device=device), counts)
    inputs, memory = random(tokens, heads.channels), random(2, heads.value_heads, heads.key_dim, heads.value_dim)
    inputs[:, heads.key_dim : 2 * heads.key_dim] += alike * random(heads.key_dim)
    inputs, gates = inputs.half(), random.gates(tokens, heads, decay)
    expected = advanced(inputs, gates, memory, counts, [1, 0], heads)
    for found, right in zip((advance_runs(inputs, gates, memory, runs, heads), memory), expected, strict=True):
        assert (found - right).norm() < 2**-10 * right.norm()


@pytest.mark.parametrize("tokens", [1, 5])
def test_norms(tokens: int, device: torch.device) -> None:
    """Of more heads than are a program's, whose number is no power of two."""
    random, heads, width = Random(3, device), 5, 1000
    read, weight = random(tokens, heads, width), random(width)
    gate = random(tokens, heads * width + 3)[:, : heads * width]
    normal = read.double() / (read.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_near(gated_norm(read, gate, weight, 1e-6), normal.flatten(1) * F.silu(gate.double()))


def test_the_floor_is_the_layers_own() -> None:
    assert LENGTH_FLOOR.value == delta_net.LENGTH_FLOOR
