"""Batches of requests with combined features on one engine, and the checks of what each feature promises."""

import itertools
from collections.abc import Sequence

from kvern import LLM
from kvern.request.request import Request
from tests.support.combined_answers import check_same
from tests.support.combined_features import FEATURES, Alone, Ask, Result, Run, at_once, streamed
from tests.support.combined_requests import asks_with, plain_asks, too_little_room
from tests.support.idle import is_idle
from tests.support.internals import core_of, vocab_size_of
from tests.support.speculation import AnyLength, Remembered

EVERYWHERE = frozenset(["prefix cache", "preemption", "streaming", "speculation"])
"""Features that an engine has for all of its requests."""


def run_batch(asks: Sequence[Ask], of_engine: frozenset[str], alone: Alone) -> tuple[list[Result], Run]:
    """One engine with these features answers all of them in one batch; with a prefix cache for the second time, and,
    where nobody's prompt stays cached for as long as a batch takes, the last request without company twice more."""
    options = dict(alone.options)
    for name in of_engine:
        options |= FEATURES[name].options()
    if "preemption" in of_engine:
        options["kv_cache_tokens"] = options["max_model_len"] = too_little_room(asks, alone)
        options["windowed_kv_cache"] = "off"  # else there is room for all
    rounds = [asks] * (2 if "prefix cache" in of_engine else 1)
    if {"prefix cache", "preemption"} <= of_engine:
        rounds += 2 * [[next(ask for ask in reversed(asks) if ask.features and ask.params.sequences == 1)]]
    answer = streamed if "streaming" in of_engine else at_once
    llm = LLM(**options)
    preempted = watch_preemptions(llm)
    if "speculation" in of_engine:
        found = [alone(ask).output for ask in asks]
        texts = [[*output.prompt_token_ids, *answer.token_ids] for output in found for answer in output.outputs]
        core_of(llm).drafting = AnyLength(Remembered(texts), vocab_size_of(llm))
    each: list[list[Result]] = []
    counts = [0]

    def count(results: list[Result]) -> None:
        each.append(results)
        counts.append(llm.statistics().cached_tokens)

    with llm:
        for asked in rounds:
            count(answer(llm, asked))
        assert is_idle(llm)
        seen = llm.statistics()
        assert bool(preempted) == bool(seen.preemptions)
    batches = [results for results in each if len(results) == len(asks)]
    for result, before in zip(batches[-1], batches[0], strict=True):
        result.cached_before = before.output.cached_tokens
    drafts = seen.draft_tokens, seen.accepted_tokens
    run = Run(preempted, [after - before for before, after in itertools.pairwise(counts)][:2], alone, drafts)
    if len(each) > len(batches):
        run.repeated = each[-1][0].output
    return batches[-1], run


def watch_preemptions(llm: LLM) -> set[str]:
    """The ids of the outputs whose requests will be preempted."""
    scheduler = core_of(llm).scheduler
    preempt, seen = scheduler._preempt, set[str]()

    def watched(request: Request) -> None:
        seen.update(answer.partition("#")[0] for answer in request.answer_ids)
        preempt(request)

    scheduler._preempt = watched  # type: ignore[method-assign]
    return seen


def check_combinations(combinations: Sequence[frozenset[str]], alone: Alone, times: int = 2) -> None:
    """Requests of each combination in one batch with plain ones, by an engine with all that any of them needs."""
    asks = plain_asks()  # before the others, which are then the first to lose their blocks
    asks += [ask for features in combinations for ask in asks_with(features, times)]
    of_engine = EVERYWHERE & frozenset().union(*combinations)
    results, run = run_batch(asks, of_engine, alone)
    for result in results:
        for answer, expected in zip(result.answers, alone(result.ask).answers, strict=True):
            check_same(answer, expected)
    for features in combinations:
        mine = [result for result in results if result.ask.features == features]
        assert mine
        for name in features:
            FEATURES[name].check(mine, run)
