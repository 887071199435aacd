"""Which requests share a step where the model has several stages, each of which computes a step at a time.

The first stage learns of a token when the last has sampled it and the host knows it. So a request is in one step at a
time, and steps take even shares of all that decode: as many are on their way as there are stages. In the same way
stages whose layers keep states learn which drafts these are to see.
"""

from collections.abc import Iterable, Sequence

from kvern.request.request import Request
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput


def in_turn(running: Iterable[Request], stages: int, begin: int) -> list[Request]:
    """Those that the next step may compute, where `begin` steps, that one among them, may begin before one returns."""
    if stages == 1:
        return list(running)
    running = list(running)
    decoding = [request for request in running if request.remaining_tokens == 1]
    ready = [request for request in decoding if not request.in_flight]
    count = min(-(-len(ready) // begin), -(-len(decoding) // stages))
    passed = {*decoding}.difference(ready[:count])
    return [request for request in running if request not in passed]


def decodes(output: SchedulerOutput, running: Iterable[Request], stages: int) -> bool:
    """Whether a request decodes in this step, or in one that is on its way and goes on behind this one."""
    return bool(output.scheduled) or (stages > 1 and any(request.remaining_tokens == 1 for request in running))


class ToldStages:
    """Has steps tell the stages before the last what that has sampled and kept; with one stage nothing is to tell."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._kept: list[list[int]] = []
        """What no step has told yet."""

    def tell(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Let a step of these requests, which is about to begin, do so."""
        if self._stages > 1:
            output.known = known_tokens(output.scheduled, requests)
            output.kept, self._kept = self._kept, []

    def ended(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step has come back, the oldest on its way: also of requests that have gone its drafts were verified."""
        if self._stages > 1 and any(item.sampled > 1 for item in output.scheduled):
            pairs = zip(output.scheduled, result.token_ids, strict=True)
            self._kept.append([len(token_ids) for item, token_ids in pairs if item.sampled > 1])


def known_tokens(scheduled: Sequence[ScheduledTokens], requests: Sequence[Request]) -> list[tuple[int, int, list[int]]]:
    """What a step computes of the answers that its requests have so far, and drafts: `SchedulerOutput.known`."""
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
