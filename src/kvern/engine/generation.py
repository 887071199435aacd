"""One prompt on its way through engines: what another engine needs to go on with it is here."""

import asyncio

from kvern.engine.wire import NewRequest
from kvern.errors import KvernError
from kvern.observe.metrics import RequestTimes
from kvern.outputs import RequestOutput
from kvern.request import Request


class Generation:
    """`output` grows, and `news` is set whenever it has. Times are of the monotonic clock.

    With `patient`, `news` is set only at the end.
    """

    def __init__(
        self,
        output: RequestOutput,
        requests: list[Request],
        news: asyncio.Event,
        asked: float,
        owner: str,
        patient: bool,
    ) -> None:
        self.output = output
        self.owner = owner
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
        self.progress = 0
        """Steps of the present engine that brought it on."""
        self._requests = requests

    def times(self, now: float) -> RequestTimes:
        """How long it took, if it ends now."""
        return RequestTimes(now - self.asked, now - self.first if self.first else None)

    @property
    def turn(self) -> int:
        """Of all its answers."""
        return self._requests[0].turn

    @property
    def adapter(self) -> int | None:
        """The key of the adapter that it uses."""
        return self._requests[0].adapter

    @property
    def request_ids(self) -> list[str]:
        """Of its answers."""
        return [name for request in self._requests for name in request.answer_ids]

    @property
    def sequences(self) -> int:
        """That run side by side."""
        return sum(request.params.beam_width or 1 for request in self._requests)

    def fail(self, error: KvernError) -> None:
        """It ends with this error."""
        self.error = error
        self.news.set()

    @property
    def begun(self) -> bool:
        """The present engine has it."""
        return self.begun_at > 0

    def lose(self) -> None:
        """The engine that had it is gone."""
        self.resumed, self.begun_at, self.progress = self.resumed or self.begun, 0.0, 0

    def messages(self) -> list[NewRequest]:
        """What an engine needs to begin it, or to go on where the answers stand."""
        if not any(answer.token_ids for answer in self.output.outputs) and not self.resumed:
            return [NewRequest.of(request) for request in self._requests]
        logprobs = self.output.prompt_logprobs or []
        reported = len(logprobs) - self._requests[0].params.prompt_logprobs_from if logprobs else 0
        if self._requests[0].params.beam_width is not None:  # nothing of it arrives before all of it
            return [NewRequest.of(request, max(reported, 0)) for request in self._requests]
        return [
            NewRequest.of(request).resumed(answer.token_ids, max(reported, 0) if answer.index == 0 else 0)
            for request, answer in zip(self._requests, self.output.outputs, strict=True)
            if answer.finish_reason is None
        ]


def generation_id(request_id: str) -> str:
    """The generation that an engine's request belongs to: `requests` names its answers and beams after it."""
    return request_id.partition("#")[0]
