"""Engines whose drafts come from a server, with waits for its answers."""

import copy
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.drafting.remote import RemoteProposer
from kvern.engine.core import EngineCore
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from tests.support.internals import core_of, proposer_of, vocab_size_of
from tests.support.speculation import AnyLength


def request(tokens: Sequence[int], **options: Any) -> Request:
    params = ResolvedParams(**{"temperature": 0.0, **options.pop("params", {})})
    return Request(RequestSpec("r", PromptInput(list(tokens)), params, 99, **options))


def settle(proposer: RemoteProposer) -> None:
    """Waits until the server has answered, well or not."""
    assert proposer._asked is not None
    assert wait([proposer._asked.answer], 240).done


def answered(proposer: RemoteProposer, one: Request, count: int = 3) -> list[int]:
    """The drafts after the answer to the current question has come."""
    proposer.propose([one], [count])
    settle(proposer)
    return proposer.propose([one], [count])[0]


PROMPTS = [[5, 9, 17, 33], [5, 9, 17, 33, 2], [100] * 6]
SMALL: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64, "kv_cache_tokens": 512}


def wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every answer arrive between its step and the next."""
    take_answer = RemoteProposer._take_answer

    def wait_and_take(proposer: RemoteProposer) -> None:
        if proposer._asked is not None:
            settle(proposer)
        take_answer(proposer)

    monkeypatch.setattr(RemoteProposer, "_take_answer", wait_and_take)


def compare(plain: LLM, guessing: LLM, temperature: int) -> tuple[int, int]:
    """Checks that answers are equal with and without drafts; returns the numbers of drafts and of accepted ones."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=50, ignore_eos=True, n=1 + temperature)
    before = copy.copy(guessing.statistics())
    answers = [
        [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, params)]
        for llm in (plain, guessing)
    ]
    assert answers[0] == answers[1]
    core, after = core_of(guessing), guessing.statistics()
    assert isinstance(core, EngineCore)
    core.scheduler.check_integrity()
    return after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens


def ask_always(llm: LLM) -> None:
    """Asks the proposer at every step, however long it takes."""
    core_of(llm).drafting = AnyLength(proposer_of(llm), vocab_size_of(llm))
