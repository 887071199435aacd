"""The engines of a server, by the names of their models and adapters, and requests to one of them, for all handlers."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvern.api.conversation import ChatBody
from kvern.api.errors import HttpError
from kvern.api.fields import CommonFields
from kvern.api.limits import check_bounds, check_reported, reported_by
from kvern.engine.inputs import Prompt
from kvern.errors import ConfigError, shown
from kvern.request.outputs import RequestOutput
from kvern.request.request import RequestOptions
from kvern.request.sampling_params import SamplingParams
from kvern.server.admission import Admission, KeyLimits
from kvern.server.config import ServerConfig
from kvern.server.http import WRITERS
from kvern.server.keys import ApiKey, users_of
from kvern.serving.client import EngineClient
from kvern.serving.workload import Generation
from kvern.tools.chat import PromptOptions


class ServedEngine:
    """The engine of one model, for the names of the model and of its adapters."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self.client = client
        self.models = client.names
        self.admission = admission

    @property
    def names(self) -> list[str]:
        """The values of `model` for this engine."""
        return [*self.models, *(adapter.name for adapter in self.client.adapters.names.all())]

    def answers_for(self, name: str) -> bool:
        """True if the name is the model's, or that of one of its adapters."""
        return name in self.models or name in self.client.adapters.names

    def adapter_of(self, name: str) -> str | None:
        """Returns the adapter with this name; None for the model itself."""
        return None if name in self.models else name

    def entry(self, name: str, created: int) -> dict[str, object]:
        """Returns a name's entry in OpenAI's list of models, with the sizes of its model."""
        inputs = self.client.inputs
        sizes = {"max_model_len": inputs.max_model_len, "vocab_size": inputs.vocab_size}
        root, parent = (self.models[0], None) if name in self.models else (name, self.models[0])
        origin: dict[str, object] = {"root": root, "parent": parent, "permission": []}
        return {"id": name, "object": "model", "created": created, "owned_by": "kvern", **sizes, **origin}


Answerer = Callable[[dict[str, Any], ApiKey], Awaitable[object]]
"""Answers a request: from its body, which the answerer may change and empty, to the answer's body."""


@dataclass(frozen=True)
class Ask:
    """A request to an engine. `deadline` is in the event loop's time."""

    engine: ServedEngine
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    """The parameters of each prompt."""
    key: ApiKey
    options: RequestOptions
    deadline: float | None = None
    adapter: str | None = None
    """The adapter, if the request named one as its model."""

    @property
    def is_large(self) -> bool:
        """True if answers may have many log-probabilities."""
        return any(params.logprobs is not None or params.prompt_logprobs is not None for params in self.params)

    @property
    def sequences(self) -> int:
        """The number of sequences to generate."""
        return sum(params.sequences for params in self.params)


class Running:
    """A running request: an iterator that yields at each change until all answers have ended. `close` it in any
    case."""

    def __init__(
        self,
        ask: Ask,
        generations: list[Generation],
        news: asyncio.Event,
        held: contextlib.ExitStack,
    ) -> None:
        self.outputs = [generation.output for generation in generations]
        self._ask = ask
        self._generations = generations
        self._news = news
        self._held = held

    def __aiter__(self) -> AsyncIterator[None]:
        return self._ask.engine.client.generations.follow(self._generations, self._news, self._ask.deadline)

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds from the first step of the first prompt to its first token, and from there to its last token so
        far."""
        first = self._generations[0]
        if not first.first:
            return 0.0, 0.0
        return max(0.0, first.first - first.asked - first.output.queue_seconds), first.last - first.first

    def close(self) -> None:
        """Aborts what has not ended."""
        self._held.close()

    def leave(self) -> None:
        """Closes it, and frees its log-probabilities."""
        self.close()
        if self._ask.is_large:
            for output in self.outputs:
                WRITERS.submit(output.forget_logprobs)


class Service:
    """Engines, one for each model, for any number of APIs."""

    def __init__(self, clients: Sequence[EngineClient], config: ServerConfig, keys: Sequence[ApiKey] = ()) -> None:
        self.config = config
        self.users = users_of(keys, config)
        self._limits = limits = KeyLimits()
        self.engines = [
            ServedEngine(client, Admission(client, config.max_queue, len(self.users), limits)) for client in clients
        ]
        names = [name for engine in self.engines for name in dict.fromkeys(engine.names)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{twice} names two models or adapters: give each a name of its own")

    @property
    def names(self) -> list[str]:
        """The values of `model`: the names of the models and of their adapters."""
        return [name for engine in self.engines for name in engine.names]

    @property
    def load(self) -> int:
        """The number of admitted requests without an answer."""
        return self._limits.running

    @property
    def trouble(self) -> str | None:
        """The reason why some model has no engine that takes requests at present; None if all have one."""
        return next((trouble for one in self.engines if (trouble := one.client.trouble) is not None), None)

    @property
    def replicas(self) -> list[dict[str, object]]:
        """The state of each engine of models that have several."""
        several = (one for one in self.engines if one.client.replicas.named)
        return [
            {"model": one.models[0], "engine": replica.name, "ready": replica.supervisor.is_ready}
            for one in several
            for replica in one.client.replicas
        ]

    def engine_of(self, model: object) -> ServedEngine:
        """Returns the engine for a name. Raises HttpError if there is none."""
        for engine in self.engines:
            if isinstance(model, str) and engine.answers_for(model):
                return engine
        message = f"there is no model {shown(model)}: this server has {', '.join(self.names)}"
        raise HttpError(404, message, param="model", code="model_not_found")

    def model(self, body: Mapping[str, Any]) -> str:
        """Returns the model or adapter that a body names, by default the first model. Raises HttpError if there is
        none."""
        model = body.get("model")
        if model is None:
            return self.engines[0].models[0]
        self.engine_of(model)
        return str(model)

    def namespace(self, common: CommonFields, key: ApiKey) -> bytes:
        """Returns the namespace of a request; requests with the same one share cached blocks."""
        owner = key.name if len(self.users) > 1 and not self.config.share_prefix_cache else ""
        return f"{owner}\0{common.cache_salt}".encode() if owner or common.cache_salt else b""

    def prompt_options(self, conversation: ChatBody, common: CommonFields, key: ApiKey) -> PromptOptions:
        """Returns the options of a conversation's prompt, with the namespace of its cached token ids."""
        return dataclasses.replace(conversation.options, namespace=self.namespace(common, key))

    def ask(
        self,
        model: str,
        common: CommonFields,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        key: ApiKey,
        embed: bool = False,
    ) -> Ask:
        """Returns a request to the model's engine; `params` are for all prompts, or for each.

        Raises HttpError or InvalidParameter.
        """
        if isinstance(params, SamplingParams):
            if not embed:
                check_bounds(params, len(prompts))
            params = [params] * len(prompts)
        engine, timeout = self.engine_of(model), common.timeout
        options = replace(common.options, namespace=self.namespace(common, key), owner=key.owner, embed=embed)
        return Ask(
            engine,
            prompts,
            params,
            key,
            options,
            deadline=None if timeout is None else asyncio.get_running_loop().time() + timeout,
            adapter=engine.adapter_of(model),
        )

    async def start(self, ask: Ask, patient: bool = False) -> Running:
        """Submits all prompts to the engine, or none. With `patient`, only the ends of answers count as changes.

        Raises HttpError, InvalidRequest, InvalidParameter or EngineDied.
        """
        engine, news = ask.engine, asyncio.Event()
        generations: list[Generation] = []
        with contextlib.ExitStack() as held:
            held.enter_context(engine.admission.enter(ask.key, ask.sequences))
            held.callback(engine.client.generations.abort, generations)
            reported = 0
            with engine.admission.arriving(ask.key, ask.sequences) as arrived:
                for prompt, params in zip(ask.prompts, ask.params, strict=True):
                    generation = await engine.client.generations.submit(
                        prompt,
                        params,
                        ask.options,
                        news=news,
                        patient=patient,
                        adapter=ask.adapter,
                    )
                    generations.append(generation)  # at once, so that it is aborted if the next prompt is refused
                    arrived(params.sequences)
                    reported += reported_by(len(generation.output.prompt_token_ids), params)
                    check_reported(reported)
            return Running(ask, generations, news, held.pop_all())

    async def run(self, ask: Ask) -> list[RequestOutput]:
        """Returns all answers, complete. Raises what `start` raises, and DeadlineExceeded."""
        return (await self.ended(ask)).outputs

    async def ended(self, ask: Ask) -> Running:
        """Generates like `run`; the result also has the durations of prefill and decode."""
        running = await self.start(ask, patient=True)
        try:
            async for _ in running:
                pass
        except BaseException:
            running.leave()
            raise
        running.close()
        return running
