"""The progress of a request, by the features that it concerns: its answer, its place in the queue and its drafts."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class AnswerProgress:
    """The part of an answer that was reported, and its end.

    `gathers`: several tokens are reported at a time. `told`: reported tokens; -1 if this engine has reported nothing.
    `reported_prompt_logprobs`: tokens from `params.prompt_logprobs_from` on whose log-probabilities were reported.
    `cached_tokens`: prompt tokens that came from the prefix cache.
    """

    gathers: bool = False
    told: int = -1
    reported_prompt_logprobs: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class QueueProgress:
    """The arrival of a request, and its times of waiting and running.

    `arrival` is the scheduler's sequence number. `waiting_since` and `running_since` are steps; `arrived_at` and
    `begun_at` (its first step) are seconds of the monotonic clock. `aged`: it has waited so long that it goes first.
    """

    arrival: int = 0
    waiting_since: int = 0
    running_since: int = 0
    aged: bool = False
    preemptions: int = 0
    arrived_at: float = 0.0
    begun_at: float = 0.0


@dataclass(slots=True)
class DraftProgress:
    """The drafts of a request.

    `token_ids`: a proposer's drafts after the known tokens. `in_flight`: tokens in flight that are not sampled if
    drafts are rejected. `guesses`: the number of drafts that the device has after the newest token when the steps in
    flight are done; `guessed_token_ids` are these, if the host has to pass them on (`ModelRunnerOutput.guessed`).
    `read_tokens`: the number of tokens that the drafter has computed; it computes the others before it drafts. `right`
    and `wrong` count accepted and rejected drafts; later ones have more weight.
    """

    token_ids: list[int] = field(default_factory=list)
    in_flight: int = 0
    guesses: int = 0
    guessed_token_ids: list[int] = field(default_factory=list)
    read_tokens: int = 0
    right: float = 0.0
    wrong: float = 0.0
