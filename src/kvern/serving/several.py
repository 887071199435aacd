"""Engines in processes of their own with the methods of `Engine`: for scripts and batch jobs.

Requests that were added since the last step go to the engines at the next one, all together, so that each engine has
its share of the work.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence

from kvern.config import EngineConfig
from kvern.engine.inputs import InputProcessor, Prompt
from kvern.errors import EngineDied, InvalidRequest
from kvern.request.events import EngineStatistics
from kvern.request.outputs import RequestOutput
from kvern.request.request import NO_OPTIONS, RequestOptions
from kvern.request.sampling_params import SamplingParams
from kvern.serving.client_thread import ClientThread
from kvern.serving.supervisor import LOOK_SECONDS
from kvern.serving.workload import Generation
from kvern.spec.model import ModelSpec
from kvern.text.tokenizer import Tokenizer


class SeveralEngines:
    """The engines of `data_parallel_size`, or of a cluster of Ray. Not thread-safe.

    An engine that dies is replaced, and others go on with its requests. `step` raises EngineUnavailable if engines keep
    dying.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start them all. Raises ConfigError with the reason of one that cannot."""
        self.config = config
        counts = config.pipeline_parallel_size == 1  # pipeline stages know no counts of all layers
        target = config.target_itl or "none"  # nobody waits for single tokens
        self._thread = ClientThread(dataclasses.replace(config, expert_counts=counts, target_itl=target))
        self.client = self._thread.client
        self.folder = self.client.folder
        self._news = _AllNews()
        self._generations: dict[str, Generation] = {}
        self._outputs: dict[str, RequestOutput] = {}
        """The outputs that callers have: these end within `step` or `abort`, not while the client's thread writes."""
        self._new: list[Generation] = []
        """The generations that are given to engines at the next step."""

    @property
    def spec(self) -> ModelSpec:
        """The model's description."""
        return self._thread.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.client.tokenizer

    @property
    def inputs(self) -> InputProcessor:
        """Checks prompts and makes requests of them."""
        return self.client.inputs.processor

    @property
    def max_batch_requests(self) -> int:
        """Sequences that run at the same time at most, in all engines."""
        return self.client.replicas.max_batch_requests

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._generations)

    @property
    def request_ids(self) -> list[str]:
        """Prompts that have not ended."""
        return list(self._generations)

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        adapter: str | None = None,
    ) -> RequestOutput:
        """Queue a prompt for the next `step` to give to an engine. Raises InvalidRequest or InvalidParameter."""
        if request_id in self._generations:
            raise InvalidRequest(f"request id {request_id!r} is in use: ids must differ")
        asked = time.monotonic()
        spec = self.inputs.request(request_id, prompt, params, options)
        text = prompt if isinstance(prompt, str) else None
        news = _News(self._news, request_id)

        prepared: list[Generation] = []

        async def prepare() -> None:
            prepared.append(self.client.replicas.prepare(spec, text, news=news, asked=asked, adapter=adapter))

        try:
            self._thread.wait(prepare())
        except BaseException:  # an interruption: nobody knows of it
            self._thread.soon(lambda: self.client.replicas.withdraw(prepared))
            raise
        [generation] = prepared
        self._generations[request_id] = generation
        self._new.append(generation)
        output = self._outputs[request_id] = dataclasses.replace(generation.output)
        return output

    def step(self) -> list[RequestOutput]:
        """Wait until outputs have grown; return these. Raises EngineDied if no engine will bring them on."""
        if not self._generations:
            return []
        self._thread.wait(self._begin())
        while not (names := self._news.take(LOOK_SECONDS)):
            self.client.replicas.check_alive()
        try:
            return [self._heard(name) for name in names if name in self._generations]
        except BaseException:  # an interruption; other threads learn what is left in the next step
            for name in names:
                self._news.tell(name)
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their outputs keep what they have."""
        ended = {name: self._generations[name] for name in request_ids if name in self._generations}
        if ended:
            self._thread.wait(self._abort(list(ended.values())))
        for name, generation in ended.items():  # an interruption before leaves them, to be ended again
            self._grown(name, generation)
            del self._generations[name], self._outputs[name]

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may use."""
        return self._thread.adapters

    def load_adapter(self, name: str, path: str) -> None:
        """Have all engines read the adapter in a folder. Raises InvalidAdapter."""
        self._thread.wait(self.client.adapters.load(name, path))

    def unload_adapter(self, name: str) -> None:
        """Let no new request use an adapter; those that do go on to their end. Raises InvalidRequest."""
        self._thread.wait(self._unload(name))

    def statistics(self) -> EngineStatistics:
        """The counters of all engines since the start; an engine that died counts as far as it had told."""
        return self._thread.statistics()

    def expert_tokens(self) -> list[list[int]]:
        """Tokens that each expert of each layer has had, as far as engines have told: they tell when they rest."""
        told = [replica.metrics.experts.sums() for replica in self.client.replicas]
        layers = zip(*filter(None, told), strict=True)
        return [[sum(counts) for counts in zip(*experts, strict=True)] for experts in layers]

    def close(self) -> None:
        """Abort what runs, and end the engines."""
        if not self._thread.closed:
            self.abort(self.request_ids)
        self._thread.close()

    def _heard(self, name: str) -> RequestOutput:
        generation = self._generations[name]
        output = self._grown(name, generation)
        if generation.error is not None:  # it is set before the output ends
            if isinstance(generation.error, EngineDied):
                raise generation.error
            output.fail(str(generation.error))
        if output.finished:
            del self._generations[name], self._outputs[name]
        return output

    def _grown(self, name: str, generation: Generation) -> RequestOutput:
        """The output that the caller has, with what there is by now."""
        output = self._outputs[name]
        vars(output).update(vars(generation.output))
        return output

    async def _begin(self) -> None:
        if self._new:
            await self.client.replicas.give(self._new)
            self._new = []

    async def _abort(self, generations: Sequence[Generation]) -> None:
        ended = set(generations)
        self.client.replicas.withdraw(generation for generation in self._new if generation in ended)
        self._new = [generation for generation in self._new if generation not in ended]
        self.client.replicas.abort(generations)

    async def _unload(self, name: str) -> None:
        await self._begin()  # requests that use it
        self.client.adapters.unload(name)


class _AllNews:
    """The requests that have grown, told by the client's thread."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._told = threading.Condition()

    def tell(self, request_id: str) -> None:
        """Say that a request has grown."""
        with self._told:
            self._names[request_id] = None
            self._told.notify()

    def take(self, seconds: float) -> list[str]:
        """Wait for news; the requests that have grown since the last call, in the order in which they first did."""
        with self._told:
            self._told.wait_for(lambda: self._names, seconds)
            names = list(self._names)
            self._names.clear()
        return names


class _News(asyncio.Event):
    """The news of one request."""

    def __init__(self, news: _AllNews, request_id: str) -> None:
        super().__init__()
        self._news = news
        self._request_id = request_id

    def set(self) -> None:
        """Say that it has grown."""
        self._news.tell(self._request_id)
