"""The tokens of requests, for the request log and for the metrics of each API key."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from kvern.observe.metrics import KeyFigures
from kvern.request.outputs import RequestOutput
from kvern.request.record import Wait

SHOWN_SECONDS = 0.001
"""The shortest wait that the request log shows."""


@dataclass
class RequestUsage:
    """The tokens that one HTTP request has used so far, and how its answers ended."""

    prompt: int = 0
    cached: int = 0
    """The tokens of the prompt that were cached."""
    answer: int = 0
    reasons: set[str] = field(default_factory=set)
    waits: Mapping[Wait, float] = field(default_factory=dict)
    """The seconds that the answers waited for, by cause, of several answers the most."""

    def __str__(self) -> str:
        """A part of a line of the log: empty for a request that asked no model."""
        if not self.prompt:
            return ""
        reasons = ",".join(sorted(self.reasons)) or "none"
        known = [f"{cause}:{seconds:.3f}" for cause, seconds in self.waits.items() if seconds >= SHOWN_SECONDS]
        waits = f"waits={','.join(known)} " if known else ""
        return f"prompt={self.prompt} cached={self.cached} answer={self.answer} finish={reasons} {waits}"


CURRENT: ContextVar[RequestUsage | None] = ContextVar("CURRENT", default=None)
"""The usage of the HTTP request that is being answered; None for rows of batches."""


class UsageCounter:
    """Counts what generations have used when they end: for their HTTP request, and for their key."""

    def __init__(self, figures: KeyFigures, key: str) -> None:
        self._figures = figures
        self._key = key
        self._current = CURRENT.get()

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Counts the tokens of prompts and answers, also of those that were left unfinished."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.cached_tokens for output in outputs)
        answers = [answer for output in outputs for answer in output.outputs]
        answered = sum(len(answer.token_ids) for answer in answers)
        self._figures.used(self._key, prompt, cached, answered)
        if self._current is not None:
            self._current.prompt += prompt
            self._current.cached += cached
            self._current.answer += answered
            self._current.reasons.update(answer.finish_reason or "error" for answer in answers)
