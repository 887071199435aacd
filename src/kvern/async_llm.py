"""AsyncLLM: the verbs of LLM for asyncio programs. The engine runs in a thread of its own."""

import asyncio
import contextlib
import itertools
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from kvern.config import EngineConfig
from kvern.engine.call_arguments import (
    AdapterChoice,
    Params,
    as_conversations,
    as_prompts,
    one_adapter_for_each,
    one_for_each,
)
from kvern.engine.engine import Engine
from kvern.engine.inputs import Messages, Prompt
from kvern.engine.scoring import Pair, Score, score_of, scored_prompts
from kvern.llm import Tools, chat_request, follow
from kvern.request.events import EngineStatistics
from kvern.request.outputs import OnError, RequestOutput, check_on_error, checked
from kvern.request.sampling_params import SamplingParams
from kvern.serving.shared_engine import check_process
from kvern.spec.model import ModelSpec
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest


class _Waiter:
    """Where one request's news go: an event of the loop that asked."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None

    def tell(self) -> None:
        """Wake the waiter, from any thread; a loop that is gone needs no news."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.news.set)


class AsyncLLM:
    """A model that serves many coroutines at once, of one event loop or of several in threads; requests share batches.

    Arguments as for LLM.

        async with AsyncLLM() as llm:
            async for output in llm.stream("Once upon a time"):
                print(output.outputs[0].text)

    If the engine fails, every waiting call raises its error, and so does every later one.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._engine = Engine(EngineConfig(model=model, **options), streams=True)
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiters: dict[str, _Waiter] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvern-engine", daemon=True)
        self._thread.start()

    @property
    def config(self) -> EngineConfig:
        """The options the engine was made with."""
        return self._engine.config

    @property
    def spec(self) -> ModelSpec:
        """The model's description."""
        return self._engine.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        adapter: AdapterChoice = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer prompts (texts or lists of token ids), in their order. `on_error` as for `LLM.generate`."""
        check_on_error(on_error)
        several = as_prompts(prompts)
        return checked(await self._all(several, one_for_each(sampling_params, len(several)), adapter), on_error)

    async def score(
        self, pairs: Sequence[Pair], *, add_special_tokens: bool = True, adapter: AdapterChoice = None
    ) -> list[Score]:
        """The log-likelihood of each (context, continuation); see LLM.score."""
        prompts = await asyncio.to_thread(scored_prompts, self.tokenizer, pairs, add_special_tokens)
        outputs = await self._all([item.token_ids for item in prompts], [item.params for item in prompts], adapter)
        checked(outputs)
        return [score_of(output, item) for output, item in zip(outputs, prompts, strict=True)]

    async def _all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], adapter: AdapterChoice
    ) -> list[RequestOutput]:
        adapters = one_adapter_for_each(adapter, len(prompts))
        tasks = [asyncio.create_task(self._last(*each)) for each in zip(prompts, params, adapters, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        tools: Tools = None,
        add_generation_prompt: bool = True,
        adapter: AdapterChoice = None,
        on_error: OnError = "raise",
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template, with the options of `LLM.chat`."""
        check_on_error(on_error)
        conversations = as_conversations(messages)
        several = one_for_each(sampling_params, len(conversations))
        options["add_generation_prompt"] = add_generation_prompt
        chats = [
            chat_request(self._engine.inputs.chat, conversation, params, tools, **options)
            for conversation, params in zip(conversations, several, strict=True)
        ]
        outputs = await self._all([chat.prompt for chat in chats], [chat.params for chat in chats], adapter)
        for chat, output in zip(chats, outputs, strict=True):
            for answer in output.outputs:
                answer.message = chat.message(answer.text)
        return checked(outputs, on_error)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        adapter: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the same growing output as tokens arrive. Leaving the loop or cancelling aborts the request.

        Raises RequestFailed, with the output, if it cannot go on.
        """
        growing = self._grow(prompt, sampling_params, priority, adapter)
        async with contextlib.aclosing(growing) as outputs:
            async for output in outputs:
                if output.finished:
                    checked([output])
                yield output

    async def _grow(
        self, prompt: Prompt, sampling_params: SamplingParams | None, priority: int, adapter: str | None
    ) -> AsyncGenerator[RequestOutput]:
        """`stream`, whose last output may be one that failed."""
        check_process(self._process)
        request_id, waiter = f"request-{next(self._numbers)}", _Waiter()
        self._commands.put(lambda: self._add(request_id, prompt, sampling_params, priority, adapter, waiter))
        try:
            if self._failure is not None:  # then nobody may be left to carry the command out
                raise self._failure
            while True:
                await waiter.news.wait()
                waiter.news.clear()
                if waiter.error is not None:
                    raise waiter.error
                output = waiter.output
                if output is None:
                    continue
                finished = output.finished
                yield output
                if finished:
                    return
        finally:
            self._commands.put(lambda: self._abort(request_id))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        adapter: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for a conversation, with the options of `LLM.chat`; each answer's `message` grows with its text."""
        chat = chat_request(self._engine.inputs.chat, messages, sampling_params, tools, **options)
        return self._followed(chat, adapter)

    async def _followed(self, chat: ChatRequest, adapter: str | None) -> AsyncGenerator[RequestOutput]:
        grown = follow(chat)
        async with contextlib.aclosing(self.stream(chat.prompt, chat.params, adapter=adapter)) as outputs:
            async for output in outputs:
                yield grown(output)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that can be used."""
        return self._engine.adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """Read the LoRA adapter in a folder, between two steps. Raises InvalidAdapter."""
        await asyncio.wrap_future(self._between_steps(lambda: self._engine.load_adapter(name, path)))

    async def unload_adapter(self, name: str) -> None:
        """Let nothing new use an adapter; what uses it goes on to its end. Raises InvalidRequest."""
        await asyncio.wrap_future(self._between_steps(lambda: self._engine.unload_adapter(name)))

    def chat_prompt(self, messages: Messages, tools: Tools = None, add_generation_prompt: bool = True) -> list[int]:
        """The conversation as token ids, by the model's chat template. Raises InvalidRequest."""
        return self._engine.inputs.chat_prompt(messages, tools, add_generation_prompt)

    def statistics(self) -> EngineStatistics:
        """What the engine has done since it started."""
        return self._engine.statistics()

    def close(self) -> None:
        """Abort what runs and end the engine's thread."""
        check_process(self._process)
        self._commands.put(None)
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _between_steps(self, work: Callable[[], None]) -> Future[None]:
        """Have the engine's thread do something."""
        check_process(self._process)
        done: Future[None] = Future()

        def command() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._commands.put(command)
        if self._failure is not None and not done.done():  # then nobody may be left to carry the command out
            raise self._failure
        return done

    async def _last(self, prompt: Prompt, params: SamplingParams | None, adapter: str | None) -> RequestOutput:
        last: RequestOutput | None = None
        async with contextlib.aclosing(self._grow(prompt, params, 0, adapter)) as outputs:
            async for output in outputs:
                last = output
        assert last is not None
        return last

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        adapter: str | None,
        waiter: _Waiter,
    ) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._engine.add(request_id, prompt, params, priority=priority, adapter=adapter)
            self._waiters[request_id] = waiter
        except BaseException as error:
            waiter.error = error
            waiter.tell()

    def _abort(self, request_id: str) -> None:
        self._engine.abort([request_id])
        self._waiters.pop(request_id, None)

    def _run(self) -> None:
        """The engine's thread: commands, then a step, for ever."""
        failure: BaseException = RuntimeError("the engine is closed")
        try:
            while self._obey():
                for output in self._engine.step():
                    waiter = self._waiters.get(output.request_id)
                    if waiter is not None:
                        waiter.output = output
                        waiter.tell()
        except BaseException as error:
            failure = error
        self._failure = failure
        for waiter in self._waiters.values():
            if waiter.output is None or not waiter.output.finished:
                waiter.error = failure
                waiter.tell()
        self._engine.abort(self._engine.request_ids)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()

    def _obey(self) -> bool:
        """Carry out what was asked since the last step, waiting if there is nothing else to do; False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
