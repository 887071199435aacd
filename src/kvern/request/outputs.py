"""Outputs for users: the answers to a prompt, growing or complete."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvern.errors import InvalidParameter, RequestFailed, shown
from kvern.plugins import imported
from kvern.request.logprobs import LogprobTables, PromptTables
from kvern.request.pieces import Message
from kvern.request.request import FinishReason

OnError = Literal["raise", "return"]
"""The action of a call for failed requests: raise RequestFailed, or return their outputs with the others."""


@dataclass
class CompletionOutput:
    """One answer. `text` and `token_ids` hold everything so far, also while streaming."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the answer; None for the end-of-sequence token and other reasons."""
    logprobs: LogprobTables | None = None
    """A table for each token."""
    cumulative_logprob: float | None = None
    """The sum of its tokens' log-probabilities, if these are wanted or beams are searched."""
    accepted_prediction_tokens: int = 0
    """Tokens of the answer that came from the request's predicted output."""
    rejected_prediction_tokens: int = 0
    """Tokens of the predicted output that were verified and rejected."""
    message: Message | None = None
    """The answer to a conversation in parts: content, reasoning, tool calls."""

    if not TYPE_CHECKING:  # a checker knows the names that there are

        def __getattr__(self, name: str) -> Any:
            raise imported("kvern.request.python_names:missing")(type(self).__name__, name)


@dataclass
class RequestOutput:
    """A prompt and its `n` answers; for a beam search the answers that it found, best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: PromptTables | None = None
    """One table for each prompt token; None for the first, which nothing predicts, and before
    `prompt_logprobs_from`."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    """The tokens that each store of the tier (`kv_tier`) gave for this prompt, by the store's name; empty without a
    tier."""
    queue_seconds: float = field(default=0.0, compare=False)
    """The seconds from arrival at the engine to the first step that computed some of it."""
    embedding: bytes | None = None
    """The last hidden state of the prompt, float32, little-endian, if it is wanted."""

    @property
    def num_cached_tokens(self) -> int:
        """`cached_tokens`, under the name that vLLM has for it."""
        return self.cached_tokens

    @property
    def cached_tokens_details(self) -> dict[str, int]:
        """`cached_tokens` by where they were: "device", and the stores of the tier; empty without a tier."""
        if not self.loaded_tokens:
            return {}
        return {"device": self.cached_tokens - sum(self.loaded_tokens.values()), **self.loaded_tokens}

    @property
    def failure(self) -> str | None:
        """The reason why one of the answers failed, or None."""
        ended = (answer.stop_reason for answer in self.outputs if answer.finish_reason == "abort")
        return next((reason for reason in ended if isinstance(reason, str)), None)

    def fail(self, reason: str) -> None:
        """Sets the reason of answers that were ended from outside."""
        for answer in self.outputs:
            if answer.finish_reason == "abort" and answer.stop_reason is None:
                answer.stop_reason = reason

    def check(self) -> None:
        """Raises RequestFailed if one of the answers failed."""
        checked([self])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise imported("kvern.request.python_names:missing")(type(self).__name__, name)


def check_on_error(on_error: str) -> None:
    """Raises InvalidParameter if it is no OnError."""
    if on_error not in get_args(OnError):
        raise InvalidParameter(f"on_error must be one of {', '.join(get_args(OnError))}, and is {shown(on_error)}")


def checked(outputs: list[RequestOutput], on_error: OnError = "raise") -> list[RequestOutput]:
    """Returns the complete outputs of a call. Raises RequestFailed if one failed."""
    for output in outputs:
        output.fail("the engine was closed or interrupted by another thread")
    failed = [output for output in outputs if output.failure is not None]
    if failed and on_error == "raise":
        reason = failed[0].failure
        if len(outputs) > 1:
            reason = f"{len(failed)} of {len(outputs)} requests failed, the first with: {reason}"
        raise RequestFailed(f"{reason}", outputs)
    return outputs
