"""Answers whose drafts are verified have the tokens that they have without drafts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.device.input_batch import sampled_tokens
from kvern.device.rows import BatchRows
from kvern.drafting.drafting import Drafting
from kvern.drafting.proposer import PROPOSERS
from kvern.drafting.verification import verify
from kvern.errors import ConfigError
from kvern.request.request import Request
from kvern.request.step import ScheduledTokens
from kvern.spec.model import ModelSpec
from tests.support.drafting_requests import EVERYTHING, LENGTH, PROMPTS
from tests.support.internals import check_integrity, core_of, engine_of, set_depth, vocab_size_of
from tests.support.outputs import answer_logprobs, tokens_and_texts
from tests.support.peft_adapters import make_adapter
from tests.support.sampling import examples
from tests.support.speculation import AnyLength, speculating


@given(st.data())
@settings(max_examples=examples(60))
def test_as_many_are_kept_as_agree_and_one(data: st.DataObject) -> None:
    """For parts of prompts, decodes and decodes with drafts in any order."""
    token = st.integers(0, 1)
    items, drafts, sampled, expected = [], [], [], []
    rows = BatchRows(6, 40, 1, torch.device("cpu"))
    for slot in data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]:
        run, start = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 9))
        item = ScheduledTokens(slot, start, max(run, 1) + data.draw(st.integers(0, 3)) * (run < 2), run)
        guessed = data.draw(st.lists(token, min_size=max(run - 1, 0), max_size=max(run - 1, 0)))
        found = data.draw(st.lists(token, min_size=run, max_size=run))
        agree = [one == other for one, other in zip(guessed, found, strict=False)]
        items.append(item)
        drafts.append((slot, start + 1, guessed))
        sampled += found
        expected.append(min(run, 1 + (agree.index(False) if False in agree else len(agree))))
    rows.draft(drafts)
    found_at, starts = sampled_tokens(items), torch.tensor([item.start for item in items], dtype=torch.int32)
    slots, positions = torch.tensor(found_at.slots, dtype=torch.int64), torch.tensor(found_at.positions)
    kept = verify(rows, items, starts, slots, positions, torch.tensor(sampled))
    assert expected == ([item.sampled for item in items] if kept is None else kept.tolist())
    computed = [item.start + item.count - item.sampled + count for item, count in zip(items, expected, strict=True)]
    assert rows.num_computed_tokens[[item.slot for item in items]].tolist() == computed


@pytest.fixture(scope="module", params=[1, 2, 3])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 64, "max_batch_requests": 8, "kv_cache_tokens": 512, "block_size": 4}
    with LLM(str(tiny_model), dtype="float32", threads=1, **options) as llm:
        set_depth(llm, request.param)
        yield llm


@pytest.mark.sample(5)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_every_parameter(llm: LLM, accuracy: float, on_device: bool) -> None:
    prompts = [PROMPTS[index % 3] for index in range(len(EVERYTHING))]
    expected = llm.generate(prompts, EVERYTHING)
    before = engine_of(llm).statistics().steps
    with speculating(llm, expected, accuracy, on_device=on_device) as oracle:
        found = llm.generate(prompts, EVERYTHING)
    assert oracle.guessed > 100
    assert tokens_and_texts(found) == tokens_and_texts(expected)
    assert list(answer_logprobs(found)) == pytest.approx(list(answer_logprobs(expected)), abs=1e-4)
    check_integrity(llm)
    assert engine_of(llm).statistics().steps > before


@pytest.mark.parametrize("on_device", [False, True])
def test_right_drafts_save_steps(llm: LLM, on_device: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    steps = [engine_of(llm).statistics().steps]
    expected = llm.generate(PROMPTS, params)
    steps.append(engine_of(llm).statistics().steps)
    with speculating(llm, expected, 1.0, on_device=on_device):
        assert tokens_and_texts(llm.generate(PROMPTS, params)) == tokens_and_texts(expected)
    steps.append(engine_of(llm).statistics().steps)
    assert steps[2] - steps[1] < 0.8 * (steps[1] - steps[0])


def test_stop_strings_within_a_run(llm: LLM) -> None:
    """What follows a stop string is dropped, though it was verified in the same step."""
    free = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    stops = [output.outputs[0].text[9:11] for output in free]
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[stop]) for stop in stops]
    expected = llm.generate(PROMPTS, params)
    with speculating(llm, free, 1.0):
        assert tokens_and_texts(llm.generate(PROMPTS, params)) == tokens_and_texts(expected)


def test_answers_stay_cached(llm: LLM) -> None:
    """What the prefix tree holds afterwards is what was verified."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = llm.generate(PROMPTS, params)
    with speculating(llm, expected, 0.5):
        llm.generate(PROMPTS, params)
    longer = [output.prompt_token_ids + output.outputs[0].token_ids for output in expected]
    again = llm.generate(longer, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0))
    with LLM(engine_of(llm).config.model, dtype="float32", max_model_len=64, kv_cache_tokens=512, threads=1) as fresh:
        alone = fresh.generate(longer, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0))
    assert tokens_and_texts(again) == tokens_and_texts(alone)
    assert list(answer_logprobs(again)) == pytest.approx(list(answer_logprobs(alone)), abs=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_in_the_batch(tiny_model: Path, tmp_path: Path) -> None:
    path = make_adapter(tiny_model, tmp_path / "one", 1, r=3)
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=20, ignore_eos=True)
    names = ["one", None, "one"]
    with LLM(str(tiny_model), dtype="float32", threads=1, max_adapters=1, adapters={"one": str(path)}) as llm:
        expected = llm.generate(PROMPTS, params, adapter=names)
        with speculating(llm, expected):
            assert tokens_and_texts(llm.generate(PROMPTS, params, adapter=names)) == tokens_and_texts(expected)


class Parrot:
    """Guesses that the last token comes again and again."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [[request.token_ids[-1]] * 3 for request in requests]


@PROPOSERS.register("parrot")
def parrot(config: EngineConfig, spec: ModelSpec) -> Parrot:
    return Parrot()


def test_an_engine_takes_its_proposer_by_name(tiny_model: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64, "kv_cache_tokens": 256}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [40, 41, 42, 43]]
    with LLM(tiny_model, **options) as plain, LLM(tiny_model, proposer="parrot", **options) as guessing:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in guessing.generate(prompts, params)] == expected
        assert guessing.statistics().computed_tokens > plain.statistics().computed_tokens, "no draft was verified"


class Broken:
    """Goes on with whatever it is told to, behind some steps with good guesses."""

    def __init__(self, guess: Callable[[], Any]) -> None:
        self._guess, self.asked = guess, 0

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Any:
        self.asked += 1
        return [[request.token_ids[-1]] for request in requests] if self.asked < 4 else self._guess()


@pytest.mark.parametrize(
    ("guess", "said"),
    [
        (lambda: {}["nothing"], "KeyError: 'nothing'"),
        (lambda: None, "TypeError"),
        (lambda: [[5]] * 7, "ValueError: zip"),
        (lambda: [[5], None], "TypeError"),
        (lambda: [[5], [1 << 40]], "ValueError: it guesses 1099511627776: a token id is an integer from 0 to"),
        (lambda: [[5], [6, -1]], "ValueError: it guesses -1"),
        (lambda: [[5], [6.0]], "ValueError: it guesses 6.0"),
        (lambda: ["ab", [5]], "ValueError: it guesses 'a'"),
    ],
)
def test_a_broken_proposer_costs_its_drafts_alone(
    guess: Callable[[], Any], said: str, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    core, params = core_of(llm), SamplingParams(temperature=0, **LENGTH)
    expected, broken = tokens_and_texts(llm.generate(PROMPTS[:2], params)), Broken(guess)
    core.drafting = AnyLength(broken, vocab_size_of(llm))
    try:
        assert tokens_and_texts(llm.generate(PROMPTS[:2], params)) == expected
        assert tokens_and_texts(llm.generate(PROMPTS[:2], params)) == expected
    finally:
        core.drafting = None
    assert broken.asked == 4
    assert [record.getMessage() for record in caplog.records] == [
        "the proposer fails and is not asked again; answers go on without drafts"
    ]
    assert said in caplog.text
    core.scheduler.check_integrity()


def test_too_many_drafts_are_cut(llm: LLM) -> None:
    core, params = core_of(llm), SamplingParams(temperature=0, **LENGTH)
    expected = tokens_and_texts(llm.generate(PROMPTS[:2], params))
    core.drafting = Drafting(Broken(lambda: [[7] * 10_000] * 2), vocab_size_of(llm))
    try:
        assert tokens_and_texts(llm.generate(PROMPTS[:2], params)) == expected
    finally:
        core.drafting = None


def test_who_is_not_installed_is_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .* 'nobody': installed are .*; a package provides them"):
        LLM(tiny_model, proposer="nobody")
