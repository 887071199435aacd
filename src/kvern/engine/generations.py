"""The server's side of requests: what an engine, and the one after it, is asked, and what became of it."""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Unpack

import msgspec

from kvern.adapters.names import AdapterNames
from kvern.engine.client_inputs import ClientInputs
from kvern.engine.generation import Generation
from kvern.engine.inputs import Prompt
from kvern.engine.output import OutputProcessor
from kvern.engine.probation import Probation
from kvern.engine.supervisor import Supervisor
from kvern.engine.turns import Turns
from kvern.engine.wire import FinishRequests
from kvern.errors import DeadlineExceeded, KvernError, RequestFailed, in_a_line
from kvern.events import TokenEvent
from kvern.observe.metrics import Metrics
from kvern.request import RequestOptions
from kvern.sampling_params import SamplingParams

logger = logging.getLogger("kvern")


class Generations:
    """Those that have not ended. `outputs` turns events into their answers; `probation` says who may run."""

    def __init__(
        self,
        inputs: ClientInputs,
        outputs: OutputProcessor,
        adapters: AdapterNames,
        supervisor: Supervisor,
        probation: Probation,
        metrics: Metrics,
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._adapters = adapters
        self._supervisor = supervisor
        self._probation = probation
        self._metrics = metrics
        self._ids = itertools.count()
        self._turns = Turns()
        self.running: dict[str, Generation] = {}
        """By their ids, also those that wait."""
        self.begun_at = 0.0
        """When those on trial, or all, were given to the present engine, by the monotonic clock."""

    @property
    def unfinished(self) -> int:
        """Answers that have not ended, running or waiting."""
        return len(self._outputs)

    def waiting(self, owner: str) -> int:
        """Answers of this owner that have not begun."""
        return self._turns.waiting(owner)

    @property
    def adapter_keys(self) -> set[int | None]:
        """Of the adapters that they use."""
        return {generation.spec.adapter for generation in self.running.values()}

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        news: asyncio.Event,
        owner: str = "",
        patient: bool = False,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Check a prompt and hand it to the engine, waiting for one that is being replaced.

        `owner` is who shares the engine with others by turns. With `patient`, `news` is set only at the end. `adapter`
        is the name of one that is loaded; `options` are of `RequestSpec`.

        Raises InvalidRequest, InvalidParameter, ServerBusy or EngineDied.
        """
        asked = time.monotonic()
        request_id = f"{os.getpid()}-{next(self._ids)}"
        checked = await self._inputs.request(request_id, prompt, params, owner, **options)
        await self._supervisor.until_available()
        key = self._adapters.key(adapter)
        output = self._outputs.add(prompt if isinstance(prompt, str) else None, checked)
        spec = msgspec.structs.replace(checked, adapter=key, turn=self._turns.take(owner, checked.params.sequences))
        generation = Generation(output, spec, news, asked, owner, patient)
        self.running[request_id] = generation
        if not self._probation.active:
            self._begin(generation)
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
        for generation in generations:
            if self.running.pop(generation.output.request_id, None) is not None:
                self._outputs.abort(generation.spec.answer_ids)
                self._metrics.finished(generation.output, generation.times(time.monotonic()))
                if not generation.first:
                    self._turns.give_back(generation.owner, generation.spec.params.sequences)
                self._supervisor.send(FinishRequests(generation.spec.answer_ids))
                self.clear(generation)

    def end(self, generation: Generation, error: RequestFailed) -> None:
        """It cannot go on."""
        generation.fail(error)
        self.abort([generation])

    def close(self, error: KvernError) -> None:
        """There is no engine any more."""
        for generation in self.running.values():
            generation.fail(error)
        self.running.clear()

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Let them grow by what the engine did."""
        if not events:
            return
        now = time.monotonic()
        changed, stopped = self._outputs.process(events)
        for request_id, stop in stopped:
            self._supervisor.send(FinishRequests([request_id], "stop", stop))
        for output in changed:
            generation = self.running.get(output.request_id)
            if generation is not None:
                if output.failure is not None:
                    generation.error = RequestFailed(output.failure)
                if output.finished or generation.error is not None or not generation.patient:
                    generation.news.set()
                self._count(generation, now)
                if output.finished:
                    del self.running[output.request_id]
                generation.progress += 1
                self.clear(generation)

    def clear(self, generation: Generation) -> None:
        """It got on, or has ended: nothing is to be feared of it now."""
        if self._probation.active and self._probation.clear(generation.output.request_id):
            self.begin()

    def lose(self, adapters: Mapping[int, Exception]) -> None:
        """End those whose adapters, by key, cannot be read any more."""
        for generation in list(self.running.values()):
            error = None if generation.spec.adapter is None else adapters.get(generation.spec.adapter)
            if error is not None:
                self.end(generation, RequestFailed(f"the adapter cannot be read again: {error}"))

    def resume(self) -> None:
        """Go on with a new engine, as many as may."""
        for generation in self.running.values():
            generation.lose()
        self.begin()

    def begin(self) -> None:
        """Give the engine those that may run and that it does not have."""
        if self._supervisor.is_ready:
            self.begun_at = time.monotonic()
            for name in self._probation.on_trial or list(self.running):
                generation = self.running.get(name)
                if generation is not None and not generation.begun:
                    self._begin(generation)

    def _begin(self, generation: Generation) -> None:
        """Give it to the engine, which takes requests."""
        generation.begun_at = time.monotonic()
        try:
            self._supervisor.link.send(generation.message())
        except Exception as error:
            logger.exception("request %s cannot be sent to the engine", generation.output.request_id)
            self.end(generation, RequestFailed(f"it cannot be sent to the engine: {in_a_line(error)}"))

    def _count(self, generation: Generation, now: float) -> None:
        if generation.first:
            self._metrics.next_token(now - generation.last)
        else:
            generation.first = now
            self._turns.began(generation.spec.turn, generation.owner, generation.spec.params.sequences)
            self._metrics.first_token(now - generation.asked)
        generation.last = now
        if generation.output.finished:
            self._metrics.finished(generation.output, generation.times(now))
