"""A proposer and a drafter that know the answers, for tests of what happens to drafts that are right or wrong."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.device.rows import BatchRows
from kvern.drafting.device.drafter import ComputedStep
from kvern.drafting.drafting import Drafting
from kvern.drafting.proposer import Proposer, takes_drafts
from kvern.drafting.room import Wanted
from kvern.request.request import Request, RequestOptions, sample_seed
from kvern.request.step import SchedulerOutput
from tests.support.internals import core_of, engine_of, rows_of, set_drafter, vocab_size_of


class Oracle:
    """Guesses at answers that were given before, in their order; each token is right with `accuracy`."""

    def __init__(self, answers: Sequence[Sequence[int]], first: int, accuracy: float, most: int) -> None:
        self._answers, self._first, self._accuracy, self._most = answers, first, accuracy, most
        self._dice = random.Random(7)
        self.guessed = 0

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: Request) -> list[int]:
        known = self._answers[request.queue.arrival - self._first][request.output_length :]
        drafts = [
            token if self._dice.random() < self._accuracy else self._dice.randrange(3, 90)
            for token in (*known, *self._dice.choices(range(3, 90), k=self._most))
        ]
        drafts = drafts[: self._dice.randint(0, self._most) + request.in_flight]
        self.guessed += len(drafts)
        return drafts


class Remembered:
    """Guesses that a text goes on as one of those known, and wrongly at every fifth token."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self._texts = texts

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [self._guess(request.token_ids, request.in_flight + 3) for request in requests]

    def _guess(self, known: list[int], count: int) -> list[int]:
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        places = range(len(known), min(len(known) + count, len(text)))
        return [text[place] if place % 5 else text[place - 1] for place in places]


class AnyLength(Drafting):
    """Takes whatever is guessed, also where it is wrong all the time; has the device guess up to `on_device` tokens."""

    def __init__(self, proposer: Proposer | None, vocab_size: int, on_device: int = 0) -> None:
        super().__init__(proposer, vocab_size, device="cpu" if proposer is None and on_device else None)
        self._most, self._dice = on_device, random.Random(3)

    def most(self, requests: Sequence[Request], running: int) -> list[int]:
        return [99] * len(requests)

    def wanted(self, running: int) -> Wanted | None:
        if self._proposer is not None or not self._most:
            return None
        return lambda request: self._dice.randint(0, self._most) if takes_drafts(request) else 0


class KnowingDrafter:
    """Writes drafts on the device: answers that were given before, by request; each token is right with `accuracy`."""

    reads_hidden, inputs = False, None
    caches = ()
    graphs = ()

    def __init__(self, rows: BatchRows, answers: Mapping[str, Sequence[Sequence[int]]], accuracy: float) -> None:
        self._rows, self._answers, self._accuracy = rows, answers, accuracy
        self._dice = random.Random(7)
        self.guessed = 0

    def prepare(self, output: SchedulerOutput) -> None:
        pass

    def draft(self, step: ComputedStep) -> None:
        rows = self._rows
        for item in step.scheduled:
            if not item.sampled or not item.guesses:
                continue
            request, newest = rows.request(item.slot), int(rows.num_computed_tokens[item.slot])
            several = self._answers[request.spec.request_id]
            seeds = [sample_seed(request.spec.seed, index) for index in range(len(several))]
            answer = several[seeds.index(request.seed)]
            known = answer[newest + 1 - request.spec.prompt_length :]
            drafts = [
                token if self._dice.random() < self._accuracy else self._dice.randrange(3, 90)
                for token in (*known, *self._dice.choices(range(3, 90), k=item.guesses))
            ]
            rows.tokens[item.slot, newest + 1 : newest + 1 + item.guesses] = torch.tensor(drafts[: item.guesses]).int()
            self.guessed += item.guesses


@contextmanager
def speculating(
    llm: LLM, outputs: Sequence[RequestOutput], accuracy: float = 0.8, most: int = 5, on_device: bool = False
) -> Iterator[Oracle | KnowingDrafter]:
    """Let an engine verify drafts of these answers, while it is asked the same again."""
    core = core_of(llm)
    answers: list[list[int]] = []
    for output in outputs:
        searched = output.outputs[0].cumulative_logprob is not None and output.outputs[0].logprobs is None
        answers += [[]] if searched else [answer.token_ids for answer in output.outputs]
    oracle: Oracle | KnowingDrafter
    vocabulary = vocab_size_of(llm)
    if on_device:
        first = int(llm._next_id().removeprefix("request-")) + 1
        by_name = {
            f"request-{first + place}": [answer.token_ids for answer in output.outputs]
            for place, output in enumerate(outputs)
        }
        oracle = KnowingDrafter(rows_of(llm), by_name, accuracy)
        set_drafter(llm, oracle)
        core.drafting = AnyLength(None, vocabulary, most)
    else:
        oracle = Oracle(answers, core.scheduler.waiting._arrivals, accuracy, most)
        core.drafting = AnyLength(oracle, vocabulary)
    try:
        yield oracle
    finally:
        core.drafting = None
        set_drafter(llm, None)


def accepted_of_prediction(llm: LLM, prompt: list[int], params: SamplingParams, told: list[int], wrong: int) -> int:
    """The accepted part of a prediction, which has one token more than the answer `told` before number `wrong`."""
    output = engine_of(llm).add(
        "predicted", prompt, params, RequestOptions(prediction=(*told[:wrong], 9, *told[wrong:]))
    )
    while engine_of(llm).has_work:
        engine_of(llm).step()
    assert output.outputs[0].token_ids == told
    return output.outputs[0].accepted_prediction_tokens
