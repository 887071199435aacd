"""What users get: the answers to a prompt, growing or whole."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from kvern.errors import InvalidParameter, RequestFailed, shown
from kvern.request.pieces import Message
from kvern.request.progress import FinishReason
from kvern.request.step import TokenLogprobs

OnError = Literal["raise", "return"]
"""What a call does with requests that could not go on: raise RequestFailed, or return their outputs as well."""


@dataclass
class CompletionOutput:
    """One answer. `text` and `token_ids` hold everything so far, also while streaming."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the end-of-sequence token and for other reasons."""
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    """Of all its tokens, if log-probabilities were asked for or beams searched."""
    accepted_prediction_tokens: int = 0
    """Its tokens that were guessed by the request's prediction."""
    rejected_prediction_tokens: int = 0
    """Guesses of the prediction that a step computed in vain."""
    message: Message | None = None
    """The answer to a conversation taken apart: content, reasoning, tool calls."""


@dataclass
class RequestOutput:
    """A prompt and its `n` answers; of a beam search those that it found, the best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a prompt token, None for the first, which nothing predicts, and before `prompt_logprobs_from`."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    queue_seconds: float = field(default=0.0, compare=False)
    """From arrival at the engine to the first step that computed something of it."""
    embedding: bytes | None = None
    """The last hidden state of the prompt, float32, little-endian, if that was asked for."""

    @property
    def failure(self) -> str | None:
        """Why one of the answers could not go on."""
        ended = (answer.stop_reason for answer in self.outputs if answer.finish_reason == "abort")
        return next((reason for reason in ended if isinstance(reason, str)), None)

    def forget_logprobs(self) -> None:
        """Free the log-probabilities table by table: freeing all of them in one call would make other threads wait."""
        for tables in (self.prompt_logprobs, *(answer.logprobs for answer in self.outputs)):
            while tables:
                tables.pop()

    def fail(self, reason: str) -> None:
        """Its answers that were ended from outside could not go on."""
        for answer in self.outputs:
            if answer.finish_reason == "abort" and answer.stop_reason is None:
                answer.stop_reason = reason

    def check(self) -> None:
        """Raise RequestFailed if one of the answers could not go on."""
        checked([self])


def check_on_error(on_error: str) -> None:
    """Raises InvalidParameter if it is no OnError."""
    if on_error not in get_args(OnError):
        raise InvalidParameter(f"on_error must be one of {', '.join(get_args(OnError))}, and is {shown(on_error)}")


def checked(outputs: list[RequestOutput], on_error: OnError = "raise") -> list[RequestOutput]:
    """The outputs of a call, which have ended. Raises RequestFailed if one could not go on."""
    for output in outputs:
        output.fail("the engine was closed or interrupted by another thread")
    failed = [output for output in outputs if output.failure is not None]
    if failed and on_error == "raise":
        reason = failed[0].failure
        if len(outputs) > 1:
            reason = f"{len(failed)} of {len(outputs)} requests failed, the first with: {reason}"
        raise RequestFailed(f"{reason}", outputs)
    return outputs
