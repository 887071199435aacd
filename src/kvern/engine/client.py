"""The server's side of the engine: sends requests, turns token events into outputs, and replaces an engine that died.

What a request needs to go on is here, not in the engine: its prompt, parameters, seed, and the tokens that arrived. A
new engine gets all of it and computes the next token; a seeded draw depends on seed and position alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, Unpack

import msgspec

from kvern.adapters.names import AdapterNames
from kvern.config import EngineConfig
from kvern.engine.client_adapters import ClientAdapters
from kvern.engine.generation import Generation, generation_id
from kvern.engine.inputs import InputProcessor, Messages, Prompt
from kvern.engine.link import EngineLink
from kvern.engine.output import OutputProcessor
from kvern.engine.probation import Probation
from kvern.engine.scoring import Pair, ScoredPrompt, scored_prompts
from kvern.engine.supervisor import LONG_LIFE, Death, Supervisor
from kvern.engine.turns import Turns
from kvern.engine.wire import AdapterRead, Events, FinishRequests
from kvern.errors import DeadlineExceeded, EngineClosed, EngineDied, InvalidRequest, RequestFailed, in_a_line
from kvern.events import EngineStatistics
from kvern.models.hub import resolve_model
from kvern.models.registry import spec_from_config
from kvern.observe.metrics import Metrics
from kvern.request import RequestOptions
from kvern.sample.processors import load_processors
from kvern.sampling_params import SamplingParams
from kvern.structured.apart import GrammarProcesses
from kvern.tokenizer import Tokenizer, read_json
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import ToolUse

logger = logging.getLogger("kvern")

T = TypeVar("T")

TRIAL_SECONDS = 30.0
"""Of computing, after which nobody is on trial any more."""
JUST_BEGUN_SECONDS = 1.0
LOOK_SECONDS = 0.5
"""How often those that wait for an engine look whether it is worth while."""
LONG_INPUT = 1 << 16
"""Characters or tokens beyond which an input waits for one of `LONG_THREADS`."""
LONG_THREADS = 2
MOST_COUNTED = 1 << 17
"""Tokens of a text or conversation that is only counted, where the model's context is shorter."""


def _characters(messages: Messages) -> int:
    """Of all contents, about."""
    return sum(len(str(message.get("content", ""))) for message in messages)


class EngineClient:
    """An engine process and what is asked of it. Belongs to one event loop.

    async with EngineClient(config) as client:
        news = asyncio.Event()
        generation = await client.submit("Once upon a time", SamplingParams(max_tokens=8), news=news)
        async for _ in client.follow([generation], news):
            print(generation.output.outputs[0].text)

    `names` are the model's, which no adapter may have, and the first of which stands in the metrics.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.names = config.model_names
        self.folder = resolve_model(config.model, revision=config.revision)
        self.config = dataclasses.replace(config, model=str(self.folder), revision=None)
        self.tokenizer = Tokenizer(self.folder)
        self._processors = load_processors(config.logits_processors)
        self.metrics = Metrics(self.names[0])
        self.statistics = EngineStatistics()
        self.adapters = AdapterNames(frozenset(self.names))
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="long-input")
        self._ids = itertools.count()
        self._outputs = OutputProcessor(self.tokenizer)
        self._turns = Turns()
        self._generations: dict[str, Generation] = {}
        self._probation = Probation()
        self._trial_began = self._heard = 0.0
        self._unexplained = 0
        """Deaths since a request was found guilty, or an engine lived long."""
        self._silence = config.engine_timeout
        self._supervisor = Supervisor(self.config, self._silence, self)
        self._adapters = ClientAdapters(self.adapters, self._supervisor.send, self._used_adapters)
        self._started = False
        self._inputs: InputProcessor | None = None

    @property
    def inputs(self) -> InputProcessor:
        """Makes requests, once the first engine is ready."""
        assert self._inputs is not None, "the engine is not ready"
        return self._inputs

    @property
    def is_ready(self) -> bool:
        """The engine takes requests."""
        return self._supervisor.available.is_set() and not self._supervisor.closed

    @property
    def trouble(self) -> EngineDied | None:
        """Why requests are refused at present, because engines do not stay alive."""
        return self._supervisor.unavailable

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
        return self._supervisor.link.ready.max_batch_requests

    @property
    def report(self) -> str:
        """How long the stages of the engine's start took."""
        return self._supervisor.link.ready.report

    async def __aenter__(self) -> "EngineClient":
        """Start the process and wait until the model is loaded. Raises ConfigError with the engine's reason."""
        for name, path in self.config.adapters.items():
            self.adapters.add(self.adapters.reserve(name, path))
        await self._supervisor.start()
        self._started = True
        ready = self._supervisor.link.ready
        self._inputs = InputProcessor(
            self.tokenizer,
            spec_from_config(read_json(self.folder / "config.json")),
            self.folder,
            ready.max_model_len,
            self.config,
            self._processors,
            max_batch_requests=ready.max_batch_requests,
            grammars_apart=True,
        )
        self._grammars = GrammarProcesses(self._inputs.grammars)
        self._grammars.start()
        if ready.gpu is not None:
            self._watch_gpu(ready.gpu)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abort what runs, and end the process."""
        closed = EngineClosed("the engine is closed")
        for generation in self._generations.values():
            generation.fail(closed)
        self._generations.clear()
        self._adapters.interrupt(closed)
        try:
            await self._grammars.close()
        finally:
            await self._supervisor.stop()
        self._long.shutdown(wait=False, cancel_futures=True)

    async def chat_prompt(
        self, messages: Messages, tools: Sequence[Any] | None, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The conversation as token ids, made outside the event loop. Raises InvalidRequest."""

        def work() -> list[int]:
            return self._counted(self.tokenizer.chat_prompt(messages, tools, **(variables or {})), False)

        return await self._in_thread(_characters(messages), work)

    async def chat(
        self, messages: Messages, params: SamplingParams, use: ToolUse, *, owner: str = "", **options: Any
    ) -> ChatRequest:
        """`Chat.request`, outside the event loop. Raises InvalidRequest, InvalidParameter or ServerBusy."""
        work = functools.partial(self.inputs.chat.request, messages, params, use, **options)
        return await self._grammars.run(lambda: self._in_thread(_characters(messages), work), owner)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text as token ids, made outside the event loop. Raises InvalidRequest."""
        return await self._in_thread(len(text), functools.partial(self._counted, text, add_special_tokens))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included, made outside the event loop."""
        work = functools.partial(self.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._in_thread(len(token_ids), work)

    async def scored_prompts(self, pairs: Sequence[Pair], add_special_tokens: bool) -> list[ScoredPrompt]:
        """`scored_prompts`, outside the event loop. Raises InvalidRequest."""
        work = functools.partial(scored_prompts, self.tokenizer, pairs, add_special_tokens, self.inputs.max_model_len)
        return await self._in_thread(sum(len(side) for pair in pairs for side in pair), work)

    def _counted(self, text: str, add_special_tokens: bool) -> list[int]:
        most = max(self.inputs.max_model_len, MOST_COUNTED)
        token_ids = self.tokenizer.encode(text, add_special_tokens, most_tokens=most)
        if len(token_ids) > most:
            raise InvalidRequest(f"the prompt has {len(token_ids)} tokens: {most} at most are counted; shorten it")
        return token_ids

    async def _in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Work on an input of so many characters or tokens; long ones wait for each other, and nobody for them."""
        pool = self._long if size > LONG_INPUT else None
        return await asyncio.get_running_loop().run_in_executor(pool, work)

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
        work = functools.partial(self.inputs.request, request_id, prompt, params, **options)
        size = len(prompt) if isinstance(prompt, Sized) else 0
        asking = await self._grammars.run(lambda: self._in_thread(size, work), owner)
        await self._engine()
        key = self.adapters.key(adapter)
        output = self._outputs.add(prompt if isinstance(prompt, str) else None, asking)
        spec = msgspec.structs.replace(asking, adapter=key, turn=self._turns.take(owner, asking.params.sequences))
        generation = Generation(output, spec, news, asked, owner, patient)
        self._generations[request_id] = generation
        if not self._probation.active:
            self._begin(generation)
        return generation

    async def _engine(self) -> None:
        """Wait for one that takes requests. Raises EngineUnavailable or EngineClosed."""
        while not self._supervisor.available.is_set():
            if (trouble := self._supervisor.unavailable) is not None:
                raise trouble
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._supervisor.available.wait(), LOOK_SECONDS)
        if self._supervisor.closed:
            raise EngineClosed("the engine is closed")

    def _begin(self, generation: Generation) -> None:
        generation.begun_at = time.monotonic()
        try:
            self._supervisor.send(generation.message())
        except Exception as error:
            logger.exception("request %s cannot be sent to the engine", generation.output.request_id)
            self._end(generation, RequestFailed(f"it cannot be sent to the engine: {in_a_line(error)}"))

    async def load_adapter(self, name: str, path: str) -> None:
        """Have the engine read the adapter in a folder, for requests to use. Raises InvalidAdapter or EngineDied."""
        await self._engine()
        await self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Let no new request use an adapter; those that do go on to their end. Raises InvalidRequest."""
        self._adapters.unload(name)

    def _used_adapters(self) -> set[int | None]:
        return {generation.spec.adapter for generation in self._generations.values()}

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
                self._outputs.abort(generation.spec.answer_ids)
                self.metrics.finished(generation.output, generation.times(time.monotonic()))
                if not generation.first:
                    self._turns.give_back(generation.owner, generation.spec.params.sequences)
                self._supervisor.send(FinishRequests(generation.spec.answer_ids))
                self._clear(generation)

    def hear(self, message: AdapterRead | Events) -> None:
        """What the engine says."""
        self._heard = time.monotonic()
        if isinstance(message, AdapterRead):
            self._adapters.hear(message)
            return
        self.statistics = message.statistics
        self.metrics.step(message.statistics, message.seconds)
        self._deliver(message)
        if self._probation.active and self._heard > self._trial_began + TRIAL_SECONDS:
            for name in self._probation.on_trial:  # a search says nothing before its end
                self._clear(self._generations[name])

    def died(self, death: Death) -> bool:
        """Find out which request ends engines, and end that one. The others go on with the next engine."""
        self._adapters.interrupt(death.reason)
        if death.lived > LONG_LIFE:
            self._unexplained = 0
        self.metrics.engine(ready=False)
        names = dict.fromkeys([*map(generation_id, death.running), *self._just_begun()])
        running = [generation for name in names if (generation := self._generations.get(name)) is not None]
        running.sort(key=lambda generation: (generation.progress, -generation.asked))
        logger.warning("%s; %d requests go on with another", death.reason, len(self._generations))
        guilty = self._probation.died([generation.output.request_id for generation in running], death.killed)
        if guilty is not None:
            self._unexplained = 0
            generation = self._generations[guilty]
            message = f"request {guilty} was alone when the engine died and is not tried again: {death.reason}"
            logger.warning("%s", message)
            self.metrics.refused("crash")
            self._end(generation, RequestFailed(message))
        return bool(running)

    def _just_begun(self) -> list[str]:
        """Who may have ended the engine before their first step: those on trial, and those that came at its end.

        The latter only if nobody was found guilty at the last deaths; those in its last steps are more suspicious.
        """
        if self._probation.active:
            return [name for name in self._probation.on_trial if self._generations[name].begun]
        self._unexplained += 1
        if self._unexplained <= 1:
            return []
        late = self._heard - JUST_BEGUN_SECONDS
        return [name for name, one in self._generations.items() if not one.progress and one.begun_at > late]

    async def prepare(self, link: EngineLink) -> None:
        """Have a new engine read all adapters that are in use. Raises InvalidAdapter if it is the first engine."""
        self._adapters.interrupt(EngineDied("the engine was replaced"))
        lost = await self._adapters.read_all(link, self._silence)
        if lost and not self._started:
            raise next(iter(lost.values()))
        self._adapters.lose(lost)
        for generation in list(self._generations.values()):
            error = None if generation.spec.adapter is None else lost.get(generation.spec.adapter)
            if error is not None:
                self._end(generation, RequestFailed(f"the adapter cannot be read again: {error}"))

    def resume(self) -> None:
        """Give a new engine what it may work on now."""
        self.metrics.engine(ready=True)
        if self._started:
            self.metrics.restarted()
        for generation in self._generations.values():
            generation.lose()
        self._begin_those_who_may()
        self._adapters.resume()

    def _begin_those_who_may(self) -> None:
        if self.is_ready:
            self._trial_began = time.monotonic()
            for name in self._probation.on_trial or list(self._generations):
                generation = self._generations.get(name)
                if generation is not None and not generation.begun:
                    self._begin(generation)

    def _clear(self, generation: Generation) -> None:
        """It got on, or has ended: nothing is to be feared of it now."""
        if self._probation.active and self._probation.clear(generation.output.request_id):
            self._begin_those_who_may()

    def _end(self, generation: Generation, error: RequestFailed) -> None:
        generation.fail(error)
        self.abort([generation])

    def _deliver(self, message: Events) -> None:
        if not message.events:
            return
        now = time.monotonic()
        changed, stopped = self._outputs.process(message.events)
        for request_id, stop in stopped:
            self._supervisor.send(FinishRequests([request_id], "stop", stop))
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
                generation.progress += 1
                self._clear(generation)

    def _count(self, generation: Generation, now: float) -> None:
        if generation.first:
            self.metrics.next_token(now - generation.last)
        else:
            generation.first = now
            self._turns.began(generation.spec.turn, generation.owner, generation.spec.params.sequences)
            self.metrics.first_token(now - generation.asked)
        generation.last = now
        if generation.output.finished:
            self.metrics.finished(generation.output, generation.times(now))

    def _watch_gpu(self, uuid: str) -> None:
        try:
            self.metrics.watch_gpu(uuid)
        except Exception as error:  # whatever the driver's library raises: figures are no reason not to serve
            logger.warning("no GPU memory and utilisation in the metrics: %s", error)
