"""Engines in processes of their own, on this machine or others, as a batch job sees them in the place of an `LLM`."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from kvern.config import EngineConfig
from kvern.engine.client import EngineClient
from kvern.engine.inputs import Messages, Prompt
from kvern.errors import EngineDied, KvernError, ServerBusy
from kvern.llm import FailedRequest, Input
from kvern.outputs import RequestOutput
from kvern.sampling_params import SamplingParams
from kvern.tools.chat import ChatRequest
from kvern.tools.definitions import ToolUse

T = TypeVar("T")


class EngineProcesses:
    """With-statements start and end them. What one has when it dies goes on in another, as in a server."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError."""
        self._client = EngineClient(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)

    def __enter__(self) -> Self:
        """Raises ConfigError with the reason of an engine that cannot start."""
        self._thread.start()
        self._run(self._client.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._client.__aexit__(*error))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def check_generates(self) -> None:
        """Raises InvalidRequest if the model generates no text: it gives embeddings, or judges texts."""
        self._client.inputs.check_generates()

    def chat_request(
        self, messages: Messages, sampling_params: SamplingParams, use: ToolUse, **options: Any
    ) -> ChatRequest:
        """A conversation as a prompt, parameters, and a reader of the answer. Raises InvalidRequest."""
        return self._run(self._client.inputs.chat(messages, sampling_params, use, **options))

    def as_completed(self, inputs: Iterable[Input]) -> Iterator[RequestOutput | FailedRequest]:
        """As that of `LLM`. Raises EngineDied if engines do not stay alive: what has not ended is for another time."""
        ended: queue.SimpleQueue[Future[RequestOutput | FailedRequest]] = queue.SimpleQueue()
        running: set[Future[RequestOutput | FailedRequest]] = set()
        source, most = iter(inputs), 2 * self._client.max_batch_requests
        try:
            while True:
                for request_id, prompt, params, *adapter in itertools.islice(source, most - len(running)):
                    work = self._answer(request_id, prompt, params, adapter[0] if adapter else None)
                    begun = asyncio.run_coroutine_threadsafe(work, self._loop)
                    running.add(begun)
                    begun.add_done_callback(ended.put)
                if not running:
                    return
                done = ended.get()
                running.remove(done)
                yield done.result()
        finally:
            for begun in running:
                begun.cancel()

    async def _answer(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, adapter: str | None
    ) -> RequestOutput | FailedRequest:
        news = asyncio.Event()
        while True:
            try:
                submitted = self._client.generations.submit(prompt, params, news=news, patient=True, adapter=adapter)
                generation = await submitted
                async for _ in self._client.generations.follow([generation], news):
                    pass
            except ServerBusy as busy:
                await asyncio.sleep(busy.seconds)
            except EngineDied:
                raise
            except KvernError as error:
                return FailedRequest(request_id, error)
            else:
                generation.output.request_id = request_id
                return generation.output

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
