"""An engine's steps and drafts by the clock alone: what they take is said, and how often drafts are right is drawn."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvern.drafting.drafting import Drafting
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput

Acceptance = Callable[[int, int], float]
"""The probability that a draft is right, by request and token."""


def begun(spec: RequestSpec, answer: Sequence[int]) -> Request:
    """A request with so much of its answer."""
    request = Request(spec)
    request.token_ids += answer
    return request


class InFlight(NamedTuple):
    """A step of these requests that was submitted: what guessing takes in it, and when it ends, in seconds."""

    output: SchedulerOutput
    requests: Sequence[Request]
    passes: float
    ends: float


class SimulatedSteps:
    """Steps of `running` requests, whose answers have `length` tokens.

    `seconds` says what a step takes: of so many rows, some of which verify drafts. A proposer takes `asked` seconds for
    each request, and guesses something in a `share` of cases; `one_pass`: the device guesses instead, a draft a pass.
    `stalls`: how long it is held up, in seconds, the first times that it guesses. `depth`: so many steps are submitted
    before the first of them is collected, and an answer that ends meanwhile has tokens too many.
    """

    def __init__(
        self,
        running: int,
        seconds: Callable[[int, bool], float],
        acceptance: Acceptance,
        *,
        length: int = 200,
        asked: float = 0.0,
        share: float = 1.0,
        one_pass: float | None = None,
        prompt: int = 20,
        first: float = 0.0,
        device: str = "cpu",
        stalls: Sequence[float] = (),
        depth: int = 1,
    ) -> None:
        self._seconds, self._acceptance, self._dice = seconds, acceptance, random.Random(1)
        self._asked, self._share, self._pass, self._first = asked, share, one_pass, first
        self._length, self._prompt, self._number = length, prompt, 0
        self._stalls = deque(stalls)
        self._depth, self._in_flight = depth, deque[InFlight]()
        self._free = 0.0
        """When the device has computed what was submitted."""
        self._is_gpu, self._behind = device == "cuda", 0.0
        self.now, self.tokens, self.drafts = 0.0, 0, 0
        self.without = 0.0
        """The time of the same tokens without drafts."""
        on_device = one_pass is not None
        self.drafting = Drafting(
            None if on_device else self, 100, lambda: self.now, device=device if on_device else None
        )
        self.requests = [self._new() for _ in range(running)]
        self._guesses: dict[Request, int] = {}
        self._seen: set[int] = set()

    def _new(self) -> Request:
        self._number += 1
        spec = RequestSpec(str(self._number), PromptInput([1] * self._prompt), ResolvedParams(), self._length)
        return begun(spec, [4])

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """See `Proposer`."""
        self.now += self._asked * sum(count > 0 for count in most)
        return [[7] * count if self._dice.random() < self._share else [] for count in most]

    def run(self, steps: int) -> None:
        """So many steps; requests that end are followed by others."""
        for _ in range(steps):
            while len(self._in_flight) < self._depth:
                self._submit()
            self._collect(self._in_flight.popleft())

    def _submit(self) -> None:
        drafting, requests = self.drafting, self.requests
        wanted = drafting.wanted(len(requests))
        output = SchedulerOutput(1)
        for slot, request in enumerate(requests):
            room = max(0, self._length - request.output_length - request.in_flight - 1)
            drafts = 0 if request.drafts.in_flight else len(request.drafts.token_ids[request.in_flight :])
            count = min(room, self._guesses.get(request, 0) if self._pass is not None else drafts)
            guesses = 0 if wanted is None else min(room, wanted(request))
            self._guesses[request] = guesses
            output.scheduled.append(ScheduledTokens(slot, 9, 1 + count, 1 + count, guesses=guesses))
            if count and self._pass is None:
                output.drafts.append((slot, 0, [7] * count))
        drafting.began(output, requests)
        rows, most = output.token_count, max(item.guesses for item in output.scheduled)
        passes = most * (self._pass or 0.0)
        for request, item in zip(requests, output.scheduled, strict=True):
            if item.guesses:
                known = len(request.token_ids) + request.in_flight
                passes += max(0, known - request.drafts.read_tokens - 1 - item.count) * 0.02 * (self._pass or 0.0)
                request.drafts.read_tokens = known + 1
            request.in_flight += item.count
            request.drafts.in_flight += item.count - 1
        passes += self._stalls.popleft() if most and self._stalls else 0.0
        if self._is_gpu:  # it guesses behind a step, in the time of the next
            passes, self._behind = self._behind, passes
        seconds = self._seconds(rows, rows > len(requests)) + passes + (0 if rows in self._seen else self._first)
        self._seen.add(rows)
        self._free = max(self.now, self._free) + seconds
        self._in_flight.append(InFlight(output, requests, passes, self._free))

    def _collect(self, step: InFlight) -> None:
        output, requests, passes, ends = step
        self.now = max(self.now, ends)
        kept = []
        for request, item in zip(requests, output.scheduled, strict=True):
            right = 0
            while right < item.count - 1 and self._dice.random() < self._acceptance(
                int(request.request_id.split("#")[0]), self.tokens
            ):
                right += 1
            kept.append([4] * (right + 1))
        result = ModelRunnerOutput(kept, [], [], drafting_seconds=passes)
        self.drafting.ended(output, requests, result)
        self.without += self._seconds(len(requests), False) * sum(map(len, kept)) / len(requests)
        self.tokens += sum(map(len, kept))
        self.drafts += output.token_count - len(requests)
        for request, item, tokens in zip(requests, output.scheduled, kept, strict=True):
            request.token_ids += tokens
            request.in_flight -= item.count
            request.drafts.in_flight -= item.count - 1
        self.drafting.propose(requests, len(requests))
        self.requests = [self._new() if item.output_length >= self._length else item for item in self.requests]
