"""The server's side of requests: what the engines of a model are asked, and what became of it."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence

from kvern.engine.inputs import Prompt
from kvern.errors import DeadlineExceeded
from kvern.request.request import NO_OPTIONS, RequestOptions
from kvern.request.sampling_params import SamplingParams
from kvern.serving.client_inputs import ClientInputs
from kvern.serving.generation import Generation
from kvern.serving.replicas import Replicas


class Generations:
    """The generations of one model that have not ended; each is given to one of its engines."""

    def __init__(self, inputs: ClientInputs, replicas: Replicas) -> None:
        self._inputs = inputs
        self._replicas = replicas
        self._ids = itertools.count()

    @property
    def unfinished(self) -> int:
        """Answers that have not ended, running or waiting."""
        return len(self._replicas.outputs)

    def waiting(self, owner: str) -> int:
        """Answers of this owner that have not begun."""
        return self._replicas.turns.waiting(owner)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        news: asyncio.Event,
        patient: bool = False,
        adapter: str | None = None,
    ) -> Generation:
        """Check a prompt and hand it to an engine, waiting for one if all are being replaced.

        With `patient`, `news` is set only at the end. `adapter` is the name of one that is loaded.

        Raises InvalidRequest, InvalidParameter, ServerBusy or EngineDied.
        """
        asked = time.monotonic()
        request_id = f"{os.getpid()}-{next(self._ids)}"
        checked = await self._inputs.request(request_id, prompt, params, options)
        text = prompt if isinstance(prompt, str) else None
        await self._replicas.until_available()  # it takes its turn when there is an engine
        generation = self._replicas.prepare(checked, text, news=news, asked=asked, patient=patient, adapter=adapter)
        await self._replicas.give([generation])
        return generation

    async def follow(
        self, generations: Sequence[Generation], news: asyncio.Event, deadline: float | None = None
    ) -> AsyncIterator[None]:
        """Wake whenever one of them, all submitted with `news`, has grown, until all have ended. Leaving aborts them.

        Raises EngineDied, RequestFailed, or DeadlineExceeded when the loop's clock passes `deadline` before.
        """
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        await news.wait()
                except TimeoutError as error:
                    raise DeadlineExceeded("timeout has passed before the answer was complete: allow more") from error
                news.clear()
                for generation in generations:
                    if generation.error is not None:
                        raise generation.error
                finished = all(generation.output.finished for generation in generations)
                yield
                if finished:
                    return
        finally:
            self.abort(generations)

    def abort(self, generations: Sequence[Generation]) -> None:
        """End those that have not ended; their blocks are free after the step that runs."""
        self._replicas.abort(generations)
