"""Load on a completion server over HTTP, and the times that its clients measure.

Sample (prompt, lengths) --Sender--> body (bytes) --at its arrival time--> Outcome
                                     all of a LoadRun --> summary, as JSON
"""

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kvern.bench.http_client import BrokenReply, HttpClient, Reply, StreamReply, message_of
from kvern.errors import ConfigError
from kvern.loads.arrivals import arrivals

Progress = Callable[[int], AbstractContextManager[Callable[[int, int], None]]]
"""Makes a function report(requests done, tokens generated) for so many requests."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: token ids, a text or chat messages, and the number of tokens it wants. `kind` groups the
    outcomes."""

    prompt: list[int] | str | list[dict[str, Any]]
    output_tokens: int | None
    prompt_tokens: int = 0
    """The number as far as it is known here; the server's own count takes precedence."""
    kind: str = ""


@dataclass(slots=True)
class Outcome:
    """The measurements of one request in seconds. A failed request has an error and nothing else counts."""

    kind: str
    started: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    ttft: float = 0.0
    e2el: float = 0.0
    gaps: list[float] = field(default_factory=list)
    error_kind: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class LoadRun:
    """All outcomes of a load, its duration in seconds, and the processor seconds that the clients took; also those of
    the server and of its engines, if it tells them."""

    outcomes: list[Outcome]
    seconds: float
    client_seconds: float
    server_seconds: float | None = None
    engine_seconds: float | None = None
    latest_send: float | None = None
    """The most seconds that a request was begun after its time; None where they had no times."""

    def of(self, kind: str) -> "LoadRun":
        """Returns the outcomes of one kind of request; nobody knows what of the server's time was for them."""
        return LoadRun(
            [outcome for outcome in self.outcomes if outcome.kind == kind], self.seconds, self.client_seconds
        )


class Sender:
    """Sends samples to one model of one server.

    `body` holds the fields that all requests have. `timeout` is the limit of a request in seconds.
    """

    def __init__(
        self,
        client: HttpClient,
        endpoint: str,
        model: str,
        body: Mapping[str, Any],
        *,
        chat: bool = False,
        timeout: float = 3600.0,
        progress: Progress | None = None,
    ) -> None:
        self.chat = chat
        self._client = client
        self._endpoint = endpoint
        self._timeout = timeout
        self._progress = progress
        self._own = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._body = dict(body)

    async def run(
        self,
        samples: Sequence[Sample],
        arrivals: Sequence[float] | None = None,
        concurrency: int | None = None,
        ahead: bool = True,
    ) -> LoadRun:
        """Sends each sample at its time in seconds from now (None: all now), at most `concurrency` at once.

        With `ahead` all bodies are encoded before the first is sent, else each one in a thread after the one before.
        """
        bodies = [self._encode(sample) for sample in samples] if ahead else []
        gate = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
        done = tokens = 0
        latest = 0.0

        async def one(sample: Sample, body: bytes) -> Outcome:
            nonlocal done, tokens
            async with gate:
                outcome = await self._send(sample, body)
            done += 1
            tokens += outcome.output_tokens
            report(done, tokens)
            return outcome

        spent = processor_seconds(await engine_states(self._client))
        with self._progress(len(samples)) if self._progress else contextlib.nullcontext(_ignore) as report:
            began, busy = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as group:
                tasks = []
                for number, at in enumerate(arrivals or [0.0] * len(samples)):
                    if ahead:
                        sample, body = samples[number], bodies[number]
                    else:
                        sample, body = await asyncio.to_thread(self._prepare, samples, number)
                    # answers are read meanwhile, also where requests are late or come together
                    await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                    latest = max(latest, time.perf_counter() - began - at)
                    tasks.append(group.create_task(one(sample, body)))
            seconds, busy = time.perf_counter() - began, time.process_time() - busy
        after = processor_seconds(await engine_states(self._client))
        server, engine = (
            None if one is None or other is None else other - one for one, other in zip(spent, after, strict=True)
        )
        outcomes = [task.result() for task in tasks]
        return LoadRun(outcomes, seconds, busy, server, engine, None if arrivals is None else latest)

    def _prepare(self, samples: Sequence[Sample], number: int) -> tuple[Sample, bytes]:
        sample = samples[number]
        return sample, self._encode(sample)

    def _encode(self, sample: Sample) -> bytes:
        body: dict[str, Any] = dict(self._own)
        prompt = sample.prompt
        if self.chat:
            body["messages"] = prompt if _is_conversation(prompt) else [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if sample.output_tokens is not None:
            body["max_completion_tokens" if self.chat else "max_tokens"] = sample.output_tokens
        return msgspec.json.encode({**body, **self._body})

    async def _send(self, sample: Sample, body: bytes) -> Outcome:
        reply = StreamReply()
        outcome = Outcome(sample.kind, time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.send("POST", self._endpoint, body, reply)
        except TimeoutError:
            outcome.error_kind, outcome.error = "timeout", f"no complete answer within {self._timeout:g} seconds"
        except OSError as error:
            outcome.error_kind, outcome.error = "no connection", str(error)
        except BrokenReply as error:
            outcome.error_kind, outcome.error = "broken stream" if reply.status else "no answer", str(error)
        else:
            _read(reply, sample, outcome)
        return outcome


def _ignore(done: int, tokens: int) -> None:
    pass


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _read(reply: StreamReply, sample: Sample, outcome: Outcome) -> None:
    """Fills in the outcome of a complete reply."""
    if reply.status != 200:
        outcome.error_kind, outcome.error = f"HTTP {reply.status}", _text(bytes(reply.content))
    elif reply.error is not None:
        outcome.error_kind, outcome.error = "error in stream", reply.error
    elif not reply.finished:
        outcome.error_kind, outcome.error = "broken stream", "it ended without [DONE]"
    elif not reply.last:
        outcome.error_kind, outcome.error = "empty stream", "it held no choices"
    else:
        usage = reply.usage
        outcome.prompt_tokens = (usage and usage.prompt_tokens) or sample.prompt_tokens
        outcome.output_tokens = (usage and usage.completion_tokens) or reply.token_chunks
        outcome.cached_tokens = (
            usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
        )
        outcome.ttft = (reply.first or reply.last) - outcome.started
        outcome.e2el = reply.last - outcome.started
        outcome.gaps = reply.gaps


def _text(content: bytes) -> str:
    try:
        return message_of(msgspec.json.decode(content))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content.decode(errors="replace")[:300].strip()


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Returns the times at which so many requests arrive, in seconds; see `arrivals`. Raises ConfigError."""
    return list(itertools.islice(arrivals(rng, rate, burstiness), count))


async def fetch(client: HttpClient, endpoint: str, timeout: float = 30.0) -> Any:
    """Returns the JSON at an endpoint; None if the server does not have it. Raises ConfigError if it does not
    answer."""
    reply = Reply()
    try:
        async with asyncio.timeout(timeout):
            await client.send("GET", endpoint, b"", reply)
    except (OSError, BrokenReply) as error:
        raise ConfigError(f"{client.url} does not answer: {error or 'no answer in time'}; is the server up?") from None
    if reply.status in (401, 403):
        raise ConfigError(f"{client.url} answers {reply.status}: {_text(bytes(reply.content))}")
    try:
        return msgspec.json.decode(reply.content) if reply.status == 200 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def engine_states(client: HttpClient) -> dict[str, Any]:
    """Returns kvern's answer at /v1/engines; an empty one from other servers, and if the key may not read it."""
    try:
        found = await fetch(client, "/v1/engines")
    except ConfigError:
        return {}
    return found if isinstance(found, dict) and found.get("data") else {}


def processor_seconds(states: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Returns the CPU time that a server and its engines have taken, as far as it tells."""
    engines = [engine.get("processor_seconds") for engine in states.get("data", [])]
    return states.get("processor_seconds"), None if not engines or None in engines else sum(engines)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs on uvloop if available, with as many open connections as the system allows."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    from kvern.io.open_files import raise_limit

    raise_limit()
    return uvloop.run(work)
