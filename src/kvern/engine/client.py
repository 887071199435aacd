"""The server's side of the engine: sends requests, turns token events into outputs, and replaces an engine that died.

What a request needs to go on is here, not in the engine: its prompt, parameters, seed, and the tokens that arrived. A
new engine gets all of it and computes the next token; a seeded draw depends on seed and position alone.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvern.adapters.names import AdapterNames, NamedAdapter
from kvern.config import EngineConfig
from kvern.engine.core import EngineStatistics
from kvern.engine.inputs import InputProcessor, Messages, Prompt
from kvern.engine.link import EngineLink
from kvern.engine.output import OutputProcessor, RequestOutput
from kvern.engine.turns import Turns
from kvern.engine.wire import (
    AdapterRead,
    AddRequests,
    Events,
    FinishRequests,
    LoadAdapter,
    Message,
    NewRequest,
    UnloadAdapter,
)
from kvern.errors import ConfigError, DeadlineExceeded, EngineClosed, EngineDied, InvalidAdapter, RequestFailed
from kvern.models.hub import resolve_model
from kvern.models.registry import spec_from_config
from kvern.observe.metrics import Metrics, RequestTimes
from kvern.request import Request
from kvern.sample.processors import load_processors
from kvern.sampling_params import SamplingParams
from kvern.tokenizer import Tokenizer, read_json
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import ToolUse

logger = logging.getLogger("kvern")

MOST_CRASHES = 5
CRASH_SECONDS = 600
"""More crashes than that within this time: something is wrong that a new engine does not mend."""
CRASHES_OF_REQUEST = 2
"""A request that was there at so many crashes is not tried again: it may be what causes them."""


class Generation:
    """One prompt on its way: `output` grows, and `news` is set whenever it has. Times are of the monotonic clock.

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
        self.error: EngineDied | RequestFailed | None = None
        self.crashes = 0
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

    def messages(self) -> list[NewRequest]:
        """What an engine needs to begin it, or to go on where the answers stand."""
        if not any(answer.token_ids for answer in self.output.outputs) and not self.crashes:
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


class EngineClient:
    """An engine process and what is asked of it. Belongs to one event loop.

    async with EngineClient(config) as client:
        news = asyncio.Event()
        generation = await client.submit("Once upon a time", SamplingParams(max_tokens=8), news=news)
        async for _ in client.follow([generation], news):
            print(generation.output.outputs[0].text)

    `silence`: seconds without a sign of life after which an engine is replaced. `names`: the model's, which no adapter
    may have, and the first of which stands in the metrics.
    """

    def __init__(self, config: EngineConfig, silence: float = 60.0, names: Sequence[str] = ()) -> None:
        self.folder = resolve_model(config.model, revision=config.revision)
        self.config = dataclasses.replace(config, model=str(self.folder), revision=None)
        self.tokenizer = Tokenizer(self.folder)
        self._processors = load_processors(config.logits_processors)
        self.metrics = Metrics(names[0] if names else config.model or self.folder.name)
        self.statistics = EngineStatistics()
        self.failed = asyncio.Event()
        """Set when there will be no engine any more; `failure` says why."""
        self.failure: EngineDied | None = None
        self.adapters = AdapterNames(frozenset(names))
        self._reading: dict[int, asyncio.Future[None]] = {}
        self._unloaded: list[NamedAdapter] = []
        """What no new request may use, but some that run do."""
        self._silence = silence
        self._ids = itertools.count()
        self._outputs = OutputProcessor(self.tokenizer)
        self._turns = Turns()
        self._generations: dict[str, Generation] = {}
        self._available = asyncio.Event()
        self._addresses = itertools.count()
        self._inputs: InputProcessor | None = None

    @property
    def inputs(self) -> InputProcessor:
        """Makes requests, once the first engine is ready."""
        assert self._inputs is not None, "the engine is not ready"
        return self._inputs

    @property
    def is_ready(self) -> bool:
        """The engine takes requests."""
        return self._available.is_set() and self.failure is None

    @property
    def unfinished(self) -> int:
        """Answers that have not ended, running or waiting."""
        return len(self._outputs)

    def waiting(self, owner: str) -> int:
        """Answers of this owner that have not begun."""
        return self._turns.waiting(owner)

    @property
    def max_batch_requests(self) -> int:
        """Requests that run at the same time at most."""
        return self._link.ready.max_batch_requests

    @property
    def report(self) -> str:
        """How long the stages of the engine's start took."""
        return self._link.ready.report

    async def __aenter__(self) -> "EngineClient":
        """Start the process and wait until the model is loaded. Raises ConfigError with the engine's reason."""
        self._directory = tempfile.TemporaryDirectory(prefix="kvern-")  # only this user may enter it
        async with contextlib.AsyncExitStack() as failed:
            failed.callback(self._directory.cleanup)
            for name, path in self.config.adapters.items():
                self.adapters.add(self.adapters.reserve(name, path))
            await self._launch()
            failed.push_async_callback(self._link.stop)
            lost = await self._load_adapters()
            if lost:
                raise next(iter(lost.values()))
            failed.pop_all()
        self._available.set()
        spec = spec_from_config(read_json(self.folder / "config.json"))
        length = self._link.ready.max_model_len
        self._inputs = InputProcessor(
            self.tokenizer,
            spec,
            self.folder,
            length,
            self.config,
            self._processors,
            max_batch_requests=self._link.ready.max_batch_requests,
        )
        if self._link.ready.gpu is not None:
            self._watch_gpu(self._link.ready.gpu)
        self._supervisor = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abort what runs, and end the process."""
        self._fail(EngineClosed("the engine is closed"))
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor
        await self._link.stop()
        self._directory.cleanup()

    async def chat_prompt(
        self, messages: Messages, tools: Sequence[Any] | None, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The conversation as token ids, made outside the event loop. Raises InvalidRequest."""
        return await asyncio.to_thread(self.tokenizer.chat_prompt_ids, messages, tools, **(variables or {}))

    async def chat(self, messages: Messages, params: SamplingParams, use: ToolUse, **options: Any) -> ChatRequest:
        """`Chat.request`, outside the event loop. Raises InvalidRequest or InvalidParameter."""
        return await asyncio.to_thread(self.inputs.chat.request, messages, params, use, **options)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text as token ids, made outside the event loop. Raises InvalidRequest."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included, made outside the event loop."""
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens=False)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        news: asyncio.Event,
        priority: int = 0,
        owner: str = "",
        namespace: bytes = b"",
        embed: bool = False,
        patient: bool = False,
        adapter: str | None = None,
    ) -> Generation:
        """Check a prompt and hand it to the engine, waiting for one that is being replaced.

        `owner` is who shares the engine with others by turns; only requests of one `namespace` share cached blocks.
        With `embed` the prompt's last hidden state is computed, and the only token means nothing. With `patient`,
        `news` is set only at the end. `adapter` is the name of one that is loaded.

        Raises InvalidRequest, InvalidParameter or EngineDied.
        """
        asked = time.monotonic()
        request_id = f"{os.getpid()}-{next(self._ids)}"
        requests, resolved = await asyncio.to_thread(
            self.inputs.requests, request_id, prompt, params, priority=priority, embed=embed
        )
        await self._available.wait()
        if self.failure is not None:
            raise self.failure
        key = self.adapters.key(adapter)
        turn = self._turns.take(owner, sum(request.params.beam_width or 1 for request in requests))
        for request in requests:
            request.turn, request.namespace, request.adapter = turn, namespace, key
        text = prompt if isinstance(prompt, str) else None
        output = self._outputs.add(request_id, text, requests, resolved)
        generation = Generation(output, requests, news, asked, owner, patient)
        self._generations[request_id] = generation
        self._send(AddRequests(generation.messages()))
        return generation

    async def load_adapter(self, name: str, path: str) -> None:
        """Have the engine read the adapter in a folder, for requests to use. Raises InvalidAdapter or EngineDied."""
        adapter = self.adapters.reserve(name, path)
        try:
            await self._available.wait()
            if self.failure is not None:
                raise self.failure
            self._reading[adapter.key] = asyncio.get_running_loop().create_future()
            self._send(LoadAdapter(adapter.key, path))
            await self._reading[adapter.key]
            self.adapters.add(adapter)
        except asyncio.CancelledError:
            self._send(UnloadAdapter(adapter.key))
            raise
        finally:
            self._reading.pop(adapter.key, None)
            self.adapters.release(adapter)

    def unload_adapter(self, name: str) -> None:
        """Let no new request use an adapter; those that do go on to their end. Raises InvalidRequest."""
        adapter = self.adapters.remove(name)
        self._unloaded = [*self._still_used(), adapter]
        self._send(UnloadAdapter(adapter.key))

    def _still_used(self) -> list[NamedAdapter]:
        used = {generation.adapter for generation in self._generations.values()}
        return [adapter for adapter in self._unloaded if adapter.key in used]

    async def _load_adapters(self) -> dict[int, InvalidAdapter]:
        """Have a new engine read all adapters that are in use; those that cannot be read, by key, and why."""
        reading = {adapter.key for adapter in (*self.adapters.all(), *self._still_used())}
        for adapter in (*self.adapters.all(), *self._still_used()):
            self._link.send(LoadAdapter(adapter.key, adapter.path))
        lost: dict[int, InvalidAdapter] = {}
        if reading:
            async for message in self._link.messages(self._silence):
                if isinstance(message, AdapterRead):
                    reading.discard(message.key)
                    if message.error is not None:
                        lost[message.key] = InvalidAdapter(message.error)
                if not reading:
                    break
        return lost

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
            if self._generations.pop(generation.output.request_id, None) is not None:
                self._outputs.abort(generation.request_ids)
                self.metrics.finished(generation.output, generation.times(time.monotonic()))
                if not generation.first:
                    self._turns.give_back(generation.owner, generation.sequences)
                self._send(FinishRequests(generation.request_ids))

    def _send(self, message: Message) -> None:
        if self._available.is_set():
            self._link.send(message)

    async def _launch(self) -> None:
        address = f"ipc://{Path(self._directory.name, f'engine-{next(self._addresses)}')}"
        self._link = await EngineLink.start(self.config, address)

    async def _supervise(self) -> None:
        """Deliver what the engine says; when it dies, start another, until that helps no more."""
        crashes: deque[float] = deque(maxlen=MOST_CRASHES)
        while True:
            try:
                async for message in self._link.messages(self._silence):
                    if isinstance(message, AdapterRead):
                        self._answer(message)
                    elif isinstance(message, Events):
                        self.statistics = message.statistics
                        self.metrics.step(message.statistics, message.seconds)
                        self._deliver(message)
            except EngineDied as error:
                reason = error
            self._available.clear()
            for waiting in self._reading.values():
                if not waiting.done():
                    waiting.set_exception(reason)
            await self._link.stop()
            if len(crashes) == MOST_CRASHES and time.monotonic() - crashes[0] < CRASH_SECONDS:
                self._fail(EngineDied(f"{MOST_CRASHES + 1} crashes in {CRASH_SECONDS} seconds, the last: {reason}"))
                return
            crashes.append(time.monotonic())
            logger.warning("%s; it is started again for %d requests", reason, len(self._generations))
            self._blame(reason)
            try:
                await self._launch()
                lost = await self._load_adapters()
            except (ConfigError, EngineDied) as error:
                self._fail(EngineDied(f"the engine cannot be started again: {error}"))
                return
            self._lose(lost)
            self._available.set()
            self.metrics.restarted()
            for generation in self._generations.values():
                self._send(AddRequests(generation.messages()))
            for adapter in self._still_used():
                self._send(UnloadAdapter(adapter.key))

    def _answer(self, message: AdapterRead) -> None:
        waiting = self._reading.get(message.key)
        if waiting is not None and not waiting.done():
            if message.error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(InvalidAdapter(message.error))

    def _lose(self, lost: dict[int, InvalidAdapter]) -> None:
        """Do without adapters that cannot be read any more, and end what uses them."""
        for adapter in self.adapters.all():
            if adapter.key in lost:
                logger.warning("adapter %s is unloaded: %s", adapter.name, lost[adapter.key])
                self.adapters.remove(adapter.name)
        for generation in list(self._generations.values()):
            if generation.adapter in lost:
                generation.error = EngineDied(f"the adapter cannot be read again: {lost[generation.adapter]}")
                generation.news.set()
                self.abort([generation])

    def _blame(self, reason: EngineDied) -> None:
        """Count a crash for every request that was there, and end those that were there too often."""
        for generation in list(self._generations.values()):
            generation.crashes += 1
            if generation.crashes >= CRASHES_OF_REQUEST:
                request_id = generation.output.request_id
                generation.error = EngineDied(
                    f"request {request_id} was running at {CRASHES_OF_REQUEST} crashes of the engine and is not tried "
                    f"again: {reason}"
                )
                generation.news.set()
                self.abort([generation])

    def _deliver(self, message: Events) -> None:
        if not message.events:
            return
        now = time.monotonic()
        changed, stopped = self._outputs.process(message.events)
        for request_id, stop in stopped:
            self._send(FinishRequests([request_id], "stop", stop))
        for output in changed:
            generation = self._generations.get(output.request_id)
            if generation is not None:
                if output.failure is not None:
                    generation.error = RequestFailed(output.failure)
                if output.finished or generation.error is not None or not generation.patient:
                    generation.news.set()
                self._count(generation, now)
                if output.finished:
                    del self._generations[output.request_id]

    def _count(self, generation: Generation, now: float) -> None:
        if generation.first:
            self.metrics.next_token(now - generation.last)
        else:
            generation.first = now
            self._turns.began(generation.turn, generation.owner, generation.sequences)
            self.metrics.first_token(now - generation.asked)
        generation.last = now
        if generation.output.finished:
            self.metrics.finished(generation.output, generation.times(now))

    def _watch_gpu(self, uuid: str) -> None:
        try:
            self.metrics.watch_gpu(uuid)
        except Exception as error:  # whatever the driver's library raises: figures are no reason not to serve
            logger.warning("no GPU memory and utilisation in the metrics: %s", error)

    def _fail(self, error: EngineDied) -> None:
        """There will be no engine any more."""
        if self.failure is not None:
            return
        self.failure = error
        for generation in self._generations.values():
            generation.error = error
            generation.news.set()
        for reading in self._reading.values():
            if not reading.done():
                reading.set_exception(error)
        self._generations.clear()
        self._available.set()  # whoever waits for an engine learns that there is none
        self.failed.set()
