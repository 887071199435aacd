"""Kernels for CPUs from logits to tokens, beside PyTorch's way and float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvern import SamplingParams
from kvern.cpu.sampling import RowSampler, logprobs, restrict
from kvern.device.rows import ListedRows
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.step import NewRequest
from kvern.runner.needs import SamplingNeeds
from kvern.runner.sampling import CompiledSampling
from kvern.runner.torch_sampling import TorchSampling
from kvern.sample.constraints import constrain
from kvern.sample.logprobs import token_logprobs
from kvern.sample.random import uniform
from kvern.sample.sampler import sample
from kvern.structured import masks
from tests.support.cache_folder import load_kernels

DTYPES = (torch.float32, torch.bfloat16)
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.2},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 5000},
    {"top_k": 10**6},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"top_k": 100, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.9, "temperature": 1.4},
]


@pytest.fixture(autouse=True)
def three_threads() -> None:
    load_kernels("cpu_sampling", 3)


def make_rows(asked: list[SamplingParams], texts: list[list[int]], prompt_length: int = 1, **fields: Any) -> ListedRows:
    rows = ListedRows(len(asked), max(map(len, texts)) + 3, 1, torch.device("cpu"))
    rows.tokens.fill_(2**30)  # what follows a text is never read
    for slot, (params, tokens) in enumerate(zip(asked, texts, strict=True)):
        resolved = params.resolved()
        spec = RequestSpec("", PromptInput(tokens[:prompt_length]), resolved, 1, **fields)
        rows.join([NewRequest(slot, spec, resolved, params.seed or 0, tokens, [0])])
    return rows


def numbers(*shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def scores_of(rows: ListedRows, slots: Tensor, positions: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """What the winner of each row has most of, in float64."""
    times = -(-uniform(rows.seeds[slots], positions, tokens[:, None])[:, 0].double()).log1p()
    return logits.double().gather(1, tokens[:, None])[:, 0] / rows.temperature[slots].double() - times.log()


@pytest.mark.sample(6)
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_a_seeded_request_draws_what_pytorch_draws(fields: dict[str, Any]) -> None:
    """But for ties within rounding: of thousands of draws there are hardly any."""
    count, differing = 48, 0
    params = [SamplingParams(**{"temperature": 1.0, **fields, "seed": 3 * slot - 90}) for slot in range(count)]
    rows = make_rows(params, [[0]] * count)
    sampler, slots, order = RowSampler(rows), torch.arange(count), list(range(count))
    for seed, (vocabulary, scale, dtype) in enumerate(
        [
            (9001, 2.0, DTYPES[0]),
            (9001, 0.02, DTYPES[0]),
            (2048, 8.0, DTYPES[1]),
            (31, 2.0, DTYPES[0]),
            (1, 1.0, DTYPES[1]),
        ]
    ):
        logits = numbers(count, vocabulary, scale=scale, seed=seed, dtype=dtype)
        positions = torch.arange(count) * (2**33 + 7) * (seed % 2) + 5
        found = sampler.sample(logits, slots, positions)
        expected = sample(logits.float(), rows, order, positions)
        other = (found != expected).nonzero()[:, 0]
        differing += len(other)
        if len(other):
            both = [scores_of(rows, other, positions[other], logits[other], item[other]) for item in (found, expected)]
            torch.testing.assert_close(*both, rtol=0, atol=1e-4)
    assert differing <= 1


def test_rows_of_any_options_share_a_call_and_change_no_other() -> None:
    params = [SamplingParams(**{"temperature": 1.0, **fields, "seed": 7}) for fields in FILTERS]
    rows = make_rows(params, [[0]] * len(params))
    sampler, positions = RowSampler(rows), torch.arange(1, len(params) + 1)
    slots = torch.arange(len(params)).flip(0)
    for dtype in DTYPES:
        logits = numbers(len(params), 3001, scale=2.0, dtype=dtype)
        together = sampler.sample(logits, slots, positions).tolist()
        alone = [
            int(sampler.sample(logits[row : row + 1], slots[row : row + 1], positions[row : row + 1]))
            for row in range(len(slots))
        ]
        assert together == alone == sample(logits.float(), rows, slots.tolist(), positions).tolist()


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_whatever_the_logits_are_the_token_is_one_that_can_be_sampled(fields: dict[str, Any]) -> None:
    nan, inf = float("nan"), float("inf")
    rows = make_rows([SamplingParams(**{"temperature": 1.0, **fields, "seed": 2})], [[0]])
    sampler, zero = RowSampler(rows), torch.zeros(1, dtype=torch.int64)
    for vocabulary in (5, 64, 1000, 5000):
        for dtype in DTYPES:
            only = torch.full((1, vocabulary), -inf, dtype=dtype)
            assert sampler.sample(only, zero, zero) == 0
            assert sampler.sample(torch.full_like(only, nan), zero, zero) == 0
            assert 0 <= int(sampler.sample(torch.full_like(only, inf), zero, zero)) < vocabulary
            only[0, vocabulary - 2] = -1e30
            assert sampler.sample(only, zero, zero) == vocabulary - 2
            only[0, 0] = nan
            assert sampler.sample(only, zero, zero) == vocabulary - 2
            equal = torch.full_like(only, -3.0)
            expected = sample(equal.float(), rows, [0], zero)
            assert sampler.sample(equal, zero, zero) == expected, "ties of the last are kept, and the first is the best"


def test_large_logits_do_not_swallow_the_random_numbers() -> None:
    rows = make_rows([SamplingParams(temperature=1.0, seed=2)], [[0]])
    logits = torch.full((400, 50), 1e9)
    drawn = RowSampler(rows).sample(logits, torch.zeros(400, dtype=torch.int64), torch.arange(400))
    assert len(drawn.unique()) > 40


def test_constraints_are_those_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in (9, 40, 3, 17, 25, 33)]
    asked = [
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25),
        SamplingParams(frequency_penalty=0.5, logit_bias={3: 1.5, 70: -2.0}, min_tokens=38),
        SamplingParams(min_tokens=1),
        SamplingParams(allowed_token_ids=[2, 8, 40], logit_bias={8: 1.0, 3: 5.0}),
        SamplingParams(repetition_penalty=0.5, allowed_token_ids=list(range(70))),
        SamplingParams(),
    ]
    words = ((6,), (*texts[1][-2:], 4), (*texts[3][-1:], 5), (71, 3))
    for vocabulary in (72, 1000):
        rows = make_rows(asked, texts, 2, bad_word_ids=words, stop_token_ids=frozenset({3, 5}))
        slots, positions = [4, 0, 1, 3, 5, 2], [len(texts[slot]) for slot in (4, 0, 1, 3, 5, 2)]
        logits = numbers(6, vocabulary, scale=2.0)
        expected = logits.clone()
        constrain(expected, rows, slots, positions)
        RowSampler(rows).constrain(logits, torch.tensor(slots), torch.tensor(positions))
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [31, 4096, 9000])
def test_what_is_not_allowed_is_gone(dtype: torch.dtype, vocabulary: int) -> None:
    logits = numbers(6, vocabulary, dtype=dtype)
    logits[:, ::3] = float("-inf")  # banned already
    rows = torch.tensor([4, 0, 3, 5])
    words = torch.randint(-(2**31), 2**31, (4, -(-vocabulary // 32)), generator=torch.Generator().manual_seed(0)).int()
    words[1] = 0
    words[1, 0] = 0b1001  # tokens 0 and 3, which are banned: the mask goes before
    words[2] = 0
    words[2, -1] = 1 << ((vocabulary - 2) % 32)  # one token at the very end
    expected = logits.clone()
    masks.restrict(expected, rows, words)
    restrict(logits, rows, words)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [20, 5003])
def test_logprobs_are_exact_and_ordered(dtype: torch.dtype, vocabulary: int) -> None:
    logits = numbers(5, vocabulary, scale=3.0, dtype=dtype)
    logits[1] = 0.0  # all are equally probable
    logits[2, 7:] = float("-inf")
    logits[3] = logits[3].round()
    tokens = torch.tensor([3, vocabulary - 1, 15, 11, int(logits[4].argmax())])
    for count in (0, 1, 12, 100):
        own, ranks, ids, values = logprobs(logits, tokens, count)
        expected = token_logprobs(logits.double(), tokens, count)
        exact = logits.double().log_softmax(-1)
        torch.testing.assert_close(own.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6)
        order = exact.sort(dim=-1, descending=True, stable=True)
        kept = min(count, vocabulary)
        assert ranks.tolist() == expected.ranks.tolist()
        assert ids.tolist() == order.indices[:, :kept].tolist(), "of equally probable ones the first comes first"
        torch.testing.assert_close(values.double(), order.values[:, :kept], rtol=1e-6, atol=1e-6)


def test_rows_with_rare_filters_alone_go_through_pytorch() -> None:
    asked = [
        SamplingParams(temperature=1.0, seed=1, top_p=0.9),
        SamplingParams(temperature=0.8, seed=2, xtc_probability=1.0, xtc_threshold=0.05),
        SamplingParams(temperature=0.8, seed=3, top_n_sigma=1.0),
        SamplingParams(temperature=1.0, seed=4, dry_multiplier=1.0),
    ]
    rows = make_rows(asked, [[1, 2, 3, 1, 2]] * 4)
    needs = SamplingNeeds.RARE_FILTERS | SamplingNeeds.FILTERS | SamplingNeeds.REPETITIONS
    compiled, plain = CompiledSampling(rows), TorchSampling(rows)
    slots, index, positions = [0, 1, 2, 3], torch.arange(4), torch.tensor([5, 5, 5, 5])
    for seed in range(20):
        logits = numbers(4, 3000, scale=2.0, seed=seed)
        expected = logits.clone()
        compiled.constrain(logits, slots, index, positions)
        plain.constrain(expected, slots, index, positions)
        assert torch.equal(logits, expected)
        found = compiled.sample(logits, slots, index, positions, needs)
        assert torch.equal(found, plain.sample(expected, slots, index, positions, needs))
