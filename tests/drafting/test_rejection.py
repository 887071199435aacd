"""Drafts drawn from known probabilities: tokens have the model's, and drafts are accepted as often as can be."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.device.rows import BatchRows
from kvern.drafting.rejection import Drawn, DrawnDrafts
from kvern.request.sampling_params import StructuredOutput
from kvern.request.step import ScheduledTokens
from kvern.sample import sampler
from kvern.sample.random import uniform
from tests.support.draft_heads import write_eagle, write_medusa
from tests.support.drawn_drafts import DRAWS, HOT, TOKENS, VOCABULARY, check_draws, drawing, logits_of, p_value
from tests.support.head_drafting import MEDUSA_FILE, OPTIONS, make_model_with_layer
from tests.support.internals import core_of, vocab_size_of
from tests.support.sampler_inputs import make_rows
from tests.support.speculation import AnyLength
from tests.support.tiny_model import make_tiny_model

POSITIONS = torch.arange(1, DRAWS + 1)
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8, "min_p": 0.02},
    {"typical_p": 0.9, "temperature": 1.3},
    {"xtc_probability": 0.0, "top_n_sigma": 1.5},
]


def rows_with(drafts: torch.Tensor, **asked: Any) -> BatchRows:
    """A row with a draft at every position."""
    rows = make_rows((SamplingParams(**({"temperature": 1.0, "seed": 11} | asked)), [0] * (DRAWS + 1), 1))
    rows.tokens[0, 1 : DRAWS + 1] = drafts.int()
    return rows


def drawn_from(probabilities: torch.Tensor, seed: int = 11) -> torch.Tensor:
    """Drafts, by the numbers by which the model without drafts would draw its tokens."""
    numbers = uniform(torch.tensor([seed]), POSITIONS, torch.arange(VOCABULARY)[None])
    return sampler.draw(probabilities.expand(DRAWS, -1), numbers)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("seed", "asked"), list(enumerate(FILTERS)), ids=str)
def test_tokens_have_the_models_probabilities(seed: int, asked: dict[str, Any]) -> None:
    logits, theirs = logits_of(seed), logits_of(seed + 50).softmax(-1)
    drafts = drawn_from(theirs)
    rows = rows_with(drafts, **asked)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    alone = sampler.sample(logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    chosen = alone.clone()
    drawn = DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    drawn.accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    assert p_value(alone, own) > 0.001 and p_value(chosen, own) > 0.001
    assert p_value(drafts, theirs[0]) > 0.001
    assert p_value(torch.where(own[drafts] > 0, drafts, own.argmax()), own) < 1e-9, "drafts are no tokens"
    share = float(torch.minimum(own, theirs[0]).sum())
    accepted = float((chosen == drafts).double().mean())
    assert abs(accepted - share) < 4 * math.sqrt(share * (1 - share) / DRAWS), "more or fewer than can be accepted"
    assert accepted > float((alone == drafts).double().mean()), "by chance it would have been as many"


def test_tokens_do_not_know_of_each_other() -> None:
    """A token is as likely behind one that was accepted as behind one that was not."""
    logits, theirs = logits_of(3), logits_of(53).softmax(-1)
    rows = rows_with(drafts := drawn_from(theirs))
    chosen, drawn = torch.zeros(DRAWS, dtype=torch.int64), DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    drawn.accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    before = (chosen == drafts)[:-1]
    for behind in (chosen[1:][before], chosen[1:][~before], chosen[1:][drafts[:-1] == chosen[1:].mode().values]):
        assert p_value(behind, own) > 0.001


def test_the_same_seed_position_and_draft_give_the_same_token_in_any_step() -> None:
    logits, theirs = logits_of(4), logits_of(54).softmax(-1)
    rows = rows_with(drawn_from(theirs))
    together = torch.zeros(40, dtype=torch.int64)
    drawn = DrawnDrafts(range(40), theirs.expand(40, -1))
    drawn.accept(together, logits.expand(40, -1), rows, [0] * 40, POSITIONS[:40])
    for place in range(40):
        alone = torch.full((3,), -1)
        DrawnDrafts([2], theirs).accept(alone, logits.expand(3, -1), rows, [0] * 3, POSITIONS[[0, 0, place]])
        assert alone.tolist() == [-1, -1, together[place].item()], "other places are left as they are"


def test_greedy_tokens_are_the_most_probable_ones() -> None:
    logits, theirs = logits_of(5), logits_of(55).softmax(-1)
    rows = rows_with(drawn_from(theirs), temperature=0.0)
    chosen = torch.zeros(DRAWS, dtype=torch.int64)
    drawn = DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    drawn.accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    assert (chosen == logits.argmax()).all()


def test_a_drafter_that_is_the_model_is_always_right() -> None:
    logits = logits_of(6)
    own = logits.softmax(-1)
    rows = rows_with(drafts := drawn_from(own))
    chosen = torch.zeros(DRAWS, dtype=torch.int64)
    drawn = DrawnDrafts(range(DRAWS), own.expand(DRAWS, -1))
    drawn.accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    assert torch.equal(chosen, drafts)


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", [0, 4])
def test_a_draft_that_nobody_drew_is_accepted_with_its_probability(draft: int) -> None:
    """By sampling alone, and as speculative sampling has it for a drafter that is sure."""
    logits = logits_of(7)
    drafts = torch.full((DRAWS,), draft)
    rows = rows_with(drafts)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    alone = sampler.sample(logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    chosen, sure = alone.clone(), torch.nn.functional.one_hot(drafts, VOCABULARY).float()
    DrawnDrafts(range(DRAWS), sure).accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    rest = own.clone().index_fill_(0, torch.tensor([draft]), 0.0)
    for tokens in (alone, chosen):
        assert p_value(tokens, own) > 0.001
        assert p_value(tokens[tokens != draft], rest / rest.sum()) > 0.001


def test_probabilities_are_kept_until_their_drafts_are_verified() -> None:
    drawn, step = Drawn(), [ScheduledTokens(3, 9, 4, 1), ScheduledTokens(5, 7, 2, 2), ScheduledTokens(2, 7, 4, 4)]
    assert drawn.of(step) is None
    numbers = torch.arange(12.0).view(6, 2)
    drawn.keep([2, 5, 4], numbers[:3])
    drawn.keep([2, 4], numbers[3:5])
    found = drawn.of(step)
    assert found is not None
    assert dict(zip(found.places, found.probabilities.tolist(), strict=True)) == {1: [2, 3], 3: [0, 1], 4: [6, 7]}
    drawn.forget([2])  # others stand there now
    found = drawn.of(step)
    assert found is not None and list(found.places) == [1]
    drawn.clear()
    assert drawn.of(step) is None


@pytest.mark.nightly
@pytest.mark.parametrize("requests", [50, pytest.param(100, marks=pytest.mark.nightly)])
def test_an_engine_draws_with_the_models_probabilities(tiny_model: Path, requests: int) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "max_batch_requests": 32, "dtype": "float32", "threads": 1}
    with LLM(str(tiny_model), **options) as llm:
        check_draws(llm, requests, 50)


def test_what_else_requests_ask_for(tiny_model: Path) -> None:
    """Greedy answers are those without drafts, drawn ones the same each time, and forms are kept."""
    form = StructuredOutput(regex="[ab]{3,9}c")
    greedy = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    greedy += [SamplingParams(temperature=0, max_tokens=20, structured=form, logprobs=1)]
    drawn = [SamplingParams(seed=seed, max_tokens=20, structured=form, logprobs=1) for seed in range(12)]
    drawn += [SamplingParams(seed=3, max_tokens=20, top_p=0.9, presence_penalty=1.0, logprobs=1, ignore_eos=True)]
    prompts = [[5, 6, 7]] * (len(greedy) + len(drawn))
    with LLM(str(tiny_model), max_model_len=64, max_batch_requests=16, dtype="float32", threads=1) as llm:
        expected = llm.generate(prompts, greedy + drawn)
        theirs = torch.zeros(vocab_size_of(llm)).index_fill_(0, torch.arange(60, 200), 1 / 140)
        found = []
        for _ in range(2):
            with drawing(llm, theirs, True):
                found.append(llm.generate(prompts, greedy + drawn))
    texts = [[output.outputs[0].text for output in outputs] for outputs in (expected, *found)]
    assert texts[0][: len(greedy)] == texts[1][: len(greedy)] and texts[1] == texts[2]
    assert all(re.fullmatch("[ab]{3,9}c", text) for text in texts[1][1:-1])
    assert texts[1] != texts[0], "tokens depend on drafts"


@pytest.mark.sample(1)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_draft_model_tells_what_it_draws_from(tiny_model: Path, compiled: bool) -> None:
    """The model guesses for itself: all of its drafts are right, filtered, greedy or not."""
    options: dict[str, Any] = {"max_model_len": 64, "dtype": "float32", "threads": 1, "cpu_kernels": compiled}
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(4)]
    params += [params[0].replace(top_p=0.7, min_p=0.01), params[0].replace(top_k=5), params[0].replace(temperature=0)]
    with LLM(str(tiny_model), draft_model=str(tiny_model), acceptance="rejection", **options) as llm:
        core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), 4)
        before = llm.generate([[5, 6, 7]] * len(params), params)
        statistics = llm.statistics()
        assert 100 < statistics.accepted_tokens == statistics.draft_tokens
    with LLM(str(tiny_model), **options) as plain:
        expected = plain.generate([[5, 6, 7]] * len(params), params)
    assert before[-1].outputs[0].token_ids == expected[-1].outputs[0].token_ids


def make_head(kind: str, folder: Path) -> tuple[str, str, list[int]]:
    """A model, a head for it of random weights, and the tokens that the head knows of."""
    head, everything = folder / "head", list(range(288))
    if kind == "mtp":
        return str(make_model_with_layer("glm4_moe", folder / "target")), kind, everything
    target = make_tiny_model(folder / "target")
    if kind == "eagle":
        write_eagle(head, target)
        return str(target), str(head), everything
    if kind == "medusa":
        write_medusa(head, target, drafted=VOCABULARY)
        file, tokens = head / MEDUSA_FILE, {"token_map": torch.tensor(TOKENS)}
    else:
        write_eagle(head, target, drafted=VOCABULARY)
        file, tokens = head / "model.safetensors", {"d2t": torch.tensor(TOKENS) - torch.arange(VOCABULARY)}
        tokens["t2d"] = torch.zeros(288, dtype=torch.bool).index_fill_(0, torch.tensor(TOKENS), True)
    save_file(load_file(file) | tokens, file)
    return str(target), str(head), TOKENS


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        ("medusa", True),
        ("eagle3", True),
        pytest.param("eagle3", False, marks=pytest.mark.nightly),
        pytest.param("eagle", True, marks=pytest.mark.nightly),
        pytest.param("mtp", True, marks=pytest.mark.nightly),
    ],
)
def test_a_head_tells_what_it_draws_from(kind: str, compiled: bool, tmp_path: Path) -> None:
    """At a high temperature biases alone count, of which a head knows nothing: it guesses evenly."""
    target, head, tokens = make_head(kind, tmp_path)
    logits, count = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1)), 40
    own, biases = logits.softmax(-1), {token: HOT * float(logit) for token, logit in zip(tokens, logits, strict=True)}
    hot = SamplingParams(
        temperature=HOT, max_tokens=count, ignore_eos=True, allowed_token_ids=tokens, logit_bias=biases
    )
    params = [hot.replace(seed=seed) for seed in range(60)] + [hot.replace(temperature=0)]
    options = OPTIONS | {"max_batch_tokens": 256, "kv_cache_tokens": 4096, "cpu_kernels": compiled}
    with LLM(target, draft_model=head, acceptance="rejection", **options) as llm:
        core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), 3)
        outputs = llm.generate([[5, 6, 7]] * len(params), params)
        statistics = llm.statistics()
    found = torch.tensor([output.outputs[0].token_ids for output in outputs])
    with LLM(target, **options) as plain:
        assert plain.generate([[5, 6, 7]], params[-1])[0].outputs[0].token_ids == found[-1].tolist()
    assert p_value((found[:-1] - tokens[0]).flatten(), own) > 0.001
    share, drafts = float(own.clamp(max=1 / len(tokens)).sum()), statistics.drafts_by_position[0]
    accepted = statistics.accepted_by_position[0] / drafts
    assert drafts > 500 and abs(accepted - share) < 4 * math.sqrt(share * (1 - share) / drafts)
