"""The loop of an encoder: a step reads whole texts, as many as fit, and then each of them has ended.

    add / abort --> waiting, in the policy's order --start--> steps in flight --result--> TokenEvents
     images --> picture_queue.py --^

There is no KV cache and nothing that a step leaves for the next one. What waits is taken in order until the budget of
tokens is full; a text that is longer than that runs alone. Texts of a step do not see each other, and are not padded.
On a GPU the next step is made while the one before is computed.

A step that raises is run again in halves, until the text that raises stands alone and ends. An image is a text of as
many tokens as it has patches.
"""

import heapq
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvern.config import EngineConfig
from kvern.engine.loop import LOADING_SECONDS, EngineLoop
from kvern.engine.picture_queue import PictureQueue, Text
from kvern.engine.step_watch import StepWatch
from kvern.engine.text_recorder import TextRecorder
from kvern.errors import InvalidAdapter, in_a_line
from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.record import RequestRecord
from kvern.request.request import FinishReason, Progress, RequestSpec

if TYPE_CHECKING:
    from kvern.adapters.peft import Adapter
    from kvern.runner.encoder_runner import EncoderRunner, PendingTexts

logger = logging.getLogger("kvern")


@dataclass(frozen=True)
class RunningStep:
    """A step in flight, begun then by the monotonic clock."""

    texts: list[Text]
    pending: "PendingTexts"
    began: float
    aborted: set[str] = field(default_factory=set)
    """Names of texts that somebody ended meanwhile."""


class EncoderCore(EngineLoop):
    """Drives a runner, as `EngineCore` drives an executor.

    A step has `most_tokens` at most, but for a single text, and `most_texts`; `depth` of them are in flight at most.
    `watch` is told the ids of a step's requests before it begins. `pictures` decodes images; None: none are read.
    """

    def __init__(
        self,
        runner: "EncoderRunner",
        config: EngineConfig,
        most_tokens: int,
        most_texts: int,
        depth: int = 1,
        watch: StepWatch | None = None,
        pictures: PictureQueue | None = None,
    ) -> None:
        self._runner = runner
        self._pictures = pictures
        self._watch = watch
        self._policy, self._aging_steps = config.policy, config.aging_steps
        self._most_tokens = most_tokens
        self._most_texts = most_texts
        self._depth = depth
        self._running: deque[RunningStep] = deque()
        self._waiting: dict[str, Text] = {}
        """Waiting texts in the order of arrival."""
        self._order: list[tuple[int, int, int, Text]] = []
        """A heap that may still hold texts that have ended."""
        self._failed: deque[list[Text]] = deque()
        """Parts of steps that failed, each to be run alone."""
        self._enqueued = 0
        self._recorder = TextRecorder() if config.request_records else None
        self._counted = EngineStatistics()

    @property
    def has_work(self) -> bool:
        """A call of `step` would do something."""
        return bool(self._waiting or self._running or self._pictures)

    def add(self, spec: RequestSpec, progress: Sequence[Progress] = ()) -> None:
        """Queue a text. There is never any progress that an earlier engine could have made."""
        self._counted.requests += 1
        self._counted.prompt_tokens += spec.prompt_length
        (name,) = spec.answer_ids
        text = Text(name, spec, time.monotonic(), self._counted.steps)
        if self._recorder is not None:
            self._recorder.arrived(name, spec)
        if spec.prompt.attachments:
            assert self._pictures is not None, "the model reads no images"
            self._pictures.add(text)
        else:
            self._enqueue(text)

    def _enqueue(self, text: Text) -> None:
        self._waiting[text.name] = text
        key = {"priority": text.spec.priority, "sjf": text.spec.prompt_length}.get(self._policy, 0)
        self._enqueued += 1
        heapq.heappush(self._order, (key, text.spec.turn, self._enqueued, text))

    sleeps = True

    def sleep(self) -> int:
        return self._runner.sleeping.leave()

    def wake(self) -> None:
        self._runner.sleeping.enter()

    def finish(
        self, request_ids: Iterable[str], reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> list[TokenEvent]:
        records = []
        for request_id in request_ids:
            if (record := self._record(request_id, reason)) is not None:
                records.append(TokenEvent(request_id, record=record))
            if self._pictures is not None and self._pictures.remove(request_id):
                continue
            if self._waiting.pop(request_id, None) is None:
                for step in self._running:
                    step.aborted.add(request_id)
        return records

    def _record(self, name: str, reason: FinishReason) -> RequestRecord | None:
        """Returns the record of a text that ends."""
        return None if self._recorder is None else self._recorder.ended(name, reason)

    def step(self) -> list[TokenEvent]:
        """Start a step if there is one; the events of the oldest, once `depth` are in flight or no more can be started.

        A step that raises an Exception ends the text that causes it.
        """
        if failed := self._take_decoded():
            return failed
        if texts := self._next():
            self._counted.steps += 1
            self._counted.computed_tokens += (tokens := sum(text.spec.prompt_length for text in texts))
            self._counted.prefill_tokens += tokens
            self._counted.scheduled += len(texts)
            names = [text.name for text in texts]
            began = time.monotonic()
            if self._watch is not None:
                self._watch.began(names, began, tokens, max(text.spec.prompt_length for text in texts))
            for name in names:
                del self._waiting[name]
            if self._recorder is not None:
                self._recorder.began(names)
            if self._pictures is not None:
                self._pictures.taken(names)
            try:
                pending = self._runner.start([text.picture or text.spec.prompt for text in texts])
            except Exception as error:
                return self._blame(texts, error)
            self._running.append(RunningStep(texts, pending, began))
            if len(self._running) < self._depth:
                return []
        if not self._running:
            if self._pictures:
                time.sleep(LOADING_SECONDS)
            return []
        step = self._running.popleft()
        try:
            results = step.pending.result()
        except Exception as error:
            return self._blame([text for text in step.texts if text.name not in step.aborted], error)
        if self._watch is not None:
            self._watch.ended(time.monotonic())
        self._counted.encoded_images += sum(text.picture is not None for text in step.texts)
        return [
            TokenEvent(
                text.name,
                finish_reason="stop",
                queue_seconds=step.began - text.arrived_at,
                embedding=result,
                record=self._record(text.name, "stop"),
            )
            for text, result in zip(step.texts, results, strict=True)
            if text.name not in step.aborted
        ]

    def _take_decoded(self) -> list[TokenEvent]:
        """Let requests wait for a step whose image is decoded; the events of those that have none."""
        if self._pictures is None:
            return []
        ready, failed = self._pictures.finished()
        for text in ready:
            if self._recorder is not None:
                self._recorder.queued(text.name)
            self._enqueue(text)
        return [event for text, reason in failed for event in self._fail([text], reason)]

    def _fail(self, texts: list[Text], reason: str) -> list[TokenEvent]:
        """The last events of texts that end without a result."""
        return [
            TokenEvent(text.name, finish_reason="abort", stop_reason=reason, record=self._record(text.name, "abort"))
            for text in texts
        ]

    def _next(self) -> list[Text]:
        """Returns the texts of the next step: a part of one that failed, or the first by the policy."""
        while self._failed:
            if texts := [text for text in self._failed.popleft() if self._waits(text)]:
                return texts
        texts, left = [], self._most_tokens
        oldest = next(iter(self._waiting.values()), None)
        if oldest is not None and self._counted.steps - oldest.arrived_in >= self._aging_steps:
            texts, left = [oldest], left - oldest.spec.prompt_length
        while self._order and len(texts) < self._most_texts:
            text = self._order[0][-1]
            if self._waits(text) and text not in texts[:1]:
                if texts and text.spec.prompt_length > left:
                    break
                texts.append(text)
                left -= text.spec.prompt_length
            heapq.heappop(self._order)
        return texts

    def _waits(self, text: Text) -> bool:
        return self._waiting.get(text.name) is text

    def _blame(self, texts: list[Text], error: Exception) -> list[TokenEvent]:
        """End the text whose step failed, or have halves of the step run apart from each other."""
        self._runner.abandon()
        if self._watch is not None:
            self._watch.ended(time.monotonic())
        if len(texts) > 1:
            if self._recorder is not None:
                self._recorder.failed([text.name for text in texts])
            self._waiting.update((text.name, text) for text in texts)
            logger.warning("a step of %d requests failed; they are run again in halves", len(texts), exc_info=error)
            middle = len(texts) // 2
            self._failed.extendleft((texts[middle:], texts[:middle]))
            return []
        for text in texts:
            logger.error("request %s ends: its step failed", text.name, exc_info=error)
        return self._fail(texts, f"its step failed: {in_a_line(error)}")

    def statistics(self) -> EngineStatistics:
        """The counters as they stand."""
        self._counted.waiting = len(self._waiting)
        if self._pictures is not None:
            self._counted.waiting += len(self._pictures)
            self._counted.decoded_images = self._pictures.decoded
        self._counted.running = sum(len(step.texts) for step in self._running)
        return self._counted

    def read_adapter(self, path: str) -> "Adapter":
        """Raises InvalidAdapter."""
        raise InvalidAdapter("the model is an encoder, which takes no adapters")

    def add_adapter(self, key: int, adapter: "Adapter") -> None:
        """None was ever read."""

    def unload_adapter(self, key: int) -> None:
        """None was ever read."""
