"""The one client of a model's engines: processes that are replaced when they die, and what is asked of them.

What a request needs to go on is here, not in an engine: its prompt, parameters, seed, and the tokens that arrived.
Another engine gets all of it and computes the next token; a seeded draw depends on seed and position alone.
"""

import asyncio
import functools
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence, Sized

from kvern.adapters.names import AdapterNames
from kvern.config import EngineConfig
from kvern.engine.inputs import Prompt
from kvern.engine.output import OutputProcessor
from kvern.errors import DeadlineExceeded, EngineClosed
from kvern.models.folder import at_folder, for_engines, model_folder
from kvern.observe.metrics import Metrics, Refusals
from kvern.request.request import NO_OPTIONS, RequestOptions
from kvern.request.sampling_params import SamplingParams
from kvern.serving.child import EngineProcess
from kvern.serving.client_inputs import ClientInputs
from kvern.serving.replicas import Replicas
from kvern.serving.wire import Ready
from kvern.serving.workload import Generation
from kvern.text.tokenizer import Tokenizer


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
        size = len(prompt) if isinstance(prompt, Sized) else 0
        work = functools.partial(self._inputs.processor.request, request_id, prompt, params, options)
        checked = await self._inputs.run(size, work, options.owner)
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


class EngineClient:
    """The engine processes of a model, and the parts that talk to them. Belongs to one event loop.

    async with EngineClient(config) as client:
        news = asyncio.Event()
        generation = await client.generations.submit("Once upon a time", SamplingParams(max_tokens=8), news=news)
        async for _ in client.generations.follow([generation], news):
            print(generation.output.outputs[0].text)

    `names` are the model's, which no adapter may have, and the first of which stands in the metrics.
    """

    def __init__(
        self, config: EngineConfig, process: EngineProcess | None = None, *, grammars_apart: bool = True
    ) -> None:
        """`process` is the first engine's, if it runs already. `grammars_apart` as in `ClientInputs`.

        Raises ConfigError.
        """
        self.names = config.model_names
        self.folder = model_folder(config)
        self.config = at_folder(config, self.folder)
        self.tokenizer = Tokenizer(self.folder, config.chat_template_kwargs)
        self.inputs = ClientInputs(self.config, self.folder, self.tokenizer, grammars_apart)
        names, outputs = AdapterNames(frozenset(self.names)), OutputProcessor(self.tokenizer)
        self.replicas = Replicas(for_engines(config, self.folder), outputs, names, process)
        self.adapters = self.replicas.adapters
        self.refusals = self.replicas.refusals
        self.generations = Generations(self.inputs, self.replicas)

    @property
    def metrics(self) -> Sequence[Metrics | Refusals]:
        """All figures."""
        return [*(replica.metrics for replica in self.replicas), self.refusals]

    @property
    def trouble(self) -> str | None:
        """Why no engine takes requests at present; None if one does."""
        return self.replicas.trouble

    @property
    def max_batch_requests(self) -> int:
        """Sequences that run at the same time at most, in all engines."""
        return self.replicas.max_batch_requests

    @property
    def ready(self) -> Ready:
        """The reports of the engines after loading the model."""
        return self.replicas.ready

    async def __aenter__(self) -> "EngineClient":
        """Start the processes and wait until the model is loaded. Raises ConfigError with an engine's reason."""
        for name, path in self.config.adapters.items():
            self.adapters.names.add(self.adapters.names.reserve(name, path))
        await self.replicas.start()
        self.inputs.start(self.ready)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abort what runs, and end the processes."""
        closed = EngineClosed("the engine is closed")
        for replica in self.replicas:
            replica.workload.close(closed)
            replica.adapters.interrupt(closed)
        try:
            await self.inputs.close()
        finally:
            await self.replicas.stop()
