"""One row of a step: the short ways of plain decodes, and what is reported of a row.

Nearly all rows of nearly all steps decode one token within a block. For these `decode_token` does what
`Scheduler.schedule` would, and `append_token` what `Scheduler.update` would, without asking for what is known.
"""

from kvern.request.logprobs import LogprobRows
from kvern.request.request import Request, State
from kvern.request.step import ScheduledTokens, SchedulerOutput


def decode_token(request: Request, output: SchedulerOutput, block_size: int) -> bool:
    """Lets a step compute the next token of a running request, if that has no drafts, needs no block and fills none.

    Returns whether it is such a request; if not, nothing is changed.
    """
    start, in_flight = request.num_computed_tokens, request.in_flight
    known = len(request.token_ids)
    drafts = request.drafts
    if (
        known + in_flight - start != 1
        or start < request.prompt_length
        or start >= request.prompt_length + request.max_tokens - 1
        or request.state is not State.RUNNING
        or request.search is not None
        or drafts.token_ids
        or drafts.guesses
        or drafts.in_flight
        or start >= len(request.block_ids) * block_size
        or not (known if known <= start else start + 1) % block_size
    ):
        return False
    output.scheduled.append(ScheduledTokens(request.slot, start, 1, 1))
    output.request_ids.append(request.request_id)
    request.num_computed_tokens = start + 1
    request.in_flight = in_flight + 1
    return True


def append_token(request: Request, item: ScheduledTokens, token_ids: list[int], block_size: int) -> bool:
    """Takes the token that a step has sampled for a row, if it is not the first, ends nothing and fills no block.

    Returns whether it is such a token; if not, nothing is changed.
    """
    tokens = request.token_ids
    known, computed = len(tokens) + 1, request.num_computed_tokens
    if (
        item.sampled != 1
        or len(token_ids) != 1
        or known - request.prompt_length in (1, request.max_tokens)
        or request.state is not State.RUNNING
        or request.search is not None
        or token_ids[0] in request.spec.stop_token_ids
        or not (known if known < computed else computed) % block_size
        or request.drafts.guessed_token_ids
    ):
        return False
    tokens.append(token_ids[0])
    request.in_flight -= 1
    return True


def queue_seconds(request: Request) -> float:
    """Returns the seconds from the arrival to the first step, those of the record if there is one."""
    noted = request.answer.log or request.answer.record
    return request.queue.seconds if noted is None else noted.first_step or 0.0


def unreported_logprobs(request: Request, start: int, logprobs: LogprobRows | None) -> LogprobRows | None:
    """Returns the prompt's log-probabilities that were not computed before a preemption.

    `start` is the position of the first token that was computed, which predicts the next.
    """
    if logprobs is None:
        return None
    first = max(start + 1, request.params.prompt_logprobs_from)
    new = logprobs[request.params.prompt_logprobs_from + request.answer.reported_prompt_logprobs - first :]
    request.answer.reported_prompt_logprobs += len(new)
    return new or None
