"""The server's side of the engine process: starts it, sends requests, and turns its token events into outputs."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio

from kvern.config import EngineConfig
from kvern.engine.inputs import InputProcessor, Messages, Prompt
from kvern.engine.output import OutputProcessor, RequestOutput
from kvern.engine.wire import (
    AddRequests,
    Events,
    Failed,
    FinishRequests,
    Message,
    NewRequest,
    Ready,
    Shutdown,
    Start,
    decode_for_server,
    encode,
)
from kvern.errors import ConfigError, EngineDied
from kvern.models.hub import resolve_model
from kvern.models.registry import spec_from_config
from kvern.sampling_params import SamplingParams
from kvern.tokenizer import Tokenizer, read_json

SHUTDOWN_SECONDS = 10


class Generation:
    """One prompt on its way: `output` grows, and `news` is set whenever it has."""

    def __init__(self, output: RequestOutput, request_ids: list[str], news: asyncio.Event) -> None:
        self.output = output
        self.request_ids = request_ids
        self.news = news
        self.error: EngineDied | None = None


class EngineClient:
    """An engine process and what is asked of it. Belongs to one event loop.

    async with EngineClient(config) as client:
        news = asyncio.Event()
        generation = await client.submit("Once upon a time", SamplingParams(max_tokens=8), news=news)
        async for _ in client.follow([generation], news):
            print(generation.output.outputs[0].text)
    """

    def __init__(self, config: EngineConfig) -> None:
        self.folder = resolve_model(config.model, revision=config.revision)
        self.config = dataclasses.replace(config, model=str(self.folder), revision=None)
        self.tokenizer = Tokenizer(self.folder)
        self.report = ""
        self._ids = itertools.count()
        self._outputs = OutputProcessor(self.tokenizer)
        self._generations: dict[str, Generation] = {}
        self._failure: EngineDied | None = None
        self._inputs: InputProcessor | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def inputs(self) -> InputProcessor:
        """Makes requests, once the engine is ready."""
        assert self._inputs is not None, "the engine is not ready"
        return self._inputs

    @property
    def is_ready(self) -> bool:
        """The engine takes requests."""
        return self._inputs is not None and self._failure is None

    async def __aenter__(self) -> "EngineClient":
        """Start the process and wait until the model is loaded. Raises ConfigError with the engine's reason."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvern-")  # only this user may enter it
        address = f"ipc://{Path(self._folder.name, 'engine')}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)  # what is sent is bounded by what is asked
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvern.engine.process", address, stdin=asyncio.subprocess.DEVNULL
        )
        try:
            ready = await self._start()
            if isinstance(ready, Failed):
                raise ConfigError(ready.reason)
            spec = spec_from_config(read_json(self.folder / "config.json"))
            self._inputs = InputProcessor(self.tokenizer, spec, self.folder, ready.max_model_len, self.config.seed)
            self.report = ready.report
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _start(self) -> Ready | Failed:
        """Send the options and await the first message, unless the process ends before."""
        sent = asyncio.ensure_future(self._socket.send(encode(Start(dataclasses.asdict(self.config)))))
        message = asyncio.ensure_future(self._socket.recv())
        ended = asyncio.create_task(self._process.wait())
        await asyncio.wait({message, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            sent.cancel()
            message.cancel()
            raise ConfigError(f"the engine process ended while it started, with exit code {ended.result()}")
        ended.cancel()
        ready = decode_for_server(message.result())
        assert isinstance(ready, Ready | Failed)
        return ready

    async def close(self) -> None:
        """Abort what runs, and end the process."""
        self._fail(EngineDied("the engine is closed"))
        for task in self._tasks:
            task.cancel()
        if self._process.returncode is None:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), SHUTDOWN_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._socket.close()
        self._folder.cleanup()

    async def chat_prompt(self, messages: Messages, tools: Sequence[Any] | None) -> list[int]:
        """The conversation as token ids, made outside the event loop. Raises InvalidRequest."""
        return await asyncio.to_thread(self.inputs.chat_prompt, messages, tools)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        news: asyncio.Event,
        priority: int = 0,
    ) -> Generation:
        """Check a prompt and hand it to the engine. Raises InvalidRequest, InvalidParameter or EngineDied."""
        request_id = f"{os.getpid()}-{next(self._ids)}"
        make = self.inputs.requests
        requests, resolved = await asyncio.to_thread(make, request_id, prompt, params, priority=priority)
        if self._failure is not None:
            raise self._failure
        text = prompt if isinstance(prompt, str) else None
        output = self._outputs.add(request_id, text, requests, resolved)
        generation = Generation(output, [request.request_id for request in requests], news)
        self._generations[request_id] = generation
        self._send(AddRequests([NewRequest.of(request) for request in requests]))
        return generation

    async def follow(self, generations: Sequence[Generation], news: asyncio.Event) -> AsyncIterator[None]:
        """Wake whenever one of them, all submitted with `news`, has grown, until all have ended. Leaving aborts them.

        Raises EngineDied.
        """
        try:
            while True:
                await news.wait()
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
                self._send(FinishRequests(generation.request_ids))

    def _send(self, message: Message) -> None:
        """Send without waiting. An engine that is gone cannot be reached, which `_watch` tells those who wait."""
        with contextlib.suppress(zmq.ZMQError):
            cast("asyncio.Future[Any]", self._socket.send(encode(message), zmq.NOBLOCK)).result()

    async def _read(self) -> None:
        while True:
            message = decode_for_server(await self._socket.recv())
            if isinstance(message, Failed):
                self._fail(EngineDied(message.reason))
            elif isinstance(message, Events):
                changed, stopped = self._outputs.process(message.events)
                for request_id, stop in stopped:
                    self._send(FinishRequests([request_id], "stop", stop))
                for output in changed:
                    generation = self._generations.get(output.request_id)
                    if generation is not None:
                        generation.news.set()
                        if output.finished:
                            del self._generations[output.request_id]

    async def _watch(self) -> None:
        code = await self._process.wait()
        self._fail(EngineDied(f"the engine process ended with exit code {code}"))

    def _fail(self, error: EngineDied) -> None:
        """End everything with the first failure."""
        if self._failure is not None:
            return
        self._failure = error
        for generation in self._generations.values():
            generation.error = error
            generation.news.set()
        self._generations.clear()
