"""Drafts drawn from known probabilities: tokens have the model's, and drafts are accepted as often as can be."""

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.device.rows import BatchRows
from kvern.engine.draft_room import Wanted
from kvern.engine.proposer import takes_drafts
from kvern.request import Request
from kvern.sample import sampler
from kvern.sample.random import uniform
from kvern.sample.rejection import Drawn, DrawnDrafts, accept
from kvern.step import ScheduledTokens, SchedulerOutput
from kvern.structured_output import StructuredOutput
from kvern.worker.drafter import ComputedStep, GuardedDrafter
from tests.draft_heads import write_eagle, write_medusa
from tests.speculation import AnyLength
from tests.test_head_drafting import OPTIONS, make_model_with_layer
from tests.test_medusa import FILE
from tests.test_sampler import make_rows
from tests.tiny_model import make_tiny_model

VOCABULARY, DRAWS = 9, 20_000
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


def p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square: how likely it is that numbers of tokens are so far from what is expected."""
    expected, found = probabilities.double() * len(tokens), tokens.bincount(minlength=len(probabilities))
    possible = expected > 0
    assert not found[~possible].any()
    distance = ((found[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2.0, distance / 2))


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize(("seed", "asked"), list(enumerate(FILTERS)), ids=str)
def test_tokens_have_the_models_probabilities(seed: int, asked: dict[str, Any]) -> None:
    logits, theirs = logits_of(seed), logits_of(seed + 50).softmax(-1)
    drafts = drawn_from(theirs)
    rows = rows_with(drafts, **asked)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    alone = sampler.sample(logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    chosen = alone.clone()
    drawn = DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
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
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    before = (chosen == drafts)[:-1]
    for behind in (chosen[1:][before], chosen[1:][~before], chosen[1:][drafts[:-1] == chosen[1:].mode().values]):
        assert p_value(behind, own) > 0.001


def test_the_same_seed_position_and_draft_give_the_same_token_in_any_step() -> None:
    logits, theirs = logits_of(4), logits_of(54).softmax(-1)
    rows = rows_with(drawn_from(theirs))
    together = torch.zeros(40, dtype=torch.int64)
    drawn = DrawnDrafts(range(40), theirs.expand(40, -1))
    accept(together, logits.expand(40, -1), rows, [0] * 40, POSITIONS[:40], drawn)
    for place in range(40):
        alone = torch.full((3,), -1)
        accept(alone, logits.expand(3, -1), rows, [0] * 3, POSITIONS[[0, 0, place]], DrawnDrafts([2], theirs))
        assert alone.tolist() == [-1, -1, together[place].item()], "other places are left as they are"


def test_greedy_tokens_are_the_most_probable_ones() -> None:
    logits, theirs = logits_of(5), logits_of(55).softmax(-1)
    rows = rows_with(drawn_from(theirs), temperature=0.0)
    chosen = torch.zeros(DRAWS, dtype=torch.int64)
    drawn = DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
    assert (chosen == logits.argmax()).all()


def test_a_drafter_that_is_the_model_is_always_right() -> None:
    logits = logits_of(6)
    own = logits.softmax(-1)
    rows = rows_with(drafts := drawn_from(own))
    chosen = torch.zeros(DRAWS, dtype=torch.int64)
    drawn = DrawnDrafts(range(DRAWS), own.expand(DRAWS, -1))
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
    assert torch.equal(chosen, drafts)


@pytest.mark.parametrize("draft", [0, 4])
def test_a_draft_that_nobody_drew_is_accepted_with_its_probability(draft: int) -> None:
    """By sampling alone, and as speculative sampling has it for a drafter that is sure."""
    logits = logits_of(7)
    drafts = torch.full((DRAWS,), draft)
    rows = rows_with(drafts)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    alone = sampler.sample(logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    chosen, sure = alone.clone(), torch.nn.functional.one_hot(drafts, VOCABULARY).float()
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, DrawnDrafts(range(DRAWS), sure))
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


HOT = 100.0
TOKENS = list(range(60, 60 + VOCABULARY))
"""Of the whole engine's, those that may come."""


class Drawing:
    """Draws drafts from probabilities that know nothing of the text, by the random numbers that tokens are drawn by."""

    reads_hidden, inputs = False, None
    graphs = None

    def __init__(self, rows: BatchRows, probabilities: torch.Tensor, drawn: Drawn | None) -> None:
        self._rows, self._probabilities, self.drawn = rows, probabilities, drawn

    def prepare(self, output: SchedulerOutput) -> None:
        pass

    def draft(self, step: ComputedStep) -> None:
        rows, asked = self._rows, [item for item in step.scheduled if item.sampled and item.guesses]
        if self.drawn is not None:
            self.drawn.clear()
        for ahead in range(max((item.guesses for item in asked), default=0)):
            slots = [item.slot for item in asked if item.guesses > ahead]
            positions = rows.num_computed_tokens[slots].long() + 1 + ahead
            theirs = self._probabilities.expand(len(slots), -1)
            numbers = uniform(rows.seeds[slots], positions, torch.arange(theirs.shape[1])[None])
            rows.tokens[slots, positions] = sampler.draw(theirs, numbers).int()
            if self.drawn is not None:
                self.drawn.keep(slots, theirs)


class OwnLengths(AnyLength):
    """Has as many guessed as the request says: which others are in a step depends on when their forms are ready."""

    def wanted(self, running: int) -> Wanted | None:
        return lambda request: self._length(request) if takes_drafts(request) else 0

    def _length(self, request: Request) -> int:
        return random.Random(f"{request.params.seed} {len(request.token_ids)}").randint(0, 3)


@contextmanager
def drafting(llm: LLM, probabilities: torch.Tensor, rejection: bool) -> Iterator[None]:
    core, runner = llm._engine.core, llm._engine.core.executor._worker.runner  # type: ignore[attr-defined]
    runner._drafter = GuardedDrafter(Drawing(runner._rows, probabilities, Drawn() if rejection else None))
    core.drafting = OwnLengths(None, llm._engine.inputs.vocab_size, 3)
    try:
        yield
    finally:
        core.drafting, runner._drafter = None, GuardedDrafter(None)


def check_draws(llm: LLM, requests: int, count: int) -> None:
    """Of an engine whose model says the same everywhere, nearly: at a high temperature biases alone count."""
    own, theirs = logits_of(1)[0], torch.zeros(llm._engine.inputs.vocab_size)
    theirs[TOKENS] = logits_of(51)[0].softmax(-1)
    hot: dict[str, Any] = {"temperature": HOT, "max_tokens": count, "ignore_eos": True, "allowed_token_ids": TOKENS}
    biases = {token: HOT * float(logit) for token, logit in zip(TOKENS, own, strict=True)}
    params = [SamplingParams(**hot, seed=100 + seed, logit_bias=biases) for seed in range(requests)]
    shares, found = {}, {}
    for rejection in (False, True, True):
        with drafting(llm, theirs, rejection):
            outputs = llm.generate([[5, 6, 7]] * requests, params)
            statistics = llm.statistics()
        tokens = torch.tensor([output.outputs[0].token_ids for output in outputs])
        shares[rejection] = statistics.accepted_tokens / statistics.draft_tokens
        assert p_value((tokens - TOKENS[0]).flatten(), own.softmax(-1)) > 0.001
        found[rejection] = tokens
    assert shares[True] > 1.1 * shares[False]


def test_an_engine_draws_with_the_models_probabilities(tiny_model: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "max_batch_requests": 32, "dtype": "float32", "threads": 1}
    with LLM(str(tiny_model), **options) as llm:
        check_draws(llm, 100, 50)


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
        theirs = torch.zeros(llm._engine.inputs.vocab_size).index_fill_(0, torch.arange(60, 200), 1 / 140)
        found = []
        for _ in range(2):
            with drafting(llm, theirs, True):
                found.append(llm.generate(prompts, greedy + drawn))
    texts = [[output.outputs[0].text for output in outputs] for outputs in (expected, *found)]
    assert texts[0][: len(greedy)] == texts[1][: len(greedy)] and texts[1] == texts[2]
    assert all(re.fullmatch("[ab]{3,9}c", text) for text in texts[1][1:-1])
    assert texts[1] != texts[0], "tokens depend on drafts"


@pytest.mark.parametrize("compiled", [True, False])
def test_a_draft_model_tells_what_it_draws_from(tiny_model: Path, compiled: bool) -> None:
    """The model guesses for itself: all of its drafts are right, filtered, greedy or not."""
    options: dict[str, Any] = {"max_model_len": 64, "dtype": "float32", "threads": 1, "cpu_kernels": compiled}
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(4)]
    params += [params[0].replace(top_p=0.7, min_p=0.01), params[0].replace(top_k=5), params[0].replace(temperature=0)]
    with LLM(str(tiny_model), draft_model=str(tiny_model), acceptance="rejection", **options) as llm:
        llm._engine.core.drafting = AnyLength(None, llm._engine.inputs.vocab_size, 4)
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
        file, tokens = head / FILE, {"token_map": torch.tensor(TOKENS)}
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
        llm._engine.core.drafting = AnyLength(None, llm._engine.inputs.vocab_size, 3)
        outputs = llm.generate([[5, 6, 7]] * len(params), params)
        statistics = llm.statistics()
    found = torch.tensor([output.outputs[0].token_ids for output in outputs])
    with LLM(target, **options) as plain:
        assert plain.generate([[5, 6, 7]], params[-1])[0].outputs[0].token_ids == found[-1].tolist()
    assert p_value((found[:-1] - tokens[0]).flatten(), own) > 0.001
    share, drafts = float(own.clamp(max=1 / len(tokens)).sum()), statistics.drafts_by_position[0]
    accepted = statistics.accepted_by_position[0] / drafts
    assert drafts > 500 and abs(accepted - share) < 4 * math.sqrt(share * (1 - share) / drafts)
