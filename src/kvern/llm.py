"""The Python API: LLM, for scripts; AsyncLLM is its twin for asyncio."""

import contextlib
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, Unpack

from kvern.config import EngineConfig
from kvern.engine.embedding import embedding_of
from kvern.engine.engine import Engine
from kvern.engine.inputs import InputProcessor, Messages, Prompt
from kvern.engine.relevance import PairClassifier, way_of
from kvern.engine.scoring import Pair, Score, score_of, scored_prompts
from kvern.errors import EngineDied, InvalidRequest, KvernError, RequestFailed
from kvern.options.arguments import engine_config, takes_options
from kvern.plugins import imported
from kvern.request.events import EngineStatistics
from kvern.request.outputs import CompletionOutput, OnError, RequestOutput, check_on_error, checked
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
from kvern.serving.python_api import PythonApi
from kvern.serving.shared_engine import SharedEngine, check_process
from kvern.spec.model import ModelSpec
from kvern.tools.chat import DEFAULT_PROMPT, ChatRequest, PromptOptions
from kvern.tools.definitions import NO_TOOLS, ToolUse

SEVERAL = "kvern.serving.several:SeveralEngines"
"""Clients of engines in processes of their own, of which an engine within this process needs nothing."""

__all__ = ["LLM", "CompletionOutput", "FailedRequest", "RequestOutput", "Score"]

Input = tuple[str, Prompt, SamplingParams | None] | tuple[str, Prompt, SamplingParams | None, str | None]


@dataclass(frozen=True)
class FailedRequest:
    """An input that could not be run, and why."""

    request_id: str
    error: KvernError


class LLM(PythonApi):
    """A model, ready to generate.

        llm = LLM()                                  # the model that ships inside kvern
        llm.generate("Once upon a time")[0].outputs[0].text

    Keyword arguments are the fields of EngineConfig; vLLM's names for them are taken as well. Raises KvernError
    subclasses. Several threads may use it: their requests share batches. A process forked from this one may not, nor
    make another one: it gets EngineDied.
    """

    _process: ClassVar[int | None] = None
    """The process that had the first engine in itself: torch's threads wait for ever in those forked from it."""

    @takes_options(EngineConfig)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = engine_config(model, options)
        several = config.data_parallel_size > 1 or config.executor == "ray" or config.role != "both"
        several = several or config.kv_tier_listen is not None
        if not several:
            LLM._process = LLM._process or os.getpid()
            check_process(LLM._process)
        self._engine = imported(SEVERAL)(config) if several else Engine(config)
        self._shared = SharedEngine(self._engine)
        self._numbers = itertools.count()

    @property
    def config(self) -> EngineConfig:
        """The options the engine was made with."""
        return self._engine.config

    @property
    def spec(self) -> ModelSpec:
        """The model's description."""
        return self._engine.spec

    @property
    def _inputs(self) -> InputProcessor:
        return self._engine.inputs

    @property
    def _folder(self) -> Path:
        return self._engine.folder

    @takes_other_names
    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        adapter: AdapterChoice = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer prompts (texts or lists of token ids), in their order.

        One SamplingParams, or a mapping of its fields, serves all prompts, a list of them one each; likewise the name
        of an adapter, None for the model as it is. Of each prompt the last `truncate_prompt_tokens` stay, -1: as many
        as the context holds. If any prompt is invalid, none is run. One that fails on its way ends alone: when the
        others have ended, RequestFailed is raised, whose `outputs` are all. With `on_error="return"` they are returned,
        and those that failed have a `failure`.
        """
        several = cut_prompts(as_prompts(prompts, self._inputs), truncate_prompt_tokens, self._inputs)
        params = one_for_each(sampling_params, len(several))
        adapters = one_adapter_for_each(adapter, len(several))
        return self._all(several, params, progress, adapters=adapters, on_error=on_error)

    @takes_other_names
    def beam_search(
        self, prompts: Prompts, params: OneParams = None, *, adapter: AdapterChoice = None, progress: bool = False
    ) -> list[RequestOutput]:
        """The `beam_width` most probable answers to each prompt, the best first. Raises as `generate` does."""
        several = as_prompts(prompts, self._inputs)
        return self.generate(several, beam_params(params, len(several)), adapter=adapter, progress=progress)

    def __call__(self, inputs: Any, **options: Any) -> list[Any]:
        """Answer a text, a conversation or a list of them as transformers' text-generation pipelines do.

        Returns [{"generated_text": ...}], or a list of these for each of several inputs. `options` are sampling
        parameters, also `max_new_tokens`, `num_return_sequences`, `do_sample` and `return_full_text`.
        """
        generated = imported("kvern.serving.pipeline:generated")
        return list(generated(inputs, options, self.generate, self.chat))

    @takes_other_names
    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
    ) -> list[list[float]]:
        """Prompts as vectors of length 1, of which the first `dimensions` are kept, for models trained for that.

        Models that embed images take {"image": path, bytes, data URL or Pillow's} among the prompts.
        Of each prompt the first `truncate_prompt_tokens` are read, -1: as many as the context holds. Raises
        InvalidRequest for other models, and RequestFailed.
        """
        self._check_embeds()
        states = self._pooled(as_prompts(prompts, self._inputs), truncate_prompt_tokens, progress)
        return [embedding_of(state, dimensions) for state in states]

    @takes_other_names
    def classify(
        self, prompts: Prompts, *, truncate_prompt_tokens: int | None = None, progress: bool = False
    ) -> list[dict[str, float]]:
        """The probability of each label for each prompt, by an encoder that classifies texts.

        `truncate_prompt_tokens` as for `embed`. Raises InvalidRequest for other models, and RequestFailed.
        """
        labels = self._labels()
        states = self._pooled(as_prompts(prompts, self._inputs), truncate_prompt_tokens, progress)
        return [labels.probabilities(state) for state in states]

    @takes_other_names
    def encode(
        self,
        prompts: Prompts,
        *,
        pooling_task: Literal["embed", "classify"] = "embed",
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
    ) -> list[list[float]]:
        """`embed`, or the probabilities of `classify` in the order of the labels, under the name that others have."""
        return self._encoded(
            self._pooled(as_prompts(prompts, self._inputs), truncate_prompt_tokens, progress), pooling_task
        )

    def _pooled(self, prompts: Sequence[Prompt], most: int | None, progress: bool) -> list[bytes]:
        """The model's vector of each prompt, float32 and little-endian."""
        several = cut_prompts(prompts, most, self._inputs, ends=False)
        outputs = self._all(several, [None] * len(several), progress, embed=True)
        return [output.embedding or b"" for output in outputs]

    @takes_other_names
    def relevance(self, pairs: Sequence[tuple[str, str]], *, progress: bool = False) -> list[float]:
        """Returns the relevance of the second text of each pair to the first, by an encoder that reads both together.

        Raises InvalidRequest for other models, and RequestFailed.
        """
        way = way_of(self._folder, self.tokenizer)
        if not isinstance(way, PairClassifier):
            raise InvalidRequest(
                f"{self._name} does not judge pairs of texts: use an encoder that does, or compare what embed gives"
            )
        prompts = [self._inputs.pair(first, second) for first, second in pairs]
        outputs = self._all(prompts, [None] * len(prompts), progress, embed=True)
        return [way.score(output.embedding or b"") for output in outputs]

    @takes_other_names
    def score(
        self,
        pairs: Sequence[Pair],
        *,
        add_special_tokens: bool = True,
        adapter: AdapterChoice = None,
        progress: bool = False,
    ) -> list[Score]:
        """The log-likelihood of each (context, continuation), both texts or both token ids, in their order.

        Pairs of one context compute it once, through the prefix cache. `add_special_tokens`: texts begin with the
        tokens that the tokenizer puts before prompts. Raises InvalidRequest, and then none is run, or RequestFailed.
        """
        prompts = scored_prompts(self.tokenizer, pairs, add_special_tokens)
        token_ids, params = [item.token_ids for item in prompts], [item.params for item in prompts]
        outputs = self._all(token_ids, params, progress, adapters=one_adapter_for_each(adapter, len(prompts)))
        return [score_of(output, item) for output, item in zip(outputs, prompts, strict=True)]

    def _all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        progress: bool,
        embed: bool = False,
        adapters: Sequence[str | None] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        check_on_error(on_error)
        outputs: list[RequestOutput] = []
        ids = []
        options = RequestOptions(embed=embed, whole=True, namespace=self._namespace)
        try:
            with self._shared.held():
                for prompt, param, adapter in zip(prompts, params, adapters or [None] * len(prompts), strict=True):
                    ids.append(self._next_id())
                    outputs.append(self._engine.add(ids[-1], prompt, param, options, adapter=adapter))
            self._run(outputs, progress)
        except BaseException:
            self._shared.abort(ids)
            raise
        return checked(outputs, on_error)

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"

    @takes_other_names
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        tools: Tools = None,
        adapter: AdapterChoice = None,
        progress: bool = False,
        on_error: OnError = "raise",
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of {"role": ..., "content": ...}, through the model's chat template.

        `tools` are in OpenAI's form; `options` are those of ChatOptions. Each answer's `message` holds content,
        reasoning and tool calls.
        `on_error` as for `generate`.
        """
        conversations = as_conversations(messages)
        several = one_for_each(sampling_params, len(conversations))
        chats = [
            chat_request(self._inputs.chat, conversation, params, tools, **options)
            for conversation, params in zip(conversations, several, strict=True)
        ]
        adapters = one_adapter_for_each(adapter, len(chats))
        prompts, params = [chat.prompt for chat in chats], [chat.params for chat in chats]
        check_on_error(on_error)
        outputs = self._all(prompts, params, progress, adapters=adapters, on_error="return")
        for chat, output in zip(chats, outputs, strict=True):
            for answer in output.outputs:
                answer.message = chat.message(answer.text)
        return checked(outputs, on_error)

    @takes_other_names
    def stream(
        self, prompt: Prompt, sampling_params: OneParams = None, *, adapter: str | None = None
    ) -> Generator[RequestOutput]:
        """Yield the same growing output at each new token. Leaving the loop aborts the request.

        Raises RequestFailed, with the output, if it cannot go on.
        """
        request_id = self._next_id()
        with self._shared.held():
            options = RequestOptions(namespace=self._namespace)
            output = self._engine.add(request_id, prompt, as_params(sampling_params), options, adapter=adapter)
        seen = 0

        def size() -> int:
            return sum(len(answer.token_ids) for answer in output.outputs)

        def has_grown() -> bool:
            return output.finished or size() != seen

        try:
            finished = False
            while not finished:
                self._shared.wait_until(has_grown)
                finished = output.finished
                seen = size()
                if finished:
                    checked([output])
                yield output  # others may drive the engine meanwhile, and the output grow
        finally:
            self._shared.abort([request_id])

    @takes_other_names
    def stream_chat(
        self,
        messages: Messages,
        sampling_params: OneParams = None,
        *,
        tools: Tools = None,
        adapter: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation, with the options of `chat`; each answer's `message` grows with its text."""
        chat = chat_request(self._inputs.chat, messages, sampling_params, tools, **options)
        return self._followed(chat, adapter)

    def _followed(self, chat: ChatRequest, adapter: str | None) -> Iterator[RequestOutput]:
        grown = follow(chat)
        with contextlib.closing(self.stream(chat.prompt, chat.params, adapter=adapter)) as outputs:
            for output in outputs:
                yield grown(output)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that can be used."""
        return self._engine.adapters

    def load_adapter(self, name: str, path: str) -> None:
        """Read the LoRA adapter in a folder. Raises InvalidAdapter; the engine needs `max_adapters` or `adapters`."""
        with self._shared.held():
            self._engine.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Let nothing new use an adapter; what uses it goes on to its end. Raises InvalidRequest."""
        with self._shared.held():
            self._engine.unload_adapter(name)

    def chat_request(
        self,
        messages: Messages,
        sampling_params: SamplingParams,
        use: ToolUse = NO_TOOLS,
        options: PromptOptions = DEFAULT_PROMPT,
    ) -> ChatRequest:
        """A conversation as a prompt, parameters, and a reader of the answer. Raises InvalidRequest."""
        return self._inputs.chat.request(messages, sampling_params, use, options)

    def as_completed(
        self, inputs: Iterable[Input], *, max_in_flight: int | None = None
    ) -> Generator[RequestOutput | FailedRequest]:
        """Run (id, prompt, params) or (id, prompt, params, adapter) inputs, pulled lazily, and yield each as it
        ends, under its own id.

        An invalid input, or one that fails on the way, yields a FailedRequest and disturbs nobody; so does one whose id
        another input of this call has that has not ended. At most `max_in_flight` inputs (default: twice the batch) are
        held at once, so the input may be endless.
        """
        limit = max_in_flight or 2 * self._engine.max_batch_requests
        source = iter(inputs)
        alive: dict[str, tuple[str, RequestOutput]] = {}
        """The inputs by the caller's ids, which other calls may use at the same time; the engine has others."""
        exhausted = False
        try:
            while True:
                while not exhausted and len(alive) < limit:
                    try:
                        request_id, prompt, params, *adapter = next(source)
                    except StopIteration:
                        exhausted = True
                        break
                    try:
                        if request_id in alive:
                            raise InvalidRequest(f"request id {request_id!r} is in use: ids must differ")
                        name, number = adapter[0] if adapter else None, self._next_id()
                        with self._shared.held():
                            options = RequestOptions(whole=True, namespace=self._namespace)
                            alive[request_id] = number, self._engine.add(number, prompt, params, options, adapter=name)
                    except EngineDied:  # no fault of that input
                        raise
                    except KvernError as error:
                        yield FailedRequest(request_id, error)
                if not alive:
                    return
                self._shared.wait_until(lambda: any(output.finished for _, output in list(alive.values())))
                for request_id in [name for name, (_, output) in alive.items() if output.finished]:
                    output = replace(alive.pop(request_id)[1], request_id=request_id)
                    failure = output.failure
                    yield output if failure is None else FailedRequest(request_id, RequestFailed(failure, [output]))
        finally:
            self._shared.abort([number for number, _ in alive.values()])

    def check_generates(self) -> None:
        """Raises InvalidRequest if the model generates no text: it gives embeddings, or judges texts."""
        self._inputs.check_generates()

    def statistics(self) -> EngineStatistics:
        """Returns the engine's counters since it started."""
        with self._shared.held():
            return self._engine.statistics()

    def expert_tokens(self) -> list[list[int]]:
        """Returns the tokens of each expert of each layer since the engine started; empty for layers without experts.

        Tokens that fill up a batch on a GPU are counted as well.
        """
        with self._shared.held():
            return self._engine.expert_tokens()

    def close(self) -> None:
        """Abort what runs, free the memory, and end engines of other processes.

        Everything afterwards but `config`, `tokenizer` and another `close` raises EngineClosed.
        """
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, outputs: Sequence[RequestOutput], progress: bool) -> None:
        if not progress:
            self._shared.wait_until(lambda: all(output.finished for output in outputs))
            return
        from kvern.io.progress import generation_progress

        with generation_progress(len(outputs)) as report:
            before = self.statistics().generation_tokens
            running = len(outputs)
            while running:
                self._shared.wait_for_step()
                running = sum(not output.finished for output in outputs)
                report(len(outputs) - running, self.statistics().generation_tokens - before)
