"""A proposer that knows the answers, for tests of what happens to drafts that are right or wrong."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvern import LLM, RequestOutput
from kvern.engine.drafting import Drafting
from kvern.request import Request


class Oracle:
    """Guesses at answers that were given before, in their order; each token is right with `accuracy`."""

    def __init__(self, answers: Sequence[Sequence[int]], first: int, accuracy: float, most: int) -> None:
        self._answers, self._first, self._accuracy, self._most = answers, first, accuracy, most
        self._dice = random.Random(7)
        self.guessed = 0

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: Request) -> list[int]:
        known = self._answers[request.arrival - self._first][request.output_length :]
        drafts = [
            token if self._dice.random() < self._accuracy else self._dice.randrange(3, 90)
            for token in (*known, *self._dice.choices(range(3, 90), k=self._most))
        ]
        drafts = drafts[: self._dice.randint(0, self._most) + request.in_flight]
        self.guessed += len(drafts)
        return drafts


class AnyLength(Drafting):
    """Takes whatever is guessed, also where it is wrong all the time."""

    def most(self, requests: Sequence[Request], running: int) -> list[int]:
        return [99] * len(requests)


@contextmanager
def speculating(llm: LLM, outputs: Sequence[RequestOutput], accuracy: float = 0.8, most: int = 5) -> Iterator[Oracle]:
    """Let an engine verify drafts of these answers, while it is asked the same again."""
    core = llm._engine.core
    answers: list[list[int]] = []
    for output in outputs:
        searched = output.outputs[0].cumulative_logprob is not None and output.outputs[0].logprobs is None
        answers += [[]] if searched else [answer.token_ids for answer in output.outputs]
    oracle = Oracle(answers, core.scheduler._arrivals, accuracy, most)
    core.drafting = AnyLength(oracle, llm._engine.inputs.vocab_size)
    try:
        yield oracle
    finally:
        core.drafting = None
