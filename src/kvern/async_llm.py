"""AsyncLLM: the verbs of LLM for asyncio programs. Engines are processes of their own, as in the server."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from kvern.config import EngineConfig
from kvern.engine.embedding import embedding_of
from kvern.engine.inputs import InputProcessor, Messages, Prompt
from kvern.engine.scoring import Pair, Score, score_of, scored_prompts
from kvern.errors import RequestFailed
from kvern.options.arguments import engine_config, takes_options
from kvern.request.events import EngineStatistics
from kvern.request.outputs import OnError, RequestOutput, check_on_error, checked
from kvern.request.request import RequestOptions
from kvern.request.sampling_params import SamplingParams
from kvern.serving.argument_names import takes_other_names
from kvern.serving.chats import (
    AdapterChoice,
    ChatOptions,
    OneParams,
    Params,
    Prompts,
    Tools,
    as_conversations,
    as_params,
    as_prompts,
    beam_params,
    chat_request,
    cut_prompts,
    follow,
    one_adapter_for_each,
    one_for_each,
)
from kvern.serving.client_thread import ClientThread
from kvern.serving.python_api import PythonApi
from kvern.serving.supervisor import LOOK_SECONDS
from kvern.serving.workload import Generation
from kvern.spec.model import ModelSpec
from kvern.tools.chat import ChatRequest


class AsyncLLM(PythonApi):
    """A model that serves many coroutines at once, of one event loop or of several in threads; requests share batches.

    Arguments as for LLM.

        async with AsyncLLM() as llm:
            async for output in llm.stream("Once upon a time"):
                print(output.outputs[0].text)

    An engine that dies is replaced, and the next one goes on with its requests. Calls raise EngineUnavailable if
    engines keep dying, and EngineClosed after `close`.
    """

    @takes_options(EngineConfig)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._thread = ClientThread(engine_config(model, options))
        self._client = self._thread.client

    @property
    def config(self) -> EngineConfig:
        """The options that this was made with."""
        return self._thread.config

    @property
    def spec(self) -> ModelSpec:
        """The model's description."""
        return self._thread.spec

    @property
    def _inputs(self) -> InputProcessor:
        return self._client.inputs.processor

    @property
    def _folder(self) -> Path:
        return self._client.folder

    @takes_other_names
    async def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        adapter: AdapterChoice = None,
        truncate_prompt_tokens: int | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer prompts (texts or lists of token ids), in their order; see LLM.generate."""
        check_on_error(on_error)
        several = cut_prompts(as_prompts(prompts, self._inputs), truncate_prompt_tokens, self._inputs)
        return checked(await self._all(several, one_for_each(sampling_params, len(several)), adapter), on_error)

    @takes_other_names
    async def beam_search(
        self, prompts: Prompts, params: OneParams = None, *, adapter: AdapterChoice = None
    ) -> list[RequestOutput]:
        """The `beam_width` most probable answers to each prompt; see LLM.beam_search."""
        several = as_prompts(prompts, self._inputs)
        return await self.generate(several, beam_params(params, len(several)), adapter=adapter)

    @takes_other_names
    async def embed(
        self, prompts: Prompts, *, dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> list[list[float]]:
        """Prompts as vectors of length 1; see LLM.embed."""
        self._check_embeds()
        states = await self._pooled(prompts, truncate_prompt_tokens)
        return [embedding_of(state, dimensions) for state in states]

    @takes_other_names
    async def classify(self, prompts: Prompts, *, truncate_prompt_tokens: int | None = None) -> list[dict[str, float]]:
        """The probability of each label for each prompt; see LLM.classify."""
        labels = self._labels()
        return [labels.probabilities(state) for state in await self._pooled(prompts, truncate_prompt_tokens)]

    @takes_other_names
    async def encode(
        self,
        prompts: Prompts,
        *,
        pooling_task: Literal["embed", "classify"] = "embed",
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[float]]:
        """The vectors of `embed`, or the probabilities of `classify`; see LLM.encode."""
        return self._encoded(await self._pooled(prompts, truncate_prompt_tokens), pooling_task)

    async def _pooled(self, prompts: Prompts, most: int | None) -> list[bytes]:
        several = cut_prompts(as_prompts(prompts, self._inputs), most, self._inputs, ends=False)
        outputs = checked(await self._all(several, [None] * len(several), None, embed=True))
        return [output.embedding or b"" for output in outputs]

    @takes_other_names
    async def score(
        self, pairs: Sequence[Pair], *, add_special_tokens: bool = True, adapter: AdapterChoice = None
    ) -> list[Score]:
        """The log-likelihood of each (context, continuation); see LLM.score."""
        prompts = await asyncio.to_thread(scored_prompts, self.tokenizer, pairs, add_special_tokens)
        outputs = await self._all([item.token_ids for item in prompts], [item.params for item in prompts], adapter)
        checked(outputs)
        return [score_of(output, item) for output, item in zip(outputs, prompts, strict=True)]

    async def _all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        adapter: AdapterChoice,
        embed: bool = False,
    ) -> list[RequestOutput]:
        each = zip(prompts, params, one_adapter_for_each(adapter, len(prompts)), strict=True)
        options = RequestOptions(embed=embed, namespace=self._namespace)
        tasks = [asyncio.create_task(self._last(prompt, param, options, name)) for prompt, param, name in each]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @takes_other_names
    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        tools: Tools = None,
        adapter: AdapterChoice = None,
        on_error: OnError = "raise",
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template, with the options of `LLM.chat`."""
        check_on_error(on_error)
        conversations = as_conversations(messages)
        several = one_for_each(sampling_params, len(conversations))
        chats = [
            chat_request(self._inputs.chat, conversation, params, tools, **options)
            for conversation, params in zip(conversations, several, strict=True)
        ]
        outputs = await self._all([chat.prompt for chat in chats], [chat.params for chat in chats], adapter)
        for chat, output in zip(chats, outputs, strict=True):
            for answer in output.outputs:
                answer.message = chat.message(answer.text)
        return checked(outputs, on_error)

    @takes_other_names
    async def stream(
        self,
        prompt: Prompt,
        sampling_params: OneParams = None,
        *,
        priority: int = 0,
        adapter: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the same growing output as tokens arrive. Leaving the loop or cancelling aborts the request.

        Raises RequestFailed, with the output, if it cannot go on.
        """
        options = RequestOptions(priority=priority, namespace=self._namespace)
        growing = self._grow(prompt, as_params(sampling_params), options, adapter)
        async with contextlib.aclosing(growing) as outputs:
            async for output in outputs:
                if output.finished:
                    checked([output])
                yield output

    async def _grow(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        adapter: str | None,
        patient: bool = False,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield as `stream` does, seldom if `patient`; the last output may be one that failed."""
        news = _News()
        given: list[Generation] = []

        async def submit() -> None:
            submit = self._client.replicas.submit
            given.append(await submit(prompt, params, options, news=news, patient=patient, adapter=adapter))

        try:
            await asyncio.wrap_future(self._thread.submit(submit()))
            [generation] = given
            finished = False
            while not finished:
                await self._until_told(news)
                output = generation.output
                finished = output.finished
                if isinstance(generation.error, RequestFailed):
                    output.fail(str(generation.error))
                elif generation.error is not None:
                    raise generation.error
                yield output
        finally:
            self._thread.soon(lambda: self._client.replicas.abort(given))

    async def _until_told(self, news: "_News") -> None:
        """Wait for news. Raises EngineUnavailable if engines keep dying."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await news.wait()
            except TimeoutError:
                self._client.replicas.check_alive()
            else:
                news.clear()
                return

    @takes_other_names
    def stream_chat(
        self,
        messages: Messages,
        sampling_params: OneParams = None,
        *,
        tools: Tools = None,
        adapter: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for a conversation, with the options of `LLM.chat`; each answer's `message` grows with its text."""
        chat = chat_request(self._inputs.chat, messages, sampling_params, tools, **options)
        return self._followed(chat, adapter)

    async def _followed(self, chat: ChatRequest, adapter: str | None) -> AsyncGenerator[RequestOutput]:
        grown = follow(chat)
        async with contextlib.aclosing(self.stream(chat.prompt, chat.params, adapter=adapter)) as outputs:
            async for output in outputs:
                yield grown(output)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that can be used."""
        return self._thread.adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """Have the engines read the LoRA adapter in a folder. Raises InvalidAdapter."""
        await asyncio.wrap_future(self._thread.submit(self._client.adapters.load(name, path)))

    async def unload_adapter(self, name: str) -> None:
        """Let nothing new use an adapter; what uses it goes on to its end. Raises InvalidRequest."""

        async def unload() -> None:
            self._client.adapters.unload(name)

        await asyncio.wrap_future(self._thread.submit(unload()))

    def statistics(self) -> EngineStatistics:
        """The counters of the engines since the start."""
        return self._thread.statistics()

    def close(self) -> None:
        """Abort what runs and end the engines."""
        self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _last(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, adapter: str | None
    ) -> RequestOutput:
        last: RequestOutput | None = None
        async with contextlib.aclosing(self._grow(prompt, params, options, adapter, patient=True)) as outputs:
            async for output in outputs:
                last = output
        assert last is not None
        return last


class _News(asyncio.Event):
    """An event of the loop that made it, which other threads may set."""

    def __init__(self) -> None:
        super().__init__()
        self._own = asyncio.get_running_loop()

    def set(self) -> None:
        """Wake the waiter. A loop that is gone needs no news."""
        with contextlib.suppress(RuntimeError):
            self._own.call_soon_threadsafe(super().set)
