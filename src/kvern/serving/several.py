"""Several engines, each a process, behind the calls of `Engine`: for scripts and batch jobs.

    abort, step  -->  a thread runs the loop of Replicas until that is done  -->  the engines' processes

What was added since the last step goes to them at the next one, all together, so that each has its share of the work.

Between calls the loop stands still, so that no output grows while its reader looks; engines compute meanwhile.
"""

import asyncio
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from typing import Any, TypeVar, Unpack

from kvern.adapters.names import AdapterNames
from kvern.config import EngineConfig
from kvern.engine.inputs import InputProcessor, Prompt
from kvern.engine.output import OutputProcessor
from kvern.errors import EngineClosed, InvalidRequest
from kvern.models.folder import for_engines, model_folder
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.request.events import EngineStatistics, all_together
from kvern.request.outputs import RequestOutput
from kvern.request.request import RequestOptions
from kvern.request.sampling_params import SamplingParams
from kvern.sample.processors import load_processors
from kvern.serving.generation import Generation
from kvern.serving.replicas import Replicas
from kvern.serving.supervisor import LOOK_SECONDS
from kvern.spec.model import ModelSpec
from kvern.text.tokenizer import Tokenizer

T = TypeVar("T")


class SeveralEngines:
    """The engines of `data_parallel_size`, or of a cluster of Ray, with the methods of `Engine`. Not thread-safe.

    An engine that dies is replaced, and others go on with its requests. `step` raises EngineUnavailable if engines keep
    dying.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start them all. Raises ConfigError with the reason of one that cannot."""
        self.folder = model_folder(config)
        self.config = config
        self.tokenizer = Tokenizer(self.folder, config.chat_template_kwargs)
        self._names = AdapterNames(frozenset(config.model_names))
        counts = config.pipeline_parallel_size == 1  # stages know no counts of all layers
        engines = dataclasses.replace(
            for_engines(config, self.folder),
            expert_counts=counts,
            target_itl=config.target_itl or "none",  # nobody waits for single tokens
        )
        self._replicas = Replicas(engines, OutputProcessor(self.tokenizer), self._names, None)
        self._generations: dict[str, Generation] = {}
        self._new: list[Generation] = []
        """Those of them that are given to engines at the next step, all together."""
        self._grown = asyncio.Event()
        self._changed: dict[str, None] = {}
        """Requests that have grown, of which `step` has not told yet, in their order."""
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1, "kvern-engines")  # the caller's may run a loop already
        self._close = weakref.finalize(self, _end, self._replicas, self._loop, self._thread, os.getpid())
        try:
            for name, path in config.adapters.items():
                self._names.add(self._names.reserve(name, path))
            self._wait(self._replicas.start())
            ready = self._replicas.ready
            self.inputs = InputProcessor(
                self.tokenizer,
                ready.model,
                self.folder,
                ready.max_model_len,
                config,
                load_processors(config.logits_processors),
                max_batch_requests=ready.max_batch_requests,
            )
        except BaseException:
            self.close()
            raise

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's description."""
        return describe_model(self.folder, read_config(self.folder), self.config.model_implementation)

    @property
    def max_batch_requests(self) -> int:
        """Sequences that run at the same time at most, in all engines."""
        return self._replicas.max_batch_requests

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
        *,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Queue a prompt for the next `step` to give to an engine. Raises InvalidRequest or InvalidParameter."""
        if not self._close.alive:
            raise EngineClosed("the engines are closed")
        if request_id in self._generations:
            raise InvalidRequest(f"request id {request_id!r} is in use: ids must differ")
        spec = self.inputs.request(request_id, prompt, params, **options)
        news = _News(self._changed, request_id, self._grown)
        text = prompt if isinstance(prompt, str) else None
        generation = self._replicas.prepare(spec, text, news=news, asked=time.monotonic(), adapter=adapter)
        self._generations[request_id] = generation
        self._new.append(generation)
        return generation.output

    def step(self) -> list[RequestOutput]:
        """Wait until outputs have grown; which these are. Raises EngineDied if no engine will bring them on."""
        if not self._generations:
            return []
        self._wait(self._until_grown())
        changed = [self._generations[name] for name in self._changed if name in self._generations]
        self._changed.clear()
        self._grown.clear()
        for generation in changed:
            if generation.error is not None:
                generation.output.fail(str(generation.error))
            if generation.output.finished:
                self._generations.pop(generation.output.request_id)
        return [generation.output for generation in changed]

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their outputs keep what they have."""
        ended = [generation for name in request_ids if (generation := self._generations.pop(name, None)) is not None]
        if ended:
            self._wait(self._abort(ended))

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may use."""
        return [adapter.name for adapter in self._names.all()]

    def load_adapter(self, name: str, path: str) -> None:
        """Have all engines read the adapter in a folder. Raises InvalidAdapter."""
        self._wait(self._replicas.adapters.load(name, path))

    def unload_adapter(self, name: str) -> None:
        """Let no new request use an adapter; those that do go on to their end. Raises InvalidRequest."""
        self._wait(self._unload(name))

    def statistics(self) -> EngineStatistics:
        """Counted since the start, of all engines; what one that died had not told yet is not."""
        if self._close.alive:
            self._wait(asyncio.sleep(0))  # hears what has come
        return all_together([replica.statistics for replica in self._replicas])

    def expert_tokens(self) -> list[list[int]]:
        """How many tokens each expert of each layer has had, as far as engines have told: they do when they rest."""
        if self._close.alive:
            self._wait(asyncio.sleep(0))  # hears what has come
        told = [replica.metrics.experts.sums() for replica in self._replicas]
        layers = zip(*filter(None, told), strict=True)
        return [[sum(counts) for counts in zip(*experts, strict=True)] for experts in layers]

    def close(self) -> None:
        """Abort what runs, and end the engines."""
        if self._close.alive:
            self.abort(self.request_ids)
        self._close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of work in the loop. Raises EngineClosed after `close`."""
        if not self._close.alive:
            work.close()
            raise EngineClosed("the engines are closed")
        task = self._loop.create_task(work)
        done = self._thread.submit(self._loop.run_until_complete, task)
        try:
            return done.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(task.cancel)
            wait([done])
            raise

    async def _begin(self) -> None:
        if self._new:
            await self._replicas.give(self._new)
            self._new = []

    async def _abort(self, generations: Sequence[Generation]) -> None:
        ended = set(generations)
        self._replicas.withdraw(generation for generation in self._new if generation in ended)
        self._new = [generation for generation in self._new if generation not in ended]
        self._replicas.abort(generations)

    async def _unload(self, name: str) -> None:
        await self._begin()  # those that use it
        self._replicas.adapters.unload(name)

    async def _until_grown(self) -> None:
        await self._begin()
        while not self._changed:
            self._replicas.check_alive()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._grown.wait()
            except TimeoutError:
                continue


class _News(asyncio.Event):
    """Those of one request, which are also put on the list of all."""

    def __init__(self, changed: dict[str, None], request_id: str, grown: asyncio.Event) -> None:
        super().__init__()
        self._changed, self._request_id, self._grown = changed, request_id, grown

    def set(self) -> None:
        """It has grown."""
        self._changed[self._request_id] = None
        self._grown.set()


def _end(replicas: Replicas, loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor, process: int) -> None:
    """Also at the interpreter's end, when the pool takes nothing any more; not in processes forked from this one."""
    if os.getpid() != process:
        return
    thread.shutdown()
    last = threading.Thread(target=lambda: loop.run_until_complete(replicas.stop()))
    last.start()
    last.join()
    loop.close()
