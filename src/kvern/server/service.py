"""What the handlers of all APIs share: one engine, who may use it, and requests of any API on their way through it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.engine.client import EngineClient
from kvern.engine.generation import Generation
from kvern.engine.inputs import Prompt
from kvern.errors import InvalidParameter, shown
from kvern.outputs import RequestOutput
from kvern.sampling_params import MAX_WIDE_INTEGER, SamplingParams
from kvern.server.admission import Admission
from kvern.server.config import ServerConfig
from kvern.server.http import HttpError
from kvern.server.keys import ApiKey, users_of

LONGEST_LISTS = {
    "stop": 64,
    "stop_token_ids": 1024,
    "visible_token_ids": 1024,
    "bad_words": 1024,
    "allowed_token_ids": 1 << 20,
    "logit_bias": 4096,
}
MOST_ENTRIES = 1 << 21
"""Of all these lists, for all answers: each answer brings its own to the engine."""
LONGEST_STOP = 1024
"""Characters of one stop string or bad word."""
MOST_SAMPLES = 128
MOST_SEQUENCES = 1024
"""Prompts times `n`, or beams, of one request."""
MOST_LOGPROBS = 8192
"""Answers of one request times the log-probabilities that a step reports for each: some 100 bytes each, every step."""
MOST_METADATA = 16
LONGEST_METADATA_NAME = 64
LONGEST_METADATA = 512
MOST_PROMPT_LOGPROBS = 1 << 18
"""Of one request's prompts: each entry takes some 200 bytes here, and 20 on the wire."""
LONGEST_TIMEOUT = 7 * 24 * 3600.0
LONGEST_SALT = 256

OWN_FIELDS = ("priority", "timeout", "cache_salt")
"""What every API takes beside its own parameters and those of SamplingParams."""


@dataclass(frozen=True)
class Ask:
    """Prompts to answer, as the engine needs to know. `deadline` is of the event loop's clock."""

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    """One for each prompt."""
    key: ApiKey
    priority: int = 0
    namespace: bytes = b""
    deadline: float | None = None
    embed: bool = False
    """The prompts' last hidden states are wanted."""
    adapter: str | None = None
    """The adapter that the model was named by."""

    @property
    def sequences(self) -> int:
        """Sequences that will be generated."""
        return sum(params.sequences for params in self.params)


class Running:
    """An ask that the engine works on: iterate to wake at each news, until all have ended. `close` it in any case."""

    def __init__(
        self,
        service: "Service",
        ask: Ask,
        generations: list[Generation],
        news: asyncio.Event,
        held: contextlib.ExitStack,
    ) -> None:
        self.outputs = [generation.output for generation in generations]
        self._service, self._ask, self._generations, self._news, self._held = service, ask, generations, news, held

    def __aiter__(self) -> AsyncIterator[None]:
        return self._service.client.follow(self._generations, self._news, self._ask.deadline)

    def close(self) -> None:
        """End what has not ended."""
        self._held.close()


class Service:
    """One engine behind any number of APIs."""

    def __init__(
        self, client: EngineClient, config: ServerConfig, models: Sequence[str], keys: Sequence[ApiKey] = ()
    ) -> None:
        self.client = client
        self.config = config
        self.models = list(models)
        self.users = users_of(keys, config)
        self.admission = Admission(client, config.max_queue, len(self.users))

    @property
    def names(self) -> list[str]:
        """What `model` may be: the model's names, and those of its adapters."""
        return [*self.models, *(adapter.name for adapter in self.client.adapters.all())]

    def model(self, body: Mapping[str, Any]) -> str:
        """The model or adapter that a body names, or the only model. Raises HttpError."""
        model = self.models[0] if body.get("model") is None else body["model"]
        if model not in self.models and (not isinstance(model, str) or model not in self.client.adapters):
            message = f"there is no model {shown(model)}: this server has {', '.join(self.names)}"
            raise HttpError(404, message, param="model", code="model_not_found")
        return str(model)

    def ask(
        self,
        body: Mapping[str, Any],
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        key: ApiKey,
        embed: bool = False,
    ) -> Ask:
        """With the fields that every API takes; `params` for all prompts, or for each.

        Raises HttpError or InvalidParameter.
        """
        if isinstance(params, SamplingParams):
            check_bounds(params, len(prompts))
            params = [params] * len(prompts)
        timeout = typed(body, "timeout", (int, float), None)
        if timeout is not None and not 0 < timeout <= LONGEST_TIMEOUT:
            raise HttpError(
                400, f"timeout is {shown(timeout)}: it must be above 0 and at most {LONGEST_TIMEOUT}", param="timeout"
            )
        salt = typed(body, "cache_salt", str, "")
        if len(salt) > LONGEST_SALT:
            message = f"cache_salt has {len(salt)} characters: at most {LONGEST_SALT}"
            raise HttpError(400, message, param="cache_salt")
        model = self.model(body)
        owner = key.name if len(self.users) > 1 and not self.config.share_prefix_cache else ""
        return Ask(
            prompts,
            params,
            key,
            priority=typed(body, "priority", int, 0),
            namespace=f"{owner}\0{salt}".encode() if owner or salt else b"",
            deadline=None if timeout is None else asyncio.get_running_loop().time() + timeout,
            embed=embed,
            adapter=None if model in self.models else model,
        )

    async def start(self, ask: Ask, patient: bool = False) -> Running:
        """Hand all prompts to the engine, or none; with `patient`, only the ends are news.

        Raises HttpError, InvalidRequest, InvalidParameter or EngineDied.
        """
        news = asyncio.Event()
        generations: list[Generation] = []
        with contextlib.ExitStack() as held:
            held.enter_context(self.admission.enter(ask.key, ask.sequences))
            held.callback(self.client.abort, generations)
            reported = 0
            with self.admission.arriving(ask.key, ask.sequences) as arrived:
                for prompt, params in zip(ask.prompts, ask.params, strict=True):
                    generation = await self.client.submit(
                        prompt,
                        params,
                        news=news,
                        priority=ask.priority,
                        owner=ask.key.line,
                        namespace=ask.namespace,
                        embed=ask.embed,
                        patient=patient,
                        adapter=ask.adapter,
                    )
                    generations.append(generation)  # at once, so that it is aborted if the next prompt is refused
                    arrived(params.sequences)
                    reported += reported_by(generation, params)
                    check_reported(reported)
            return Running(self, ask, generations, news, held.pop_all())

    async def run(self, ask: Ask) -> list[RequestOutput]:
        """Generate all. Raises what `start` raises, and DeadlineExceeded."""
        running = await self.start(ask, patient=True)
        try:
            async for _ in running:
                pass
        finally:
            running.close()
        return running.outputs


def check_bounds(params: SamplingParams, prompts: int) -> None:
    """Refuse what would cost the server more than any use needs. Raises InvalidParameter."""
    for name, most in LONGEST_LISTS.items():
        value = getattr(params, name)
        if value is not None and not isinstance(value, str) and len(value) > most:
            raise InvalidParameter(f"{name} has {len(value)} entries: this server takes {most} at most")
    for word in (*params.stop_strings, *(params.bad_words or ())):
        if len(word) > LONGEST_STOP:
            raise InvalidParameter(f"stop or bad_words hold a text of {len(word)} characters: at most {LONGEST_STOP}")
    if params.n > MOST_SAMPLES:
        raise InvalidParameter(f"n is {params.n}: this server takes {MOST_SAMPLES} at most")
    sequences, reported = params.sequences, 1 + (params.logprobs or 0)
    entries = sum(len(getattr(params, name) or ()) for name in LONGEST_LISTS)
    if prompts * sequences * entries > MOST_ENTRIES:
        raise InvalidParameter(
            f"{prompts * sequences} answers with {entries} stop strings, banned words, biases and token ids each are "
            f"more than {MOST_ENTRIES}: ask for fewer answers at once"
        )
    if prompts * sequences > MOST_SEQUENCES:
        name = "n" if params.beam_width is None else "beam_width"
        raise InvalidParameter(
            f"{prompts} prompts times {name} {sequences} are {prompts * sequences} answers: this server gives "
            f"{MOST_SEQUENCES} at most to one request"
        )
    if prompts * sequences * reported > MOST_LOGPROBS:
        raise InvalidParameter(
            f"logprobs is {params.logprobs}: {prompts * sequences} answers with {reported} each are "
            f"{prompts * sequences * reported} in a step, and this server gives {MOST_LOGPROBS}: ask for fewer"
        )


def read_metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """`metadata`, texts by name, within OpenAI's limits. Raises HttpError."""
    metadata: dict[str, str] = typed(body, "metadata", dict, {})
    if len(metadata) > MOST_METADATA:
        raise HttpError(400, f"metadata has {len(metadata)} entries: at most {MOST_METADATA}", param="metadata")
    for name, value in metadata.items():
        if len(name) > LONGEST_METADATA_NAME:
            message = f"metadata has a name of {len(name)} characters: at most {LONGEST_METADATA_NAME}"
            raise HttpError(400, message, param="metadata")
        if not isinstance(value, str) or len(value) > LONGEST_METADATA:
            message = f"metadata[{name!r}] must be a text of at most {LONGEST_METADATA} characters"
            raise HttpError(400, message, param="metadata")
    return metadata


def reported_by(generation: Generation, params: SamplingParams) -> int:
    """How many log-probabilities of its prompt are asked for."""
    if params.prompt_logprobs is None:
        return 0
    tokens = len(generation.output.prompt_token_ids) - params.prompt_logprobs_from
    return max(tokens, 0) * (1 + params.prompt_logprobs)


def check_reported(entries: int) -> None:
    """Refuse log-probabilities of prompts that nobody could read, or the server hold. Raises InvalidParameter."""
    if entries > MOST_PROMPT_LOGPROBS:
        raise InvalidParameter(
            f"prompt_logprobs asks for {entries} log-probabilities: this server gives {MOST_PROMPT_LOGPROBS} at most "
            "to one request; send fewer prompts at once, ask for fewer, or use prompt_logprobs_from"
        )


def typed(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """A field of this type, or the default if it is missing or null; integers have 64 bits. Raises HttpError."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(JSON_NAMES[kind] for kind in kinds)
        raise HttpError(400, f"{name} is {shown(value)}: it must be {expected}", param=name)
    if isinstance(value, int) and not -MAX_WIDE_INTEGER - 1 <= value <= MAX_WIDE_INTEGER:
        message = f"{name} is {shown(value)}: it must be at least -2**63 and below 2**63"
        raise HttpError(400, message, param=name)
    return value


JSON_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
