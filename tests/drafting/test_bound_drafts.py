"""Drafts of answers in which the host has a say at every token: grammars and logits processors go along and back."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.models.hub import resolve_model
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import StructuredOutput
from kvern.request.step import NewRequest
from kvern.structured import masks
from kvern.structured.grammar import Grammars
from kvern.structured.masks import GrammarRows
from tests.support.idle import is_idle
from tests.support.internals import set_depth
from tests.support.processors import install
from tests.support.speculation import speculating

PROMPT = [5, 9, 17, 33, 2, 81]
LIST = StructuredOutput(json={"type": "array", "items": {"enum": [1, 22, "fox"]}, "maxItems": 3})
ENDLESS = StructuredOutput(json={"type": "object", "properties": {"name": {"type": "string"}, "x": {"type": "number"}}})
LETTERS = StructuredOutput(regex="[ab]{3,9}c")
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40}
BOUND = [
    SamplingParams(temperature=0, max_tokens=40, structured=LIST),
    SamplingParams(**DRAWN, structured=LIST, n=3),
    SamplingParams(**DRAWN, structured=ENDLESS, logprobs=2),
    SamplingParams(temperature=0, max_tokens=30, structured=ENDLESS),
    SamplingParams(temperature=1.5, seed=3, max_tokens=30, structured=ENDLESS, presence_penalty=1.0, top_p=0.95),
    SamplingParams(**DRAWN, structured=LETTERS, top_k=20, typical_p=0.9),
    SamplingParams(**DRAWN, structured=LETTERS, dry_multiplier=2.0, dry_allowed_length=1, xtc_probability=0.5),
    SamplingParams(temperature=0, structured=LETTERS, max_tokens=4),
    SamplingParams(**DRAWN, structured=StructuredOutput(choice=["fox", "foxes", "a"])),
    SamplingParams(**DRAWN, structured=LETTERS, stop=["ba"], allowed_token_ids=list(range(3, 200))),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=2, logprobs=1, ignore_eos=True),
    SamplingParams(beam_width=2, max_tokens=8, structured=LIST),
]


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason)
        for output in outputs
        for answer in output.outputs
    ]


def logprobs(outputs: Sequence[RequestOutput]) -> list[float]:
    tables = [table for output in outputs for table in output.prompt_logprobs or [] if table]
    tables += [table for output in outputs for answer in output.outputs for table in answer.logprobs or []]
    return [entry.logprob for table in tables for entry in table.values()]


OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_batch_requests": 20, "dtype": "float32", "threads": 1}


@pytest.fixture(scope="module", params=["kernels", "PyTorch", "overlapping"])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    options = dict(OPTIONS)
    options["cpu_kernels"] = request.param != "PyTorch"
    with LLM(str(tiny_model), **options) as llm:
        set_depth(llm, 2 if request.param == "overlapping" else 1)
        yield llm
        assert is_idle(llm)


@pytest.fixture(autouse=True)
def never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(masks, "STEADY_SECONDS", 1.0)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("accuracy", "on_device"), [(0.0, False), (0.8, False), (0.8, True), (1.0, False)])
def test_answers_have_their_form_and_the_tokens_that_they_have_without(
    llm: LLM, accuracy: float, on_device: bool
) -> None:
    """With drafts that the grammar forbids, that it allows, and that are right; to the last token that may be."""
    expected = llm.generate([PROMPT] * len(BOUND), BOUND)
    with speculating(llm, expected, accuracy, on_device=on_device) as oracle:
        found = llm.generate([PROMPT] * len(BOUND), BOUND)
        assert llm.statistics().accepted_tokens >= 80 * accuracy
    assert oracle.guessed > 100
    assert answers(found) == answers(expected)
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-4)
    assert {output.outputs[0].finish_reason for output in found} == {"stop", "length"}


def test_a_slow_grammar_takes_no_drafts(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what may not come to be, and an answer pays for its own tokens alone."""
    params = [SamplingParams(temperature=0, max_tokens=30, top_p=0.9, seed=1, structured=ENDLESS)] * 2
    params += [SamplingParams(temperature=1.0, max_tokens=30, top_p=0.9, seed=1, structured=LIST)]
    expected = tiny_llm.generate([PROMPT] * 3, params)
    monkeypatch.setattr(masks, "STEADY_SECONDS", -1e-3)
    monkeypatch.setattr(masks, "FOLLOWING_SECONDS", 1e9)
    with speculating(tiny_llm, expected, 1.0):
        assert answers(tiny_llm.generate([PROMPT] * 3, params)) == answers(expected)


def test_rows_come_back_from_their_drafts() -> None:
    """The masks behind drafts are those that come when the drafts have, and what follows is as if none had been."""
    grammars, rng = Grammars(resolve_model("kvern-1m"), 4096), random.Random(3)
    eos = grammars.library.eos_token_ids[0]
    rows = GrammarRows(grammars.library, 4096, torch.device("cpu"))
    forms = [LIST, ENDLESS, LETTERS, StructuredOutput(json=True)]
    specs = [
        RequestSpec(str(slot), PromptInput([7]), SamplingParams().resolved(), 40, grammar=grammars.compile(form))
        for slot, form in enumerate(forms)
    ]
    rows.join([NewRequest(slot, spec, spec.params, 0, [7], []) for slot, spec in enumerate(specs)])

    def allowed(slots: Sequence[int], drafts: Sequence[int]) -> list[set[int]]:
        logits = torch.zeros(len(slots), 4096)
        broken, unknown = rows.restrict(logits, slots, None, lambda: drafts)
        assert not broken and not unknown
        return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]

    for _ in range(12):
        slots = [slot for slot in range(4) for _ in range(4)]
        drafts = [0] * 16
        ahead = allowed(slots, drafts)
        for place in range(3):  # each draft is one of those that the guesses before leave
            for slot in range(4):
                row = 4 * slot + place
                drafts[row] = rng.choice(sorted(ahead[row] - {eos})) if ahead[row] - {eos} else eos
            ahead = allowed(slots, drafts)
        for place in range(2):
            assert allowed(range(4), []) == [ahead[4 * slot + place] for slot in range(4)]
            taken = [drafts[4 * slot + place] for slot in range(4)]
            assert rows.accept(range(4), taken) == []


FOLLOWING: list[dict[str, Any] | None] = [
    {"follow": {"by": 1}},
    None,
    {"follow": {"by": 7}, "shift": {}},
    {"break": {"how": "nan", "after": 2}},
    {"break": {"how": "apply", "after": 5}},
    {"break": {"how": "join"}},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("accuracy", "on_device"), [(0.3, False), (0.8, True), (1.0, False)])
def test_logits_processors_see_the_drafts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracy: float, on_device: bool
) -> None:
    """What they make of drafts that are wrong does not count, nor whether they fail there."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "site")))
    params = [SamplingParams(seed=3, max_tokens=20, logprobs=1, logits_processors=each) for each in FOLLOWING]
    params.append(params[0].replace(structured=LETTERS))
    names = ("follow", "shift", "break")
    with LLM(str(tiny_model), logits_processors=names, **OPTIONS) as llm:
        expected = llm.generate([PROMPT] * len(params), params, on_error="return")
        with speculating(llm, expected, accuracy, on_device=on_device):
            found = llm.generate([PROMPT] * len(params), params, on_error="return")
            assert llm.statistics().accepted_tokens > 10
    assert answers(found) == answers(expected)
    assert [output.failure for output in found] == [output.failure for output in expected]
    assert [bool(output.failure) for output in found] == [False, False, False, True, True, True, False]
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-4)
