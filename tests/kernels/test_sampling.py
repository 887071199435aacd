"""The sampling kernels choose what the PyTorch sampler chooses."""

import itertools
from typing import Any

import pytest
import torch

from kvern import SamplingParams
from kvern.device.device_batch import DeviceRows
from kvern.device.rows import BatchRows
from kvern.kernels.constraints import change
from kvern.kernels.sampling import choose as choose_among
from kvern.kernels.sampling import find, sample
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.step import NewRequest
from kvern.sample import sampler


def make_rows(device: torch.device, params: list[SamplingParams]) -> DeviceRows:
    rows = DeviceRows(len(params), 64, 4, device, scratch_block=0)
    for slot, item in enumerate(params):
        spec = RequestSpec("", PromptInput([0]), item.resolved(), 1)
        rows.join([NewRequest(slot, spec, spec.params, 1000 * slot - 3, [0], [])])
    return rows


def choose(
    logits: torch.Tensor, rows: DeviceRows, slots: list[int], positions: torch.Tensor, filtered: bool
) -> list[int]:
    device_slots = torch.tensor(slots, dtype=torch.int32, device=logits.device)
    scores = change(logits, device_slots, positions, rows, everything=False) if filtered else None
    return sample(logits, scores, device_slots, positions, rows).tolist()


def rows_on_cpu(params: list[SamplingParams]) -> BatchRows:
    rows = BatchRows(len(params), 64, 4, torch.device("cpu"))
    for slot, item in enumerate(params):
        spec = RequestSpec("", PromptInput([0]), item.resolved(), 1)
        rows.join([NewRequest(slot, spec, spec.params, 1000 * slot - 3, [0], [])])
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_temperature_and_greedy(device: torch.device, dtype: torch.dtype) -> None:
    params = [SamplingParams(temperature=value) for value in (0.0, 0.6, 1.0, 1e-4, 1e6)]
    rows = make_rows(device, params)
    slots = [0, 1, 2, 3, 4, 1, 2, 0]
    logits = (3 * torch.randn(len(slots), 5000, generator=torch.Generator().manual_seed(1))).to(dtype).to(device)
    positions = torch.arange(5, 5 + len(slots), device=device)
    chosen = choose(logits, rows, slots, positions, filtered=False)
    expected = sampler.sample(logits.float().cpu(), rows_on_cpu(params), slots, positions.cpu()).tolist()
    assert chosen == expected
    assert choose(logits, rows, slots, positions, filtered=True) == expected
    alone = [choose(logits[[row]], rows, [slot], positions[[row]], filtered=False)[0] for row, slot in enumerate(slots)]
    assert alone == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_vocabulary_give_what_all_of_it_gives(device: torch.device, dtype: torch.dtype) -> None:
    """Three ranks have parts of several chunks, the last one padding, and the middle one what is ruled out alone."""
    params = [SamplingParams(temperature=value) for value in (0.0, 0.6, 1.0, 1e-4, 1e6)]
    rows = make_rows(device, params)
    slots = torch.tensor([0, 1, 2, 3, 4, 1, 0], dtype=torch.int32, device=device)
    logits = (3 * torch.randn(7, 15000, generator=torch.Generator().manual_seed(1))).to(dtype).to(device)
    logits[5, 6000:12000] = float("-inf")
    logits[6] = float("nan")
    positions = torch.arange(5, 12, device=device)
    found = []
    for first, known in ((0, 6000), (6000, 6000), (12000, 3000)):
        part = torch.full((7, 6000), 1e9, dtype=dtype, device=device)  # what pads is never chosen
        part[:, :known] = logits[:, first : first + known]
        found.append(find(part, None, slots, positions, rows, first, known))
    expected = sample(logits, None, slots, positions, rows)
    assert choose_among(torch.cat(found), 3, slots, rows).tolist() == expected.tolist()
    assert expected[6] == 0


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100_000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.7},
    {"typical_p": 0.3},
    {"typical_p": 0.9, "top_k": 100},
    {"typical_p": 0.6, "top_p": 0.9, "min_p": 0.01, "temperature": 1.4},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.2, "temperature": 1.7},
    {},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters(device: torch.device, dtype: torch.dtype) -> None:
    params = [SamplingParams(**({"temperature": 0.8} | fields)) for fields in FILTERS]
    rows = make_rows(device, params)
    slots = list(range(len(params)))
    generator = torch.Generator().manual_seed(2)
    logits = (2 * torch.randn(len(slots), 600, generator=generator)).to(dtype)
    logits[0, 300:] = float("-inf")
    logits[::2] -= 40
    logits[-1, :599] = float("-inf")
    positions = torch.arange(1, 1 + len(slots))
    expected = sampler.sample(logits.float(), rows_on_cpu(params), slots, positions).tolist()
    assert choose(logits.to(device), rows, slots, positions.to(device), filtered=True) == expected


def test_ties_of_the_last_are_kept(device: torch.device) -> None:
    params = [SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.4)]
    rows = make_rows(device, params)
    logits = torch.full((28, 8), -9.0)
    logits[:, 2:6] = 1.0
    slots = [0, 1] * 14
    chosen = choose(logits.to(device), rows, slots, torch.arange(28, device=device), filtered=True)
    assert set(chosen[::2]) == {2, 3, 4, 5}
    assert set(chosen[1::2]) == {2, 3, 4, 5}


SMALL, HUGE = 1e-37, 1e6
EXTREMES: list[dict[str, Any]] = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature in (0.0, 5e-324, 1e-5, 1.0, HUGE)
    for top_k in (0, 1, 2**31 - 1)
    for top_p in (SMALL, 0.5, 1.0)
    for min_p in (0.0, 5e-324, 1.0)
]


def extreme_logits() -> dict[str, torch.Tensor]:
    """Rows that biases, bans and broken models make, [1, vocabulary] of several chunks."""
    plain = torch.randn(1, 5000, generator=torch.Generator().manual_seed(4))
    biased, banned, alone = plain.clone(), plain.clone(), torch.full_like(plain, float("-inf"))
    biased[0, [3, 4200, 4300]] += 1e9
    banned[0] -= 1e9
    alone[0, 4500] = -3.0
    return {
        "plain": plain,
        "biased": biased,
        "banned": banned,
        "alone": alone,
        "nothing": torch.full_like(plain, -torch.inf),
    }


@pytest.mark.parametrize("one_of", [45, pytest.param(4, marks=pytest.mark.nightly)])
def test_extreme_numbers_choose_what_the_sampler_chooses(device: torch.device, one_of: int) -> None:
    """Some of the combinations with each of the rows of logits."""
    for turn, (name, logits) in enumerate(extreme_logits().items()):
        extremes = [fields for place, fields in enumerate(EXTREMES) if (place + 2 * turn) % one_of == 0]
        params = [SamplingParams(**fields) for fields in extremes]
        rows, slots, positions = make_rows(device, params), list(range(len(params))), torch.arange(len(params))
        logits = logits.repeat(len(slots), 1)
        expected = sampler.sample(logits.clone(), rows_on_cpu(params), slots, positions).tolist()
        chosen = choose(logits.to(device), rows, slots, positions.to(device), filtered=True)
        wrong = [fields for fields, one, other in zip(extremes, chosen, expected, strict=True) if one != other]
        assert not wrong, (name, wrong)


def test_biased_tokens_are_drawn_from(device: torch.device) -> None:
    """Two of equal bias, far above all others and in different chunks, come equally often."""
    rows, logits = make_rows(device, [SamplingParams(temperature=1.0)]), torch.zeros(100, 5000)
    logits[:, [3, 4200]] = 1e9
    chosen = choose(logits.to(device), rows, [0] * 100, torch.arange(100, device=device), filtered=False)
    assert set(chosen) == {3, 4200} and 29 < chosen.count(3) < 71


@pytest.mark.parametrize("one_of", [134, pytest.param(13, marks=pytest.mark.nightly)])
def test_whatever_the_logits_are_the_token_exists(device: torch.device, one_of: int) -> None:
    cases = itertools.product(
        (float("nan"), float("inf"), float("-inf"), 3.4e38), (slice(None), slice(7, 9), slice(4990, None))
    )
    for turn, (value, places) in enumerate(cases):
        params = [SamplingParams(**fields) for fields in EXTREMES[turn::one_of]]
        rows, slots, positions = make_rows(device, params), list(range(len(params))), torch.arange(len(params))
        logits = torch.randn(len(slots), 5000, generator=torch.Generator().manual_seed(4))
        logits[:, places] = value
        for filtered in (False, True):
            chosen = choose(logits.to(device), rows, slots, positions.to(device), filtered=filtered)
            assert all(0 <= token < 5000 for token in chosen)
            if value == float("inf") and places != slice(None):
                assert all(token in range(5000)[places] for token in chosen)
