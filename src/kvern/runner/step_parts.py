"""A step for which the memory of a device is too small is run in parts, and so are all as large that come later.

The limit is found by trying: what is run again in parts is the step that failed, after its differences have come. One
that has changed states of layers cannot be run again: it is lost, and what is planned in its place runs in parts.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from kvern.errors import in_a_line
from kvern.request.logprobs import joined
from kvern.request.spans import cut, least, within
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput, StepLost, StepResult, StepTooLarge

logger = logging.getLogger("kvern")


class StepParts:
    """Runs steps through `execute`, whole while they fit."""

    def __init__(self, execute: Callable[[SchedulerOutput], StepResult]) -> None:
        self._execute = execute
        self._token_limit: int | None = None

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Start a step. Raises what `execute` raises, its cause for what cannot be cut, and StepLost."""
        if self._token_limit is None or output.token_count <= self._token_limit:
            try:
                return self._execute(output)
            except StepTooLarge as error:
                return self.execute_again(output, error)
        return self._execute_parts(output)

    def execute_again(self, output: SchedulerOutput, error: StepTooLarge) -> StepResult:
        """Start a step in parts, which came whole and was too large. Raises as `execute`."""
        self._lower(output.scheduled, error)
        return self._execute_parts(SchedulerOutput(output.step, scheduled=output.scheduled))

    def _execute_parts(self, output: SchedulerOutput) -> StepResult:
        return JoinedRequests(self._run(_Unsent(self._execute, output), output.scheduled))

    def _run(self, unsent: "_Unsent", scheduled: Sequence[ScheduledTokens]) -> list[StepResult]:
        tokens = sum(item.count for item in scheduled)
        if self._token_limit is None or tokens <= self._token_limit or _is_whole(scheduled):
            try:
                return [unsent.execute(scheduled)]
            except StepTooLarge as error:
                self._lower(scheduled, error)
        return self._cut(unsent, scheduled)

    def _cut(self, unsent: "_Unsent", scheduled: Sequence[ScheduledTokens]) -> list[StepResult]:
        """Halves of several requests, or pieces of one's tokens."""
        if len(scheduled) > 1:
            middle = len(scheduled) // 2
            return self._run(unsent, scheduled[:middle]) + self._run(unsent, scheduled[middle:])
        (item,), limit = scheduled, self._token_limit or 1
        pieces = list(_pieces(item, limit))
        return [JoinedPieces([part for piece in pieces for part in self._run(unsent, [piece])])]

    def _lower(self, scheduled: Sequence[ScheduledTokens], error: StepTooLarge) -> None:
        tokens = sum(item.count for item in scheduled)
        if _is_whole(scheduled):
            raise error.__cause__ or error
        self._token_limit = tokens // 2
        logger.warning(
            "out of GPU memory in a step of %d tokens %s: it is run again in parts of %d; %s",
            tokens,
            error,
            self._token_limit,
            in_a_line(error.__cause__ or error),
        )
        if error.final:
            raise StepLost from error


def _is_whole(scheduled: Sequence[ScheduledTokens]) -> bool:
    """Returns whether this cannot be cut: one token, one span, or one request's drafts, which are verified at once."""
    if len(scheduled) > 1:
        return False
    item = scheduled[0]
    return item.count == least(item.spans, item.start) or item.sampled > 1


def _pieces(item: ScheduledTokens, limit: int) -> Iterator[ScheduledTokens]:
    """Pieces of at most so many tokens, or of one span."""
    start, end = item.start, item.start + item.count
    while start < end:
        stop = max(cut(item.spans, min(start + limit, end)), start + least(item.spans, start))
        yield ScheduledTokens(
            item.slot,
            start,
            stop - start,
            item.sampled if stop == end else 0,
            guesses=item.guesses,
            spans=within(item.spans, start, stop),
        )
        start = stop


class _Unsent:
    """A step whose first part brings its differences to the device, and the others none."""

    def __init__(self, execute: Callable[[SchedulerOutput], StepResult], output: SchedulerOutput) -> None:
        self._execute, self._output = execute, output

    def execute(self, scheduled: Sequence[ScheduledTokens]) -> StepResult:
        part = replace(self._output, scheduled=list(scheduled))
        self._output = SchedulerOutput(self._output.step)
        return self._execute(part)


class JoinedRequests:
    """The parts of a step, each with some of its requests."""

    def __init__(self, parts: Sequence[StepResult]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self) -> ModelRunnerOutput:
        outputs = [part.result() for part in self._parts]
        return ModelRunnerOutput(
            [token for output in outputs for token in output.token_ids],
            [entry for output in outputs for entry in output.logprobs],
            [entry for output in outputs for entry in output.prompt_logprobs],
            {slot: reason for output in outputs for slot, reason in output.broken.items()},
            {slot: state for output in outputs for slot, state in output.embeddings.items()},
            {slot: item for output in outputs for slot, item in output.candidates.items()},
        )


class JoinedPieces:
    """The pieces of one request's prompt that did not fit into one step."""

    def __init__(self, parts: Sequence[StepResult]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self) -> ModelRunnerOutput:
        outputs = [part.result() for part in self._parts]
        prompts = [rows for output in outputs for rows in output.prompt_logprobs if rows is not None]
        last = outputs[-1]
        return ModelRunnerOutput(
            [last.token_ids[0]],
            [last.logprobs[0]],
            [joined(prompts)],
            last.broken,
            last.embeddings,
            last.candidates,
        )
