"""Drafts that kernels draw from known probabilities are accepted as speculative sampling has it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.device.device_batch import DeviceRows
from kvern.drafting.rejection import DrawnDrafts
from kvern.kernels.sampling import sample
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.step import NewRequest
from tests.support.drawn_drafts import check_draws, logits_of, p_value
from tests.support.internals import core_of, vocab_size_of
from tests.support.speculation import AnyLength
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("few_products")


@pytest.mark.parametrize("draws", [200, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_tokens_have_the_models_probabilities(draws: int, device: torch.device) -> None:
    params = SamplingParams(temperature=1.0).resolved()
    spec = RequestSpec("", PromptInput([0]), params, 1)
    rows = DeviceRows(1, draws + 1, 4, device, scratch_block=0)
    rows.join([NewRequest(0, spec, params, 11, [0], [])])
    logits, theirs = logits_of(1).to(device).expand(draws, -1), logits_of(51).to(device).expand(draws, -1)
    slots, positions = torch.zeros(draws, dtype=torch.int32, device=device), torch.arange(1, draws + 1, device=device)
    drafts, alone = (sample(each.contiguous(), None, slots, positions, rows) for each in (theirs, logits))
    rows.tokens[0, 1 : draws + 1] = drafts.int()
    chosen = alone.clone()
    DrawnDrafts(range(draws), theirs.softmax(-1)).accept(chosen, logits, rows, [0] * draws, positions)
    own, drawn = logits[0].softmax(-1).cpu(), theirs[0].softmax(-1).cpu()
    for tokens, probabilities in ((drafts, drawn), (alone, own), (chosen, own)):
        assert p_value(tokens.cpu(), probabilities) > 0.001
    accepted, share = float((chosen == drafts).double().mean()), float(torch.minimum(own, drawn).sum())
    assert accepted == pytest.approx(share, abs=4 * (share * (1 - share) / draws) ** 0.5)


@pytest.mark.nightly
def test_an_engine_draws_with_the_models_probabilities(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    options = {"dtype": "float32", "max_model_len": 64, "max_batch_requests": 32, "kv_cache_tokens": 2048}
    check_draws(on_device(make_tiny_model(tmp_path / "model"), **options), 30, 20)


@pytest.mark.nightly
def test_a_draft_model_tells_what_it_draws_from(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    """The model guesses for itself, filtered, greedy or not: its drafts are right."""
    folder = str(make_tiny_model(tmp_path / "model"))
    options = {"dtype": "float32", "max_model_len": 64, "max_batch_requests": 4, "kv_cache_tokens": 256}
    params = [SamplingParams(temperature=1.0, seed=seed, top_p=0.7, max_tokens=9, ignore_eos=True) for seed in range(3)]
    params.append(params[0].replace(temperature=0))
    llm = on_device(folder, draft_model=folder, acceptance="rejection", **options)
    core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), 3)
    llm.generate([[5, 6, 7]] * len(params), params)
    assert 10 < llm.statistics().accepted_tokens == llm.statistics().draft_tokens
