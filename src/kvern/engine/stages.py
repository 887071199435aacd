"""The requests of each step if the model has several pipeline stages, each of which computes one step at a time.

The first stage learns a token when the last has sampled it and the host knows it. So a request is in one step at a
time, and steps have equal shares of all decoding requests: as many steps are in flight as there are stages. Stages
whose layers keep states learn the accepted drafts in the same way.
"""

from collections.abc import Iterable, Sequence

from kvern.request.request import Request
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput


def in_turn(running: Iterable[Request], stages: int, begin: int) -> list[Request]:
    """Returns the requests that the next step may compute; `begin` steps, this one included, may begin before one
    returns."""
    if stages == 1:
        return list(running)
    running = list(running)
    decoding = [request for request in running if request.remaining_tokens == 1]
    ready = [request for request in decoding if not request.in_flight]
    count = min(-(-len(ready) // begin), -(-len(decoding) // stages))
    passed = {*decoding}.difference(ready[:count])
    return [request for request in running if request not in passed]


def decodes(output: SchedulerOutput, running: Iterable[Request], stages: int) -> bool:
    """True if a request decodes in this step, or in one in flight that continues after it."""
    return bool(output.scheduled) or (stages > 1 and any(request.remaining_tokens == 1 for request in running))


class ToldStages:
    """Adds to steps what the last stage has sampled and accepted, for the stages before it; with one stage nothing."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._kept: list[list[int]] = []
        """The numbers of accepted tokens that no step has passed on yet."""

    def tell(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Adds the message to a step of these requests that is about to begin."""
        if self._stages > 1:
            output.known = known_tokens(output.scheduled, requests)
            output.kept, self._kept = self._kept, []

    def ended(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Takes the result of the oldest step in flight, also for requests that have ended."""
        if self._stages > 1 and any(item.sampled > 1 for item in output.scheduled):
            pairs = zip(output.scheduled, result.token_ids, strict=True)
            self._kept.append([len(token_ids) for item, token_ids in pairs if item.sampled > 1])


def known_tokens(scheduled: Sequence[ScheduledTokens], requests: Sequence[Request]) -> list[tuple[int, int, list[int]]]:
    """Returns the answers' tokens and drafts that a step computes: `SchedulerOutput.known`."""
    return [
        (
            item.slot,
            item.start,
            [
                *request.token_ids[item.start : item.start + item.count],
                *(request.drafts.guessed_token_ids[: item.sampled - 1] if item.sampled else ()),
            ],
        )
        for item, request in zip(scheduled, requests, strict=True)
        if item.start >= request.prompt_length
    ]
