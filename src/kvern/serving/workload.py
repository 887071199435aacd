"""The requests to one engine: those that it has or that its successor will get, and their results."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from kvern.engine.output import OutputProcessor
from kvern.errors import EngineUnavailable, KvernError, RequestFailed, UnreadableContent, in_a_line
from kvern.observe.metrics import Metrics, RequestTimes
from kvern.request.events import TokenEvent
from kvern.request.outputs import RequestOutput
from kvern.request.record import RequestRecord
from kvern.request.request import Progress, PromptInput, RequestSpec
from kvern.serving.prefix_index import EnginePrefixes, Expected, Level, cached_tokens
from kvern.serving.prefix_record import answer_tokens
from kvern.serving.probation import Probation
from kvern.serving.served import Passage, ServedRequest
from kvern.serving.wire import AddRequest, FinishRequests, WireMessage

STEPS_AT_ONCE = 32
"""The steps after which somebody who waits for the end of an answer is woken, to write what has come."""


class Generation:
    """`output` grows, and `news` is set whenever it has. Times are of the monotonic clock.

    With `patient`, `news` is set only at the end, and when so many steps brought it on that something may be written.
    """

    def __init__(
        self,
        output: RequestOutput,
        spec: RequestSpec,
        news: asyncio.Event,
        asked: float,
        patient: bool,
    ) -> None:
        self.output = output
        self.news = news
        self.patient = patient
        self.asked = asked
        self.first = 0.0
        self.last = 0.0
        self.error: KvernError | None = None
        self.begun_at = 0.0
        """When the present engine got it; 0: it has not."""
        self.resumed = False
        """An engine that died had it."""
        self.spared = False
        """An engine that had it was killed, for which it was not suspected, and it has not got on since."""
        self.hands_over = False
        """The engine that has it computes its prompt for another."""
        self.handed_over = False
        """An engine has computed its prompt for another."""
        self.stored_tokens = 0
        """The tokens of its prompt of which stores have pages, as the engine that computes it for others has said."""
        self.names: Iterable[bytes] = ()
        """The names of its prompt's prefixes, by which cached ones are found."""
        self.levels: Sequence[Level] = ()
        """Engines that had some of it cached when its own was chosen."""
        self.expected: Expected | None = None
        """The names of prefixes that its engine will have cached once it has computed the prompt."""
        self.workload: Workload | None = None
        """The requests among which it is, until it has ended."""
        self.tokens = 0
        """The approximate number of tokens that its engine computes for it."""
        self.progress = 0
        """The number of steps of the present engine that brought it on."""
        self.spec = spec
        self.served: ServedRequest | None = None
        """The HTTP request that it belongs to, if any."""
        self._passage: Passage | None = None

    @property
    def most_tokens(self) -> int:
        """The approximate number of tokens to compute for it if nothing is cached."""
        return self.spec.prompt_length + answer_tokens(self.spec)

    def times(self, now: float) -> RequestTimes:
        """Returns its durations if it ends now."""
        return RequestTimes(now - self.asked, now - self.first if self.first else None)

    def told(self, now: float) -> dict[str, object]:
        """Returns its id, with its seconds and tokens so far."""
        tokens = sum(len(answer.token_ids) for answer in self.output.outputs)
        return {"id": self.output.request_id, "seconds": round(now - self.asked, 3), "tokens": tokens}

    def fail(self, error: KvernError) -> None:
        """Ends it with this error."""
        self.error = error
        self.news.set()

    def lost_adapter(self, lost: Mapping[int, Exception]) -> RequestFailed | None:
        """Why it ends, if its adapter is one of those, by key, that cannot be read any more."""
        error = None if self.spec.adapter is None else lost.get(self.spec.adapter)
        return None if error is None else RequestFailed(f"the adapter cannot be read again: {error}")

    @property
    def begun(self) -> bool:
        """The present engine has it."""
        return self.begun_at > 0

    def begin(self, engine: str) -> None:
        """An engine gets it."""
        self.begun_at = time.monotonic()
        if self.served is not None:
            answers = 1 if self.spec.params.beam_width is not None else len(self.spec.answer_ids)
            self._passage = self.served.given(engine, 0 if self.resumed or self.handed_over else answers)

    @property
    def may_hand_over(self) -> bool:
        """An engine may compute its prompt for another, which needs nothing of it but keys and values."""
        params, is_new = self.spec.params, not any(answer.token_ids for answer in self.output.outputs)
        return is_new and not self.handed_over and not self.spec.embed and params.prompt_logprobs is None

    def stored_part(self) -> RequestSpec:
        """Returns its prompt as far as stores have it, and one token more: the last one is never loaded."""
        tokens = self.spec.prompt.token_ids[: self.stored_tokens + 1]
        return msgspec.structs.replace(self.spec.prompt_alone(), prompt=PromptInput(tokens))

    def hand_over(self, record: RequestRecord | None, lacks: str) -> None:
        """Its prompt is computed, with this record: another engine goes on, and finds all but what it `lacks`."""
        if self.served is not None and self._passage is not None:
            self.served.handed_over(self._passage, record, lacks)
            self._passage = None
        self.hands_over, self.handed_over = False, True
        self.begun_at = 0.0
        self.progress = 0

    def lose(self, reason: str) -> None:
        """The engine that had it is gone, or gives it up."""
        if self.served is not None and self._passage is not None:
            self.served.lost(self._passage, reason)
            self._passage = None
        self.resumed = self.resumed or self.begun
        self.begun_at = 0.0
        self.progress = 0

    def message(self) -> AddRequest:
        """Returns the message with which an engine starts it, or continues it from its present answers.

        If it may be the cause of engines' deaths, every token is reported.
        """
        if self.hands_over:
            tells_parts = self.workload is not None and self.workload.stored is not None
            return AddRequest(self.spec.prompt_alone(tells_parts=tells_parts))
        if not any(answer.token_ids for answer in self.output.outputs) and not self.resumed:
            return AddRequest(self.spec)
        spec = msgspec.structs.replace(self.spec, whole=False)
        logprobs = self.output.prompt_logprobs
        reported = 0 if logprobs is None else len(logprobs.told)
        if self.spec.params.beam_width is not None:  # nothing of it arrives before all of it
            return AddRequest(spec, [Progress(0, [], reported)])
        going_on = (answer for answer in self.output.outputs if answer.finish_reason is None)
        return AddRequest(
            spec,
            [Progress(answer.index, answer.token_ids, 0 if answer.index else reported) for answer in going_on],
        )


def generation_id(request_id: str) -> str:
    """The generation that an engine's request belongs to: `requests` names its answers and beams after it."""
    return request_id.partition("#")[0]


class Turns:
    """Hands out turns; the scheduler runs lower ones first.

    A user who asks for much gets turns further and further out, and one who was away gets the present one.
    """

    def __init__(self) -> None:
        self._present = 0
        self._next: dict[str, int] = {}
        self._waiting: Counter[str] = Counter()

    def waiting(self, owner: str) -> int:
        """Sequences of this user that have a turn and have not begun."""
        return self._waiting[owner]

    def take(self, owner: str, count: int) -> int:
        """The turn of `count` sequences that belong to this user."""
        turn = max(self._present, self._next.get(owner, 0))
        self._next[owner] = turn + count
        self._waiting[owner] += count
        return turn

    def give_back(self, owner: str, count: int) -> None:
        """Sequences were ended before they began."""
        self._leave(owner, count)
        if owner in self._next:
            self._next[owner] = max(self._present, self._next[owner] - count)

    def began(self, turn: int, owner: str, count: int) -> None:
        """Sequences with this turn have begun to run."""
        self._leave(owner, count)
        if turn > self._present:
            self._present = turn
            self._next = {owner: following for owner, following in self._next.items() if following > turn}

    def _leave(self, owner: str, count: int) -> None:
        self._waiting[owner] -= count
        if not self._waiting[owner]:
            del self._waiting[owner]


logger = logging.getLogger("kvern")


class Receiver(Protocol):
    """An engine, as its workload knows it."""

    @property
    def is_ready(self) -> bool:
        """It takes requests."""

    @property
    def sequences(self) -> int:
        """The most sequences that run there at the same time."""

    def send(self, message: WireMessage) -> None:
        """Sends a message if it takes requests."""


class Workload:
    """`outputs` turns events into answers; `probation` says who may run. `prefixes`: what the engine has cached."""

    def __init__(
        self,
        supervisor: Receiver,
        outputs: OutputProcessor,
        probation: Probation,
        turns: Turns,
        metrics: Metrics,
        prefixes: EnginePrefixes,
    ) -> None:
        self._supervisor = supervisor
        self._outputs = outputs
        self._probation = probation
        self._turns = turns
        self._metrics = metrics
        self._prefixes = prefixes
        self.running: dict[str, Generation] = {}
        """The requests by id, waiting ones included."""
        self.sequences = 0
        """The number of sequences of all of them."""
        self.tokens = 0
        """The approximate number of tokens to compute for them."""
        self.computed = 0
        """The tokens of prompts that engines here have computed or are to compute, as far as they were not cached."""
        self.changed: Callable[[], None] = lambda: None
        """Is called when there is more to do, or less."""
        self._ended = asyncio.Event()
        self.begun_at = 0.0
        """The time at which those on trial, or all, were given to the present engine, by the monotonic clock."""
        self.engine = "0"
        """The name of the engine."""
        self.handed_over: Callable[[Generation], None] = lambda _: None
        """Is called when the engine has computed a prompt for another."""
        self.stored: Callable[[Generation], None] | None = None
        """Is called when stores have some of a prompt that is computed for others; None: nobody asks."""
        self.fate = "another engine took it over"
        """The reason why the engine loses its requests next."""
        self._served: WeakValueDictionary[str, ServedRequest] = WeakValueDictionary()
        """The HTTP requests of all that were here, by the names of their prompts."""

    @property
    def is_full(self) -> bool:
        """A request would wait until another ends."""
        return self.sequences >= self._supervisor.sequences

    def take(self, generation: Generation) -> None:
        """Have the engine work on it when it may."""
        self.running[generation.output.request_id] = generation
        generation.workload = self
        self.sequences += generation.spec.params.sequences
        uncached = self.uncached(generation)
        self.computed += uncached
        self._weigh(generation, uncached + (0 if generation.hands_over else answer_tokens(generation.spec)))
        if self._supervisor.is_ready and not self._probation.active:
            self._begin(generation)

    def give(self, generation: Generation, other: "Workload") -> None:
        """Let another engine go on with it: this one does not have it, or is gone."""
        self._remove(generation.output.request_id)
        generation.lose(self.fate)
        other.take(generation)

    def abort(self, generations: Sequence[Generation]) -> None:
        """End those of them that have not ended and are here; their blocks are free after the step that runs."""
        for generation in generations:
            if self._remove(generation.output.request_id) is not None:
                self._outputs.abort(generation.spec.answer_ids)
                self._metrics.finished(generation.output, generation.times(time.monotonic()))
                if not generation.first:
                    self._turns.give_back(generation.spec.owner, generation.spec.params.sequences)
                self._supervisor.send(FinishRequests(generation.spec.answer_ids))
                self.clear(generation)

    def end(self, generation: Generation, error: RequestFailed | EngineUnavailable) -> None:
        """It cannot go on. Its output has ended when `news` are set; who sees it ended before, in another thread, sees
        the error, too."""
        generation.error = error
        self.abort([generation])
        generation.fail(error)

    async def until_ended(self, which: Callable[[Generation], bool] = lambda _: True) -> None:
        """Wait until there is none of these here any more."""
        while any(which(generation) for generation in self.running.values()):
            self._ended.clear()
            await self._ended.wait()

    def close(self, error: KvernError) -> None:
        """There is no engine any more."""
        for generation in self.running.values():
            generation.fail(error)
        self.running.clear()
        self._probation.end()

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Let them grow by what the engine did."""
        if self.stored is not None:
            events = self._hand_over(events, self.stored)
        if not events:
            return
        now = time.monotonic()
        changed, stopped = self._outputs.process(events)
        took = (time.monotonic() - now) / max(len(changed), 1)
        for request_id, reason, stop in stopped:
            self._supervisor.send(FinishRequests([request_id], reason, stop))
            if (served := self._served.get(generation_id(request_id))) is not None:
                served.text.stopped[request_id] = reason
        for event in events:
            if event.record is not None:
                self._metrics.recorded(event.record)
                served = self._served.get(generation_id(event.request_id))
                if served is not None:
                    served.recorded(self.engine, event.record)
        for output in changed:
            generation = self.running.get(output.request_id)
            if generation is not None:
                if output.failure is not None:
                    is_content = output.failure.startswith(UnreadableContent.MARK)
                    generation.error = (UnreadableContent if is_content else RequestFailed)(output.failure)
                is_due = not generation.patient or generation.progress % STEPS_AT_ONCE == STEPS_AT_ONCE - 1
                if output.finished or generation.error is not None or is_due:
                    generation.news.set()
                self._count(generation, now)
                if (served := generation.served) is not None:
                    served.text.until = now + took - served.began
                    served.text.seconds += took
                if output.finished:
                    self._remove(output.request_id)
                generation.progress += 1
                generation.spared = False
                self.clear(generation)

    def _hand_over(self, events: Sequence[TokenEvent], stored: Callable[[Generation], None]) -> list[TokenEvent]:
        """Let other engines go on with prompts that are computed; returns the events of other requests, and those of
        faults."""
        others = []
        for event in events:
            generation = self.running.get(generation_id(event.request_id))
            if generation is None or event.finish_reason == "abort":
                others.append(event)
            elif event.stored_tokens:
                generation.stored_tokens = event.stored_tokens
                stored(generation)
            elif not generation.hands_over:
                others.append(event)
            elif event.finish_reason is not None:
                if event.record is not None:
                    self._metrics.recorded(event.record)
                self._remove(generation.output.request_id)
                self.clear(generation)
                self._metrics.handed_over()
                generation.hand_over(event.record, str(event.stop_reason or ""))
                self.handed_over(generation)
        return others

    def clear(self, generation: Generation) -> None:
        """It got on, or has ended: nothing is to be feared of it now."""
        if self._probation.active and self._probation.clear(generation.output.request_id):
            self.begin()

    def lose(self, adapters: Mapping[int, Exception]) -> None:
        """End those whose adapters, by key, cannot be read any more."""
        for generation in list(self.running.values()):
            if (error := generation.lost_adapter(adapters)) is not None:
                self.end(generation, error)

    def resume(self) -> None:
        """Go on with a new engine, as many as may."""
        for generation in self.running.values():
            generation.lose(self.fate)
        self.begin()

    def begin(self) -> None:
        """Give the engine those that may run and that it does not have."""
        if self._supervisor.is_ready:
            self.begun_at = time.monotonic()
            for name in self._probation.on_trial or list(self.running):
                generation = self.running.get(name)
                if generation is not None and not generation.begun:
                    self._begin(generation)

    def _begin(self, generation: Generation) -> None:
        """Give it to the engine, which takes requests."""
        generation.begin(self.engine)
        generation.expected = self._prefixes.expect(generation.names)
        if generation.served is not None:
            self._served[generation.output.request_id] = generation.served
        try:
            self._supervisor.send(generation.message())
        except Exception as error:
            logger.exception("request %s cannot be sent to the engine", generation.output.request_id)
            self.end(generation, RequestFailed(f"it cannot be sent to the engine: {in_a_line(error)}"))

    def uncached(self, generation: Generation) -> int:
        """The number of tokens of its prompt that the engine probably has to compute."""
        return generation.spec.prompt_length - cached_tokens(generation.levels, self._prefixes.number)

    def _remove(self, request_id: str) -> Generation | None:
        generation = self.running.pop(request_id, None)
        if generation is not None:
            generation.workload = None
            self.sequences -= generation.spec.params.sequences
            self._cached(generation)
            self._weigh(generation, 0)
            self._ended.set()
        return generation

    def _cached(self, generation: Generation) -> None:
        """The engine has told what it has cached of a request, if it has."""
        if generation.expected is not None:
            self._prefixes.withdraw(generation.expected)
            generation.expected = None

    def _weigh(self, generation: Generation, tokens: int) -> None:
        self.tokens += tokens - generation.tokens
        generation.tokens = tokens
        self.changed()

    def _count(self, generation: Generation, now: float) -> None:
        sequences = generation.spec.params.sequences
        if not generation.progress:
            self._cached(generation)
            self._weigh(generation, answer_tokens(generation.spec))
        if generation.first:
            self._metrics.next_token(now - generation.last)
        else:
            generation.first = now
            if generation.served is not None and generation.served.first_token is None:
                generation.served.first_token = generation.served.seconds
            self._turns.began(generation.spec.turn, generation.spec.owner, sequences)
            self._metrics.first_token(now - generation.asked)
        generation.last = now
        if generation.output.finished:
            self._metrics.finished(generation.output, generation.times(now))
