"""Penalties, biases, bans and log-probabilities by kernels are PyTorch's, whatever the rows beside ask for."""

import random
from typing import Any

import pytest
import torch

from kvern import SamplingParams
from kvern.device.device_batch import DeviceRows
from kvern.device.rows import BatchRows
from kvern.kernels import logprobs
from kvern.kernels.constraints import change
from kvern.kernels.sampling import sample
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.step import Fork, NewRequest
from kvern.sample import sampler
from kvern.sample.constraints import constrain
from kvern.sample.logprobs import token_logprobs

LENGTH, PROMPT = 40, 25


def options(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    """Some of all that a request can ask for, extremes among them."""

    def some(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    every: dict[str, Any] = {
        "presence_penalty": rng.choice((-2.0, 1.5)),
        "frequency_penalty": rng.choice((-0.5, 0.3)),
        "repetition_penalty": rng.choice((0.5, 1.3, 1e6)),
        "logit_bias": {
            token: rng.choice((-100.0, 100.0, 1e9, rng.uniform(-5, 9))) for token in some(rng.choice((1, 200)))
        },
        "allowed_token_ids": some(rng.choice((1, 2, vocabulary))),
        "min_tokens": rng.choice((5, LENGTH - PROMPT, LENGTH - PROMPT + 1, 100)),
        "top_p": rng.choice((1e-37, 0.3, 0.95)),
        "top_k": rng.choice((1, 5, 50, vocabulary + 1)),
        "min_p": rng.choice((0.02, 1.0)),
        "typical_p": rng.choice((0.1, 0.7)),
        "logprobs": rng.choice((0, 1, 20, 100)),
    }
    return {name: value for name, value in every.items() if rng.random() < 0.4}


def requests(rng: random.Random, count: int, vocabulary: int) -> list[NewRequest]:
    """One for each row, the first of which asks for nothing."""
    made = []
    for slot in range(count):
        params = SamplingParams(temperature=rng.choice((0, 0.7, 1.3)), **options(rng, vocabulary) if slot else {})
        tokens = [rng.randrange(vocabulary // 10) for _ in range(LENGTH)]
        words: tuple[tuple[int, ...], ...] = ()
        if slot and rng.random() < 0.5:  # words that the text ends with, that it does not, and too long ones
            ended = [(*tokens[-length:], rng.randrange(vocabulary)) for length in (1, 2, 5, LENGTH - PROMPT, 20, 39)]
            words = (*ended, (rng.randrange(vocabulary),), *((token, token + 1, token) for token in range(150)))
        ends = frozenset(rng.sample(range(vocabulary), rng.choice((0, 3, 200)))) if slot else frozenset()
        spec = RequestSpec(
            "", PromptInput([0]), params.resolved(), PROMPT, bad_word_ids=words, stop_token_ids=frozenset(ends)
        )
        made.append(NewRequest(slot, spec, spec.params, 1000 - slot, tokens, []))
    return made


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 6))])
def test_any_mixture(seed: int, device: torch.device) -> None:
    rng, vocabulary, count = random.Random(seed), (700, 4099)[seed % 2], 6
    rows, on_device = BatchRows(count, 64, 4, torch.device("cpu")), DeviceRows(count, 64, 4, device, scratch_block=0)
    joined = requests(rng, count, vocabulary)
    rows.join(joined)
    on_device.join(joined)
    places = [rng.randrange(count) for _ in range(8)]  # drafts: several positions of a row
    positions = torch.tensor([rng.randrange(PROMPT, LENGTH + 1) for _ in places])
    logits = 3 * torch.randn(len(places), vocabulary, generator=torch.Generator().manual_seed(seed))
    logits[1, : vocabulary // 2] = float("-inf")
    logits[2] = logits[2].round()  # ties
    logits[3] = float("-inf")
    logits[4, 5] = float("inf")
    logits = logits.to((torch.bfloat16, torch.float32, torch.float16)[seed % 3])
    expected = logits.float().clone()
    constrain(expected, rows, places, positions.tolist())
    given = logits.to(device)
    slots, where = torch.tensor(places, dtype=torch.int32, device=device), positions.to(device)
    every = change(given, slots, where, on_device, everything=True)
    torch.testing.assert_close(every.cpu(), expected, rtol=1e-6, atol=0, equal_nan=True)
    chosen = sample(given, change(given, slots, where, on_device, everything=False), slots, where, on_device)
    known = [row for row in range(len(places)) if not expected[row].isinf().logical_and(expected[row] > 0).any()]
    wanted = sampler.sample(expected.clone(), rows, places, positions)
    assert chosen.cpu()[known].tolist() == wanted[known].tolist()
    assert sample(every, every, slots, where, on_device).tolist() == chosen.tolist()
    found = logprobs.empty(len(places), device)
    logprobs.logprobs(given, slots, on_device.logprobs, chosen, found)
    finite = [row for row in range(len(places)) if row not in (3, 4)]
    check_logprobs(logits, chosen.cpu(), found, [(row, rows.request(places[row]).params.logprobs) for row in finite])


def check_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, found: logprobs.Found, asked: list[tuple[int, int | None]]
) -> None:
    expected = token_logprobs(logits, chosen, 0)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    own, ranks, ids, values = (tensor.cpu() for tensor in found)
    everything = logits.float().log_softmax(-1)
    for row, count in asked:
        if count is not None:
            assert own[row].item() == pytest.approx(expected.chosen[row].item(), abs=1e-4)
            assert ranks[row].item() == expected.ranks[row].item()
            assert ids[row, :count].tolist() == order[row, :count].tolist()
            torch.testing.assert_close(values[row, :count], everything[row][order[row, :count]], rtol=0, atol=1e-4)


def test_rows_take_over_what_others_ask(device: torch.device) -> None:
    """A row that forks is penalized and biased as its source; one that is taken by another request is not."""
    rows = DeviceRows(3, 64, 4, device, scratch_block=0)
    asked = SamplingParams(presence_penalty=1.0, logit_bias={7: 5.0}, bad_words=None).resolved()
    plain = SamplingParams().resolved()
    for slot, params in enumerate((asked, plain)):
        spec = RequestSpec("", PromptInput([0]), params, 1)
        rows.join([NewRequest(slot, spec, params, 0, [1, 2, 3], [])])
    rows.fork([Fork(2, 0, 3, 4)])
    spec = RequestSpec("", PromptInput([0]), plain, 1)
    rows.join([NewRequest(0, spec, plain, 0, [1, 2, 3, 4], [])])
    logits = torch.zeros(3, 10, device=device)
    slots, positions = torch.arange(3, device=device), torch.full((3,), 4, device=device)
    scores = change(logits, slots, positions, rows, everything=True).tolist()
    assert scores[0] == scores[1] == [0.0] * 10
    assert scores[2] == [0.0, 0.0, -1.0, -1.0, -1.0, 0.0, 0.0, 5.0, 0.0, 0.0]
