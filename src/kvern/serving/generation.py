"""One prompt on its way through engines: what another engine needs to go on with it is here."""

import asyncio
from collections.abc import Mapping

import msgspec

from kvern.errors import KvernError, RequestFailed
from kvern.observe.metrics import RequestTimes
from kvern.request.outputs import RequestOutput
from kvern.request.request import Progress, RequestSpec
from kvern.serving.prefix_record import answer_tokens
from kvern.serving.wire import AddRequest


class Generation:
    """`output` grows, and `news` is set whenever it has. Times are of the monotonic clock.

    With `patient`, `news` is set only at the end.
    """

    def __init__(
        self,
        output: RequestOutput,
        spec: RequestSpec,
        news: asyncio.Event,
        asked: float,
        patient: bool,
    ) -> None:
        self.output = output
        self.news = news
        self.patient = patient
        self.asked = asked
        self.first = 0.0
        self.last = 0.0
        self.error: KvernError | None = None
        self.begun_at = 0.0
        """When the present engine got it; 0: it has not."""
        self.resumed = False
        """An engine that died had it."""
        self.spared = False
        """An engine that had it was killed, for which it was not suspected, and it has not got on since."""
        self.piece_keys: list[bytes] = []
        """The keys of its prompt's pieces, by which cached ones are found."""
        self.tokens = 0
        """The approximate number of tokens that its engine computes for it."""
        self.progress = 0
        """The number of steps of the present engine that brought it on."""
        self.spec = spec

    @property
    def most_tokens(self) -> int:
        """The approximate number of tokens to compute for it if nothing is cached."""
        return self.spec.prompt_length + answer_tokens(self.spec)

    def times(self, now: float) -> RequestTimes:
        """Returns its durations if it ends now."""
        return RequestTimes(now - self.asked, now - self.first if self.first else None)

    def fail(self, error: KvernError) -> None:
        """Ends it with this error."""
        self.error = error
        self.news.set()

    def lost_adapter(self, lost: Mapping[int, Exception]) -> RequestFailed | None:
        """Why it ends, if its adapter is one of those, by key, that cannot be read any more."""
        error = None if self.spec.adapter is None else lost.get(self.spec.adapter)
        return None if error is None else RequestFailed(f"the adapter cannot be read again: {error}")

    @property
    def begun(self) -> bool:
        """The present engine has it."""
        return self.begun_at > 0

    def lose(self) -> None:
        """The engine that had it is gone."""
        self.resumed = self.resumed or self.begun
        self.begun_at = 0.0
        self.progress = 0

    def message(self) -> AddRequest:
        """Returns the message with which an engine starts it, or continues it from its present answers.

        If it may be the cause of engines' deaths, every token is reported.
        """
        if not any(answer.token_ids for answer in self.output.outputs) and not self.resumed:
            return AddRequest(self.spec)
        spec = msgspec.structs.replace(self.spec, whole=False)
        logprobs = self.output.prompt_logprobs or []
        reported = max(len(logprobs) - self.spec.params.prompt_logprobs_from, 0) if logprobs else 0
        if self.spec.params.beam_width is not None:  # nothing of it arrives before all of it
            return AddRequest(spec, [Progress(0, [], reported)])
        going_on = (answer for answer in self.output.outputs if answer.finish_reason is None)
        return AddRequest(
            spec,
            [Progress(answer.index, answer.token_ids, 0 if answer.index else reported) for answer in going_on],
        )


def generation_id(request_id: str) -> str:
    """The generation that an engine's request belongs to: `requests` names its answers and beams after it."""
    return request_id.partition("#")[0]
