"""The engines of a server, by the names of their models and adapters; admission, and requests to one, for all handlers.

The queue of an engine is bounded, and each API key has limits; who is refused hears after what time to try again.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvern.api.completions import ENTRIES_AT_ONCE
from kvern.api.conversation import ChatBody
from kvern.api.errors import HttpError
from kvern.api.fields import CommonFields, check_bounds, check_reported, read_common, reported_by
from kvern.engine.inputs import Prompt
from kvern.errors import ConfigError, DeadlineExceeded, shown
from kvern.observe.metrics import KeyFigures
from kvern.plugins import imported
from kvern.request.outputs import RequestOutput
from kvern.request.request import PromptInput
from kvern.request.sampling_params import SamplingParams
from kvern.server.config import ServerConfig
from kvern.server.http import loaded, write_large
from kvern.server.image_memory import ImageMemory
from kvern.server.key_limits import KeyLimits, busy, check_any, subtract
from kvern.server.keys import ApiKey, KeyRing
from kvern.server.late_records import LateRecords
from kvern.server.usage import UsageCounter
from kvern.serving.client import EngineClient
from kvern.serving.served import SERVED, Ledger, ServedRequest
from kvern.serving.workload import Generation
from kvern.text.content import has_media
from kvern.tools.chat import ChatRequest

if TYPE_CHECKING:
    from kvern.residency.keeper import Keeper
    from kvern.server.load_recorder import LoadRecorder
    from kvern.server.media import Media
    from kvern.server.stores.files import Store
    from kvern.server.tracing import Tracing

RATE_WINDOW = 128
"""The number of a key's last answers from which its rate is estimated."""
OLDEST = 5
"""Requests of each engine that reports name."""
WAITED: ContextVar[float] = ContextVar("WAITED", default=0.0)
"""The seconds that this request has waited for its model's first wake, which are a part of its `timeout`."""


class Admission:
    """Admits requests to one engine; `limits` count the requests to all engines.

    A key may fill the queue while the queue has free places. When it is full, each key may still have its share of
    `max_queue` waiting, and rows of its batches the same again, so that at most three times `max_queue` wait in all.
    """

    def __init__(
        self, client: EngineClient, max_queue: int, keys: KeyRing, limits: KeyLimits, images: ImageMemory
    ) -> None:
        self._client = client
        self._max_queue = max_queue
        self._keys = keys
        self._limits = limits
        self._images = images
        self._ended: dict[str, deque[float]] = {}
        self._arriving: Counter[str] = Counter()

    @contextlib.contextmanager
    def enter(self, key: ApiKey, sequences: int = 0, image_bytes: int = 0) -> Iterator[None]:
        """Admits a request of `sequences` sequences until the block ends. Raises HttpError 429, 403 or 400."""
        check_any(key)
        excess = self._limits.excess(key)
        if excess is not None:
            reason, message, seconds = excess
            raise self._refusal(reason, message, self._seconds_for(key, 1) if seconds is None else seconds)
        if sequences:
            self._check_queue(key, sequences)
        with self._images.held(key, image_bytes, lambda why: self._refusal("images", why, self._seconds_for(key, 1))):
            self._limits.begin(key)
            try:
                yield
            finally:
                self._ended.setdefault(key.line, deque(maxlen=RATE_WINDOW)).extend([time.monotonic()] * sequences)
                self._limits.end(key)

    @contextlib.contextmanager
    def arriving(self, key: ApiKey, sequences: int) -> Iterator[Callable[[int], None]]:
        """Counts sequences as waiting while their prompts are prepared.

        The block calls the yielded function with the number of sequences that it has handed to the engine.
        """
        left = sequences
        self._arriving[key.line] += sequences

        def arrived(number: int) -> None:
            nonlocal left
            left -= number
            subtract(self._arriving, key.line, number)

        try:
            yield arrived
        finally:
            arrived(left)

    def _check_queue(self, key: ApiKey, sequences: int) -> None:
        most = self._max_queue + self._client.replicas.max_batch_requests
        if sequences > most:
            message = f"the request asks for {sequences} sequences, and this server runs and queues {most} at most"
            raise HttpError(400, f"{message}: ask for fewer at once", param="n")
        excess = self._client.replicas.unfinished + self._arriving.total() + sequences - most
        if excess <= 0:
            return
        waiting = self._client.replicas.turns.waiting(key.line) + self._arriving[key.line]
        users = len(self._keys.users)
        if users > 1 and waiting + sequences <= self._max_queue // users:
            return
        if users == 1:
            waiting = self._max_queue + excess - sequences
            message = f"{waiting} sequences wait already, and this server lets {self._max_queue} wait"
        else:  # nothing of what other keys do
            message, excess = "the server has more requests than it lets wait", sequences
        raise self._refusal("queue", message, self._seconds_for(key, excess))

    def _seconds_for(self, key: ApiKey, sequences: int) -> float:
        """Estimates the seconds that the next `sequences` answers take, from the rate of the key's last answers."""
        ended = self._ended.get(key.line)
        if ended is None or len(ended) < 2:
            return 1.0
        return sequences * (time.monotonic() - ended[0]) / len(ended)

    def _refusal(self, reason: str, message: str, seconds: float) -> HttpError:
        self._client.refusals.count(reason)
        return busy(message, seconds)


class ServedEngine:
    """The engine of one model, for the names of the model and of its adapters. `figures` count what keys use of it."""

    def __init__(self, client: EngineClient, admission: Admission, figures: KeyFigures) -> None:
        self.client = client
        self.figures = figures
        self.models = client.names
        self.admission = admission

    @property
    def names(self) -> list[str]:
        """The values of `model` for this engine."""
        return [*self.models, *(adapter.name for adapter in self.client.adapters.names.all())]

    def answers_for(self, name: str) -> bool:
        """True if the name is the model's, or that of one of its adapters."""
        return name in self.models or name in self.client.adapters.names

    def entry(self, name: str, created: int) -> dict[str, object]:
        """Returns a name's entry in OpenAI's list of models, with the sizes of its model."""
        inputs = self.client.inputs
        sizes = {"max_model_len": inputs.max_model_len, "vocab_size": inputs.vocab_size}
        reads = ["text", "image"] if inputs.model.reads_images else ["text"]
        kinds: dict[str, object] = {"architecture": {"input_modalities": reads, "output_modalities": ["text"]}}
        kinds |= {"weights_version": self.client.weights.shown}
        root, parent = (self.models[0], None) if name in self.models else (name, self.models[0])
        origin: dict[str, object] = {"root": root, "parent": parent, "permission": []}
        return {"id": name, "object": "model", "created": created, "owned_by": "kvern", **sizes, **origin, **kinds}


Answerer = Callable[[dict[str, Any], ApiKey], Awaitable[object]]
"""Answers a request: from its body, which the answerer may change and empty, to the answer's body."""


@dataclass(frozen=True)
class Ask:
    """A request to the engine of `model`, a model or an adapter. Raises HttpError or InvalidParameter."""

    model: str
    common: CommonFields
    prompts: Sequence[Prompt]
    given: SamplingParams | Sequence[SamplingParams]
    """The parameters of all prompts, or of each."""
    key: ApiKey
    embed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.given, SamplingParams) and not self.embed:
            check_bounds(self.given, len(self.prompts))

    @property
    def params(self) -> Sequence[SamplingParams]:
        """The parameters of each prompt."""
        return [self.given] * len(self.prompts) if isinstance(self.given, SamplingParams) else self.given

    @property
    def is_large(self) -> bool:
        """True if answers may have many log-probabilities."""
        return any(params.logprobs is not None or params.prompt_logprobs is not None for params in self.params)

    @property
    def image_bytes(self) -> int:
        """The bytes of the images of all prompts."""
        return sum(len(file) for one in self.prompts if isinstance(one, PromptInput) for file in one.attachments)

    @property
    def sequences(self) -> int:
        """The number of sequences to generate."""
        return sum(params.sequences for params in self.params)


WriteSome = Callable[[Sequence[RequestOutput]], int]
"""Encodes some log-probabilities of answers that grow. Returns how many; 0: there are no more at present."""


class Running:
    """A running request: an iterator that yields at each change until all answers have ended. `close` it in any
    case."""

    def __init__(
        self,
        generations: list[Generation],
        follow: Callable[[], AsyncIterator[None]],
        held: contextlib.ExitStack,
    ) -> None:
        self.outputs = [generation.output for generation in generations]
        self._generations = generations
        self._follow = follow
        self._held = held

    def __aiter__(self) -> AsyncIterator[None]:
        return self._follow()

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


class Service:
    """Engines, one for each model, for any number of APIs."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        config: ServerConfig,
        keys: KeyRing,
        keeper: "Keeper | None" = None,
    ) -> None:
        """`keeper`: that of several models, whose clients come with their first requests; None: `clients` are all."""
        self.config = config
        self.keeper = keeper
        self.keys = keys
        self.stored_files: Callable[[], Store] | None = None
        """Gives the files that clients upload, if the server keeps any."""
        self._images = ImageMemory(config.image_memory, keys)
        self._limits = KeyLimits()
        self.ledger = Ledger()
        """Remembers what became of requests."""
        self.late = LateRecords()
        """Waits for records that come after the end of their requests."""
        self.tracing: Tracing | None = None
        """Sends traces of requests, if anybody wants them."""
        self.recorder: LoadRecorder | None = None
        """Records the load, if anybody wants that."""
        self._first = clients[0].names[0] if keeper is None else keeper.residents[0].name
        self.figures = KeyFigures(self._first)
        """Counts HTTP requests of all models, and what keys use of the first."""
        self.engines: list[ServedEngine] = []
        """The models that can make requests: of several models, those that were woken once."""
        if keeper is not None:
            keeper.known = self._add
            clients = [resident.client for resident in keeper.residents if resident.client is not None]
        for client in clients:
            self._add(client)
        names = [name for engine in self.engines for name in dict.fromkeys(engine.names)]
        self.know_keys()
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{twice} names two models or adapters: give each a name of its own")

    def _add(self, client: EngineClient) -> None:
        admission = Admission(client, self.config.max_queue, self.keys, self._limits, self._images)
        figures = self.figures if client.names[0] == self._first else KeyFigures(client.names[0])
        self.engines.append(ServedEngine(client, admission, figures))
        self.know_keys()

    def know_keys(self) -> None:
        """Shows the keys in the figures of all models."""
        for figures in {self.figures, *(engine.figures for engine in self.engines)}:
            figures.know((key.name for key in self.keys.users), figures is self.figures)

    @functools.cached_property
    def media(self) -> "Media":
        """Reads the images that conversations name."""
        made: Media = imported("kvern.server.media:Media")(self.config, self.keys, self.stored_files)
        return made

    @property
    def names(self) -> list[str]:
        """The values of `model`: the names of the models and of their adapters."""
        models = self.engines if self.keeper is None else self.keeper.residents
        return [name for one in models for name in one.names]

    @property
    def load(self) -> int:
        """The number of admitted requests without an answer."""
        return self._limits.running

    @property
    def trouble(self) -> str | None:
        """The reason why some model has no engine that takes requests at present; None if all have one."""
        return next((trouble for one in self.engines if (trouble := one.client.replicas.trouble) is not None), None)

    @property
    def replicas(self) -> list[dict[str, object]]:
        """The state of each engine of models that have several."""
        several = (one for one in self.engines if one.client.replicas.named)
        return [{"model": one.models[0], **replica.state} for one in several for replica in one.client.replicas]

    @property
    def prefill_servers(self) -> list[dict[str, object]]:
        """The states of the servers that compute prompts for models here."""
        return [
            {"model": one.models[0], **state} for one in self.engines for state in one.client.replicas.prefill_servers
        ]

    @property
    def waits_for(self) -> list[str]:
        """Returns what has to come before everything works, for people."""
        return [said for one in self.engines for said in one.client.replicas.waits_for]

    @property
    def degraded(self) -> str | None:
        """The reason why something works less well than it should, though all models have engines; None: all works."""
        return next((found for one in self.engines if (found := one.client.replicas.degraded) is not None), None)

    def states(self) -> list[dict[str, object]]:
        """Returns the state of each engine: its verdict, options and CPU time, and its requests that have been here
        longest."""
        now, found = time.monotonic(), list[dict[str, object]]()
        for one in self.engines:
            for replica in one.client.replicas:
                verdict, ready = replica.metrics.time.verdict, replica.supervisor.is_ready
                oldest = sorted(replica.workload.running.values(), key=lambda generation: generation.asked)[:OLDEST]
                found.append(
                    {
                        "model": one.models[0],
                        **replica.state,
                        "verdict": verdict and {**verdict._asdict(), "share": round(verdict.share, 3)},
                        "step_parts": replica.metrics.layers.recent(),
                        "oldest_requests": [generation.told(now) for generation in oldest],
                        "steps_file": (replica.supervisor.link.ready.steps_file or None) if ready else None,
                        "options": one.client.config.chosen,
                        "processor_seconds": replica.supervisor.link.process.processor_seconds() if ready else None,
                    }
                )
        return found

    def engine_of(self, model: object) -> ServedEngine:
        """Returns the engine for a name. Raises HttpError if there is none."""
        for engine in self.engines:
            if isinstance(model, str) and engine.answers_for(model):
                return engine
        message = f"there is no model {shown(model)}: this server has {', '.join(self.names)}"
        raise HttpError(404, message, param="model", code="model_not_found")

    async def model(self, body: Mapping[str, Any], key: ApiKey) -> str:
        """Returns the model or adapter that a body names, by default the first model; one of several that was never
        woken is woken.

        Raises HttpError if there is none or the key may not wait for it, EngineUnavailable if it cannot be woken, or
        DeadlineExceeded.
        """
        model = body.get("model")
        if self.keeper is not None:
            model = self.keeper.residents[0].name if model is None else model
            resident, began = self.keeper.find(model), time.monotonic()
            WAITED.set(0.0)
            if resident is not None and resident.client is None:
                timeout = read_common(body).timeout
                if len(resident.waiting) >= self.config.max_queue:
                    raise busy(f"{len(resident.waiting)} requests wait for {resident.name} already", 1.0)
                with self._limits.waiting(key), self._in_time(resident.name):
                    async with asyncio.timeout(timeout):
                        await self.keeper.meet(resident)
                WAITED.set(time.monotonic() - began)
        if model is None:
            return self.engines[0].models[0]
        self.engine_of(model)
        return str(model)

    async def wake(self, model: str, key: ApiKey) -> None:
        """Waits until a model is awake. Raises EngineUnavailable, or HttpError if the key may not wait for it."""
        with self._limits.waiting(key), self.wanted(model):
            await self._woken(model, None)

    async def _woken(self, model: str, deadline: float | None) -> None:
        """Waits until a model that is wanted is awake. Raises EngineUnavailable or DeadlineExceeded."""
        resident = None if self.keeper is None else self.keeper.find(model)
        if self.keeper is not None and resident is not None:
            with self._in_time(model):
                async with asyncio.timeout_at(deadline):
                    await self.keeper.awake(resident)

    @contextlib.contextmanager
    def _in_time(self, model: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise DeadlineExceeded(f"timeout has passed before {model} was awake: allow more") from error

    def entries(self, created: int) -> list[dict[str, object]]:
        """Returns the entries of all names in OpenAI's list of models."""
        return [self.entry(name, created) for name in self.names]

    def entry(self, name: str, created: int) -> dict[str, object]:
        """Returns a name's entry in this list; one of several models has its state, and its sizes once it was awake.

        Raises HttpError if there is no such model.
        """
        resident = None if self.keeper is None else self.keeper.find(name)
        if self.keeper is None or resident is None:
            return self.engine_of(name).entry(name, created)
        state = {"state": self.keeper.state(resident)}
        if resident.client is not None:
            return {**self.engine_of(name).entry(name, created), **state}
        own = resident.model.engine.model_names
        root, parent = (own[0], None) if name in own else (name, own[0])
        origin: dict[str, object] = {"root": root, "parent": parent, "permission": []}
        return {"id": name, "object": "model", "created": created, "owned_by": "kvern", **origin, **state}

    def wanted(self, model: str) -> contextlib.AbstractContextManager[None]:
        """Wants a model awake while the block runs, if it is one of several."""
        resident = None if self.keeper is None else self.keeper.find(model)
        return contextlib.nullcontext() if self.keeper is None or resident is None else self.keeper.use(resident)

    def namespace(self, common: CommonFields, key: ApiKey) -> bytes:
        """Returns the namespace of a request; requests with the same one share cached blocks."""
        owner = key.name if self.keys.known and not self.config.share_prefix_cache else ""
        return f"{owner}\0{common.cache_salt}".encode() if owner or common.cache_salt else b""

    async def chat(
        self, model: str, talk: ChatBody, params: SamplingParams, common: CommonFields, key: ApiKey
    ) -> ChatRequest:
        """Returns a conversation as a prompt for the model, with a reader of its answer."""
        options = dataclasses.replace(talk.options, namespace=self.namespace(common, key))
        engine = self.engine_of(model)
        async with self.seen(engine, talk.messages, key) as messages:
            return await engine.client.inputs.chat(messages, params, talk.use, options, key.owner)

    @contextlib.asynccontextmanager
    async def seen(
        self, engine: ServedEngine, messages: list[dict[str, Any]], key: ApiKey
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Yields a conversation with the images that it names, for a model that reads any. Raises HttpError or
        InvalidRequest."""
        if engine.client.inputs.model.reads_images and any(has_media(message.get("content")) for message in messages):
            await loaded("kvern.server.media")
            async with self.media.read(messages, key) as found:
                yield found
        else:
            yield messages

    async def start(self, ask: Ask, patient: bool = False) -> Running:
        """Submits all prompts to the engine, or none. `patient` as in `Generation`.

        Raises HttpError, InvalidRequest, InvalidParameter or EngineDied.
        """
        engine = self.engine_of(ask.model)
        if (served := SERVED.get()) is not None:
            served.model = ask.model
        common, key = ask.common, ask.key
        namespace = self.namespace(common, key)
        options = replace(common.options, namespace=namespace, owner=key.owner, embed=ask.embed)
        now = asyncio.get_running_loop().time()
        deadline = None if common.timeout is None else now + common.timeout - WAITED.get()
        news, replicas = asyncio.Event(), engine.client.replicas
        generations: list[Generation] = []
        with contextlib.ExitStack() as held:
            held.enter_context(engine.admission.enter(key, ask.sequences, ask.image_bytes))
            if served is not None:
                self.ledger.begin(served)
            held.enter_context(self.wanted(ask.model))
            used = UsageCounter(engine.figures, key.name)
            held.callback(lambda: used.add([generation.output for generation in generations]))
            if self.recorder is not None and not ask.embed:
                held.callback(self.recorder.arrived(engine.models[0], key.owner), generations)
            held.callback(replicas.abort, generations)
            reported = 0
            with engine.admission.arriving(key, ask.sequences) as arrived:
                await self._woken(ask.model, deadline)
                for prompt, params in zip(ask.prompts, ask.params, strict=True):
                    generation = await replicas.submit(
                        prompt,
                        params,
                        options,
                        news=news,
                        patient=patient,
                        adapter=None if ask.model in engine.models else ask.model,
                    )
                    generations.append(generation)  # at once, so that it is aborted if the next prompt is refused
                    arrived(params.sequences)
                    reported += reported_by(len(generation.output.prompt_token_ids), params)
                    check_reported(reported)
            follow = functools.partial(replicas.follow, generations, news, deadline)
            return Running(generations, follow, held.pop_all())

    def note_end(self, served: ServedRequest, status: int) -> None:
        """Notes that a request has ended."""
        served.status = status
        served.ended = served.seconds
        self.ledger.end(served)
        if self.tracing is not None:
            self.tracing.ended(served, self.late)

    async def run(self, ask: Ask) -> list[RequestOutput]:
        """Returns all answers, complete. Raises what `start` raises, and DeadlineExceeded."""
        return (await self.ended(ask)).outputs

    async def ended(self, ask: Ask, write_some: WriteSome = lambda _: 0) -> Running:
        """Generates like `run`, with `write_some` as of `written`; the result also has the durations of prefill and
        decode."""
        running = await self.start(ask, patient=True)
        try:
            async for _ in running:
                written = 0
                while count := write_some(running.outputs):
                    written += count
                    if written >= ENTRIES_AT_ONCE:
                        written = 0
                        await asyncio.sleep(0)
        except BaseException:
            running.close()
            raise
        running.close()
        return running

    async def written(
        self, ask: Ask, write: Callable[[Running], object], write_some: WriteSome = lambda _: 0
    ) -> object:
        """Generates like `ended` and returns what `write` makes of the answers; if they are large, as JSON.

        `write_some` encodes a part of what answers have so far.
        """
        running = await self.ended(ask, write_some)
        return await write_large(lambda: write(running)) if ask.is_large else write(running)
