"""The one loop: submit a step if there is room and work, else collect the oldest.

    add / abort --> scheduler --submit--> executor --collect--> stop conditions --> TokenEvents
                        ^                                             |
                        +----------- token ids, finished -------------+

The number of steps in flight is bounded by `depth`: 1 is synchronous, 2 overlaps the host with the device.

A step that raises is undone, with those behind it, and its requests run again, apart from each other, until the one
that raises stands alone and ends (`engine/trial.py`). The others lose nothing but time.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvern.drafting.drafting import Drafting
from kvern.engine.cache_forecast import CacheForecast, resize_cache
from kvern.engine.core_timing import DEFAULT_TIMING, CoreTiming
from kvern.engine.hand_overs import HandOvers
from kvern.engine.loop import LOADING_SECONDS, EngineLoop
from kvern.engine.pace import Pace
from kvern.engine.rows import append_token, queue_seconds, unreported_logprobs
from kvern.engine.scheduler import Scheduler
from kvern.engine.stages import ToldStages
from kvern.engine.step_load import load_of
from kvern.engine.step_seconds import StepSeconds
from kvern.engine.trial import Trial, computed, reached
from kvern.errors import in_a_line
from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.layer_times import LayerTimes
from kvern.request.request import FinishReason, Progress, Request, RequestSpec, State, cache_namespace, requests_of
from kvern.request.step import OUT_OF_TOKENS, ModelRunnerOutput, SchedulerOutput, StepLost
from kvern.request.weights import WeightsFound, WeightSource, weights_prefix

if TYPE_CHECKING:
    from kvern.adapters.peft import Adapter
    from kvern.cache.journal import NameLedger
    from kvern.engine.beams import Beams
    from kvern.planning.estimate import StepFactors
    from kvern.request.step import StepResult
    from kvern.runner.executor import Executor
    from kvern.runner.ranks.experts import LayerCounts

logger = logging.getLogger("kvern")
PREPARING_SECONDS = 0.01
"""Seconds that an idle engine waits for a grammar before it looks for messages."""


class EngineCore(EngineLoop):
    """Drives the scheduler and the executor. Not thread-safe: one thread calls it.

    `folder` has the tokenizer for beams that end at stop strings. With `prepares` a request is held until the
    executor is prepared for its grammar; without, its first step waits for that. `drafting` guesses at tokens for steps
    to verify; None: nobody does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: "Executor",
        depth: int = 1,
        folder: Path | None = None,
        prepares: bool = False,
        drafting: Drafting | None = None,
        timing: CoreTiming = DEFAULT_TIMING,
    ) -> None:
        self.scheduler = scheduler
        self.pages = scheduler.cache.identity
        self.store_prices = self.store_prices if executor.tier is None else executor.tier.prices
        self._prepares = prepares
        self.drafting = drafting
        self._clock, self._sleep = timing.clock, timing.sleep
        self._watch = timing.watch
        self._ring = None if timing.watch is None else timing.watch.ring
        self._pace = timing.pace or Pace(clock=timing.clock)
        self._layers = timing.layers
        self.prepares_again = timing.layers is not None  # the graphs of steps that were due and had none with events
        self._recorder = timing.recorder
        if self._recorder is not None:
            scheduler.observe(self._recorder)
        self._held: dict[str, tuple[Request, Future[None]]] = {}
        """Requests whose grammars are being prepared."""
        self._folder = folder
        self._digests: dict[int, bytes] = {}
        """The digests of the adapters that requests may use, by their keys."""
        self._unloading: set[int] = set()
        self._weights = b""
        """The beginning of the namespaces of blocks that are computed with the present weights."""
        self.executor = executor
        self._stages = ToldStages(scheduler.limits.stages)
        self._depth = depth
        self._seconds = StepSeconds(depth > 1, timing.clock)
        self._make_factors: Callable[[], StepFactors | None] | None = timing.factors
        self._in_flight: deque[tuple[SchedulerOutput, list[Request], StepResult]] = deque()
        self._counted = EngineStatistics(target_itl=self._pace.target)
        self._handing = HandOvers(scheduler.cache, self._counted)
        self._trial = Trial()
        self._forecast = CacheForecast(scheduler, timing.clock) if scheduler.cache.memory.most_chunks > 1 else None

    @property
    def has_work(self) -> bool:
        """A call of `step` would do something."""
        if self.scheduler.cache.shrinks_to is not None:
            return True
        return self._has_steps or bool(self._in_flight) or bool(self._held) or bool(self._handing.awaiting)

    @property
    def _has_steps(self) -> bool:
        return self.scheduler.has_work or self.scheduler.cache.is_loading

    def spare_seconds(self) -> float:
        """Returns how long the next step can wait for further requests while the device computes another."""
        if len(self._in_flight) != self._depth - 1 or self.scheduler.waiting:
            return 0.0
        return self._pace.spare_seconds()

    def idle(self) -> bool:
        """Make one thing that steps would run faster with, while none runs; whether there are more."""
        self._divide_steps()
        return self.executor.idle()

    def _divide_steps(self) -> None:
        if self._make_factors is not None:
            make, self._make_factors = self._make_factors, None
            factors = make()
            self._seconds.divide(factors)
            if self._layers is not None:
                self._layers.divide(None if factors is None else factors.bounds)

    sleeps = True

    def sleep(self) -> int:
        self.scheduler.undo(0)  # what is cached, and what was to be copied or saved of it
        self.scheduler.cache.empty()
        return self.executor.sleep()

    def wake(self) -> None:
        self.executor.wake()

    def close(self) -> None:
        self.scheduler.cache.close()

    def watch_cache(self, wanted: bool) -> None:
        self.scheduler.cache.watch(wanted)

    @property
    def cached_names(self) -> "NameLedger | None":
        journal = self.scheduler.cache.journal
        return None if journal is None else journal.ledger

    def count_experts(self) -> "Callable[[], LayerCounts]":
        """Begin to read how many tokens each expert of each layer has had; what is returned may wait for the device."""
        return self.executor.count_experts()

    def layer_times(self) -> LayerTimes:
        return {} if self._layers is None else self._layers.report()

    def add(self, spec: RequestSpec, progress: Sequence[Progress] = ()) -> None:
        """Queue what a user asked in one; `progress` says how far an earlier engine brought which answers.

        Nothing of it stays queued if this raises.
        """
        requests = requests_of(spec, progress)
        if not self.has_work:
            self._seconds.rests("idle")
            if self._recorder is not None:
                self._recorder.planned(None)
        try:
            for request in requests:
                self._add(request)
        except BaseException:
            self.finish([request.request_id for request in requests])
            raise

    def _add(self, request: Request) -> None:
        self._counted.requests += 1
        self._counted.prompt_tokens += 0 if request.spec.hands_over else request.prompt_length
        request.queue.arrived_at = self._clock()
        self._handing.begin(request)
        self._name(request)
        if request.params.beam_width is not None:
            self._beams.begin(request)
        preparing = None
        if self._prepares and request.spec.grammar is not None:
            preparing = self.executor.prepare(request.spec.grammar)
        if request.leader is not None and request.leader.request_id in self._held:
            preparing = self._held[request.leader.request_id][1]  # they begin together
        if self._recorder is not None:
            self._recorder.arrived(request, preparing is not None)
        if preparing is None:
            self._queue(request)
        else:
            self._held[request.request_id] = request, preparing

    def bring(self, spec: RequestSpec) -> None:
        request = requests_of(spec, ())[0]
        self._name(request)
        self.scheduler.cache.bring(request, lambda: self.scheduler.running.reserved_blocks)

    def _name(self, request: Request) -> None:
        """Let a request share blocks with those of the same weights, adapter and namespace."""
        digest = b"" if request.adapter is None else self._digests.get(request.adapter, b"")
        request.cache_namespace = self._weights + cache_namespace(request.spec, digest)

    def _queue(self, request: Request) -> None:
        self.scheduler.register(request)
        self.scheduler.waiting.add(request, self.scheduler.step)

    @cached_property
    def _beams(self) -> "Beams":
        """The beam searches, once a request asks for one."""
        from kvern.engine.beams import Beams

        return Beams(self.scheduler, self._folder)

    def _release(self) -> None:
        """Queue the requests whose grammars are prepared; if nothing else is to be done, wait for one a little."""
        if not self.scheduler.has_work and not self._in_flight:
            wait([preparing for _, preparing in self._held.values()], PREPARING_SECONDS, FIRST_COMPLETED)
            self._seconds.rests("grammar")
        for request_id in [name for name, (_, preparing) in self._held.items() if preparing.done()]:
            request = self._held.pop(request_id)[0]
            if self._recorder is not None:
                self._recorder.woken(request)
            self._queue(request)

    def read_adapter(self, path: str) -> "Adapter":
        """The adapter in a folder, checked; any thread may call this. Raises InvalidAdapter."""
        return self.executor.read_adapter(path)

    def add_adapter(self, key: int, adapter: "Adapter") -> None:
        """Let requests use an adapter that was read."""
        self._digests[key] = adapter.digest
        self.executor.add_adapter(key, adapter)

    def unload_adapter(self, key: int) -> None:
        """Forget an adapter, once the requests that use it have ended."""
        self._unloading.add(key)
        self._forget_unused()

    def read_weights(self, version: str, sources: Sequence[WeightSource]) -> None:
        self.executor.read_weights(version, sources)

    def weights_found(self) -> WeightsFound | None:
        return self.executor.weights_found()

    def take_weights(self, version: str, keep: bool) -> list[TokenEvent]:
        events = self._collect_all()
        self.executor.take_weights()
        self._weights = weights_prefix(version)
        self.scheduler.renew(keep)
        for request in (*self.scheduler.by_id.values(), *(held for held, _ in self._held.values())):
            self._name(request)
        return events

    def drop_weights(self) -> None:
        self.executor.drop_weights()

    def resize_cache(self, chunks: int) -> tuple[int, list[TokenEvent]]:
        events = self._collect_all()
        self._counted.cache_refused = resize_cache(self.scheduler, self.executor, chunks)
        return self.scheduler.cache.memory.chunks, events

    def release_pages(self, size: int) -> None:
        self.executor.release_pages(size)

    def _forget_unused(self) -> None:
        if not self._unloading:
            return
        held = {request.adapter for request, _ in self._held.values()}
        for key in self._unloading.difference(held, self.scheduler.adapters.users):
            self._unloading.remove(key)
            self.scheduler.adapters.forget(key)
            self._digests.pop(key, None)
            self.executor.drop_adapter(key)

    def finish(
        self, request_ids: Iterable[str], reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> list[TokenEvent]:
        records = []
        for request_id in request_ids:
            request = self.scheduler.get(request_id)
            self._handing.forget(request_id)
            if request is not None:
                self.scheduler.finish(request, reason, stop_reason)
            elif request_id in self._held:
                request, _ = self._held.pop(request_id)
                if self._recorder is not None:
                    self._recorder.finished(request, reason)
                request.state = State.FINISHED
                request.answer.finish_reason = reason
                request.answer.stop_reason = stop_reason
            if request is not None and (record := request.answer.record) is not None:
                records.append(TokenEvent(record.request_id, record=record))
        self._forget_unused()
        return records

    def report(self, reports: Mapping[str, object]) -> None:
        """Give extensions of the KV cache what their worker's sides have answered, by the extensions' names."""
        self.scheduler.waiting.loaded(self.scheduler.cache.report(reports))

    def step(self) -> list[TokenEvent]:
        """Submit and collect once; events of the step that came back, none if it is still on its way.

        A step that raises an Exception ends the one request that causes it. Raises what breaks the executor itself.
        """
        if failed := self.scheduler.cache.failed():
            reasons = {request.unit: reason for request, reason in failed}
            return [event for unit, reason in reasons.items() for event in self._fail_unit(unit, reason)]
        if (chunks := self.scheduler.cache.shrinks_to) is not None:
            return self.resize_cache(chunks)[1]
        if self._handing.awaiting and (handed := self._handing.ended(self._clock())):
            return handed
        if self._trial.settle():
            self.scheduler.restrict(self._trial.units)
        if self._held:
            self._release()
        if (
            self._depth == 1 and self._handing.awaiting and self._handing.holds(self._clock())
        ):  # a step would be waited for
            self._rest()
            return []
        if len(self._in_flight) < self._depth and self._has_steps:
            wanted = None
            if self.drafting is not None:
                wanted = self.drafting.wanted(len(self.scheduler.running) + len(self.scheduler.waiting))
            time_limit = self._pace.time(self.scheduler.waiting.best())
            output = self.scheduler.schedule(time_limit, wanted, self._depth - len(self._in_flight))
            if self._recorder is not None:
                self._recorder.planned(self.scheduler.blocked)
            if output.scheduled or output.extensions:
                self._submit(output)
                if len(self._in_flight) < self._depth:
                    return []
        if not self._in_flight:
            self.scheduler.cache.completed(self.scheduler.step)
            if self._trial.units is not None and not self.scheduler.cache.is_loading:
                self._trial.skip()
                self.scheduler.restrict(self._trial.units)
            elif self._has_steps or self._handing.awaiting:
                self._rest()
            return []
        if self._handing.awaiting and not self._in_flight[0][2].done():
            self._rest()
            return []
        return self._collect_oldest()

    def _collect_all(self) -> list[TokenEvent]:
        """Wait for all steps in flight."""
        events = []
        while self._in_flight:
            events += self._collect_oldest()
        return events

    def _collect_oldest(self) -> list[TokenEvent]:
        """Wait for the oldest step in flight. Raises what breaks the executor itself."""
        output, requests, future = self._in_flight.popleft()
        if self._depth > 1:
            self._pace.awaits()
            self._seconds.awaits()
        try:
            result = future.result()
        except StepLost:
            self._undo(output)
            return []
        except Exception as error:
            self._undo(output)
            return self._blame(output, requests, error)
        except BaseException:  # an interruption is nobody's fault
            self._undo(output)
            raise
        now = self._clock()
        self._seconds.ended(now)
        if self._layers is not None:
            self._layers.ended(self.executor.measured())
        if not (output.scheduled or any(result.reports.values())) and self.scheduler.cache.is_loading:
            self._rest()
        self._pace.ended()
        if self._watch is not None:
            self._watch.ended(now)
        self._stages.ended(output, result)
        if self.drafting is not None:
            self.drafting.ended(output, requests, result)
        if self._recorder is not None:
            self._recorder.ended(output, requests, result, now)
        if self._trial.units is not None:
            self._trial.passed(reached(output, requests, result))
        self.scheduler.cache.completed(output.step if self._in_flight else self.scheduler.step)
        events = self._collect(output, requests, result)
        if self._handing.computed:
            events = self._handing.withhold(events, output, now)
        if self.drafting is not None:
            answered = [request for request, token_ids in zip(requests, result.token_ids, strict=True) if token_ids]
            self.drafting.propose(answered, len(self.scheduler.running))
        if self._ring is not None:
            waiting, generated = len(self.scheduler.waiting), self._counted.generation_tokens
            self._ring.write(self._seconds.last, len(requests), waiting, generated)
        return events

    def _rest(self) -> None:
        """Waits a little for what is loaded."""
        self._sleep(LOADING_SECONDS)
        if not self.scheduler.has_work:
            self._seconds.rests("idle")  # a tier still saves
        elif any(request.state is State.LOADING for request in self.scheduler.waiting):
            self._seconds.rests("tier")
        else:
            self._seconds.rests("images" if self.scheduler.cache.is_loading else "host")

    def _submit(self, output: SchedulerOutput) -> None:
        load = load_of(output.scheduled, output.encoding)
        self._counted.steps += 1
        self._counted.scheduled += len(output.scheduled)
        self._counted.computed_tokens += load.rows
        self._counted.prefill_tokens += load.prompt
        requests = [self.scheduler.by_id[request_id] for request_id in output.request_ids]
        self._stages.tell(output, requests)
        now = self._clock()
        if output.joined:
            for request in requests:
                request.queue.begun_at = request.queue.begun_at or now
        if self._watch is not None:
            self._watch.began(output.request_ids, now, load.rows, load.reach)
        self._pace.began(load, requests)
        self._seconds.began(load, now, self.scheduler.blocked)
        if self._layers is not None:
            self._layers.began(output.step, load)
        if self._recorder is not None:
            self._recorder.began(load, now)
        if self.drafting is not None:
            self.drafting.began(output, requests)
        self._in_flight.append((output, requests, self.executor.submit(output)))

    def _undo(self, output: SchedulerOutput) -> None:
        """A step failed: what it and those after it should have written is missing, so nothing of it may be reused."""
        self._in_flight.clear()
        self._pace.forget()
        self._seconds.forget()
        if self._layers is not None:
            self._layers.forget()
        if self._watch is not None:
            self._watch.forget()
        if self.drafting is not None:
            self.drafting.forget()
        if self._recorder is not None:
            self._recorder.undone()
        self.scheduler.undo(output.step)
        self.executor.abandon()

    def _blame(self, output: SchedulerOutput, requests: list[Request], error: Exception) -> list[TokenEvent]:
        """End the request whose step failed, or have those of the step run apart from each other."""
        guilty = self._trial.failed(computed(output, requests))
        self.scheduler.restrict(self._trial.units)
        if guilty is None:
            logger.warning("a step of %d requests failed; they are run again in halves", len(requests), exc_info=error)
            return []
        logger.error("request %s ends: its step failed", guilty, exc_info=error)
        return self._fail_unit(guilty, f"its step failed: {in_a_line(error)}")

    def _fail_unit(self, unit: str, reason: str) -> list[TokenEvent]:
        alive = (*self.scheduler.running, *self.scheduler.waiting)
        return self._fail([request for request in alive if request.unit == unit], reason)

    def _fail(self, requests: Iterable[Request], reason: str) -> list[TokenEvent]:
        """End queued requests that cannot go on; the events that say why."""
        events = []
        for request in requests:
            self._handing.forget(request.request_id)
            if request.state is not State.FINISHED:  # like the other beams of a search that has just ended
                self.scheduler.finish(request, "abort", reason)
                ids = request.answer_ids if request.search is None else request.search.answer_ids
                rest = request.untold([], None) or ([], None)
                records = [request.answer.record, *[None] * (len(ids) - 1)]
                events += [
                    TokenEvent(name, *rest, finish_reason="abort", stop_reason=reason, record=record)
                    for name, record in zip(ids, records, strict=True)
                ]
        self._forget_unused()
        return events

    def statistics(self) -> EngineStatistics:
        """The counters as they stand."""
        works = self.has_work
        if not works:
            self._divide_steps()
            self._seconds.rests("idle")
        self._seconds.report(self._counted, works)
        self.scheduler.cache.count(self._counted)
        if self._forecast is not None:
            self._forecast.report(self._counted)
        self._counted.preemptions = self.scheduler.preemption_count
        self._counted.recomputed_tokens = self.scheduler.recomputed_tokens
        self._counted.running, self._counted.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self._counted.waiting += len(self._held)
        self._counted.step_time_ratio = 0.0 if self._pace.drift is None else self._pace.drift.ratio
        if self.drafting is not None:
            self._counted.drafts_by_position = tuple(self.drafting.positions.drafts)
            self._counted.accepted_by_position = tuple(self.drafting.positions.accepted)
        return self._counted

    def _collect(self, output: SchedulerOutput, requests: list[Request], result: ModelRunnerOutput) -> list[TokenEvent]:
        events = []
        if result.reports:
            self.report(result.reports)
        plain = not (result.broken or result.embeddings or result.guessed or self.scheduler.cache.counts_tokens)
        size = self.scheduler.cache.block_size
        for index, request in enumerate(requests):
            if request.state is State.FINISHED:  # aborted, or it stopped one step ago
                continue
            token_ids = result.token_ids[index]
            if (
                plain
                and result.prompt_logprobs[index] is None
                and append_token(request, output.scheduled[index], token_ids, size)
            ):
                self._counted.generation_tokens += 1
                if (told := request.untold(token_ids, result.logprobs[index])) is not None:
                    cached = request.answer.cached_tokens
                    events.append(TokenEvent(request.request_id, *told, cached_tokens=cached))
            else:
                events += self._collect_row(index, request, output, result)
        self._forget_unused()
        return events

    def _collect_row(
        self, index: int, request: Request, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[TokenEvent]:
        """Takes what a step has for one request, which may have drafts, log-probabilities or beams, or end."""
        events = []
        item, token_ids = output.scheduled[index], result.token_ids[index]
        request.drafts.guessed_token_ids = result.guessed.get(item.slot, [])
        prompt_logprobs = unreported_logprobs(request, item.start, result.prompt_logprobs[index])
        if not token_ids or request.search is not None:
            if prompt_logprobs is not None:
                events.append(TokenEvent(request.request_id, prompt_logprobs=prompt_logprobs))
            if token_ids:
                self._counted.generation_tokens += 1
                events += self._beams.report(request, item.slot, result)
            return events
        logprobs = result.logprobs[index]
        predicted = 0, 0
        if item.sampled > 1:
            right = len(token_ids) - 1
            token_ids = request.until_stop(token_ids)
            logprobs = logprobs and logprobs[: len(token_ids)]
            if self.drafting is not None and request.request_id in self.drafting.verified_predictions:
                predicted = min(right, len(token_ids)), item.sampled - 1 - right
        reason = result.broken.get(item.slot) if len(token_ids) == len(result.token_ids[index]) else None
        if reason == OUT_OF_TOKENS:
            token_ids, logprobs = token_ids[:-1], logprobs and logprobs[:-1]
        cut = len(result.token_ids[index]) - len(token_ids) + (reason == OUT_OF_TOKENS)
        unused = cut if item.sampled > 1 else 0  # of a token that broke the answer the key is a wrong draft's
        self._counted.generation_tokens += len(token_ids)
        full = self.scheduler.update(request, token_ids, item.sampled, unused)
        if reason is not None:
            ended: FinishReason = "length" if reason == OUT_OF_TOKENS else "abort"
            certain = reason == OUT_OF_TOKENS or item.sampled == 1  # or states may have seen drafts behind it
            self.scheduler.finish(request, ended, reason or None, keep_cached=certain)
        else:
            self._finish_if_stopped(request, token_ids[-1], full)
        told = request.untold(token_ids, logprobs)
        if told is None and prompt_logprobs is None:
            return events
        events.append(
            TokenEvent(
                request.request_id,
                *(told or ([], None)),
                prompt_logprobs,
                request.answer.cached_tokens,
                request.answer.finish_reason,
                request.answer.stop_reason,
                queue_seconds(request) if request.output_length == len(token_ids) else 0.0,
                result.embeddings.get(item.slot) if request.spec.embed else None,
                predicted_tokens=predicted,
                loaded_tokens=request.answer.tell_loaded(),
                record=request.answer.record,
            )
        )
        return events

    def _finish_if_stopped(self, request: Request, token_id: int, full: bool) -> None:
        """Finishes a request whose last token is a stop token, or that is as long as it may be."""
        if token_id in request.spec.stop_token_ids and request.output_length > request.params.min_tokens:
            self.scheduler.finish(request, "stop", token_id)
        elif full:
            self.scheduler.finish(request, "length")
