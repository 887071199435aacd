"""Metrics for Prometheus. Names and meanings follow vLLM's where it has them, with the prefix `kvern:`."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvern.observe.engine_time import EngineTime
from kvern.observe.step_parts import StepParts
from kvern.plugins import imported
from kvern.request.events import EngineStatistics
from kvern.request.outputs import RequestOutput
from kvern.request.record import WAITS, RequestRecord
from kvern.request.store_figures import GAUGES, StoreFigures, summed


@dataclass(frozen=True)
class DraftFigures:
    """The number of drafts that were the 1st, 2nd, ... after a known token, and how many of them were accepted."""

    by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def between(cls, earlier: EngineStatistics, later: EngineStatistics) -> Self:
        """Returns the drafts that were verified between two statistics."""
        pairs = (
            (earlier.drafts_by_position, later.drafts_by_position),
            (earlier.accepted_by_position, later.accepted_by_position),
        )
        return cls(*(tuple(b - a for a, b in zip_longest(*pair, fillvalue=0)) for pair in pairs))

    @property
    def count(self) -> int:
        """The number of verified drafts."""
        return sum(self.by_position)

    @property
    def accepted(self) -> int:
        """The number of accepted drafts."""
        return sum(self.accepted_by_position)

    @property
    def runs(self) -> int:
        """The number of times that drafts of a request were verified: each time there was a 1st one."""
        return next(iter(self.by_position), 0)

    @property
    def shares(self) -> list[float]:
        """The accepted share of the 1st, 2nd, ... drafts."""
        return [
            right / count for right, count in zip(self.accepted_by_position, self.by_position, strict=True) if count
        ]

    @property
    def tokens_a_step(self) -> float:
        """The mean number of tokens that a step with drafts gave a request: accepted drafts and one more."""
        return 1 + self.accepted / self.runs if self.runs else 1.0

    def rows(self) -> list[tuple[str, str]]:
        """Returns rows for a final table; none if there were no drafts."""
        if not self.count:
            return []
        return [
            ("drafts that were right", f"{self.accepted:,} of {self.count:,} ({self.accepted / self.count:.1%})"),
            ("right at the 1st, 2nd ... place", " ".join(f"{share:.0%}" for share in self.shares)),
            ("tokens of a step with drafts", f"{self.tokens_a_step:.2f}"),
        ]


class ExpertTokens(Collector):
    """Tokens of each expert of each layer, summed over restarts of the engine."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._earlier: list[list[int]] = []
        self._now: Sequence[Sequence[int]] = []

    def count(self, tokens: Sequence[Sequence[int]]) -> None:
        """Sets the counts of the running engine, for each layer and expert."""
        self._now = tokens

    def restarted(self) -> None:
        """Keeps the counts of an engine that was replaced."""
        if self._now:
            self._earlier = self.sums()
            self._now = [[0] * len(layer) for layer in self._now]

    def sums(self) -> list[list[int]]:
        """Returns the counts of all engines, for each layer and expert."""
        if not self._earlier:
            return [list(layer) for layer in self._now]
        pairs = zip(self._earlier, self._now, strict=True)
        return [[before + now for before, now in zip(*layers, strict=True)] for layers in pairs]

    def collect(self) -> Iterator[Metric]:
        """Yields one counter with the labels `layer` and `expert`, both from 0; nothing before the first count."""
        if not self._now:
            return
        names, values = [*self._labels, "layer", "expert"], list(self._labels.values())
        family = CounterMetricFamily("kvern:expert_tokens", "Tokens that an expert has had.", labels=names)
        for layer, experts in enumerate(self.sums()):
            for expert, count in enumerate(experts):
                family.add_metric([*values, str(layer), str(expert)], count)
        yield family


STORES = {
    "hit_tokens": "Tokens of prompts that were loaded from a store.",
    "missed_tokens": "Tokens of pages that a store did not have when they were loaded.",
    "stored_tokens": "Tokens whose pages a store took.",
    "evicted_pages": "Pages of a store that made room for others.",
    "late_tokens": "Tokens that had not come in time, and were computed.",
    "corrupt_pages": "Pages with a wrong header or sum.",
    "refused_tokens": "Tokens that were computed because loading them would have taken longer.",
    "skipped_tokens": "Tokens that were not saved.",
    "failures": "Calls of a store that raised, lied or did not end.",
    "read_bytes": "Bytes of pages that were loaded.",
    "written_bytes": "Bytes of pages that were saved.",
    "read_seconds": "Seconds of calls that load.",
    "written_seconds": "Seconds of calls that save.",
    "latency_seconds": "The part of a load's price that does not depend on its size.",
    "bandwidth": "Bytes a second of a load's price.",
    "is_on": "1 if a store is asked, 0 while it is off because it failed.",
}
"""Figures of stores by their fields, each with its help."""


class StoreMetrics(Collector):
    """The figures of the stores of a KV tier, summed over restarts of the engine."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._earlier: dict[str, StoreFigures] = {}
        self._now: Mapping[str, StoreFigures] = {}

    def update(self, stores: Mapping[str, StoreFigures]) -> None:
        """Sets the figures of the running engine by the stores' names."""
        self._now = stores

    def restarted(self) -> None:
        """Keeps the counts of an engine that was replaced."""
        self._earlier = summed([self._earlier, self._now])
        self._now = {}

    def collect(self) -> Iterator[Metric]:
        """Yields one family for each figure, with the label `store`; nothing without stores."""
        found = summed([self._earlier, self._now])
        names = [*self._labels, "store"]
        for field, text in STORES.items() if found else ():
            kind = GaugeMetricFamily if field in GAUGES else CounterMetricFamily
            family = kind(f"kvern:tier_{field}", text, labels=names)
            for name, figures in found.items():
                family.add_metric([*self._labels.values(), name], float(getattr(figures, field)))
            yield family


def busiest_rows(tokens: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """Returns rows for a final table: the load of the busiest expert relative to an even share; none without
    experts."""
    used = {layer: experts for layer, experts in enumerate(tokens) if sum(experts)}
    if not used:
        return []
    shares = {layer: max(experts) * len(experts) / sum(experts) for layer, experts in used.items()}
    worst = max(shares, key=lambda layer: shares[layer])
    mean = sum(shares.values()) / len(shares)
    idle = sum(experts.count(0) for experts in map(list, used.values()))
    expert = list(used[worst]).index(max(used[worst]))
    return [
        (
            "busiest experts, of an even share",
            f"{mean:.2f} on average, {shares[worst]:.2f} of {expert} in layer {worst}",
        ),
        ("experts that nobody chose", f"{idle:,} of {sum(map(len, used.values())):,}"),
    ]


logger = logging.getLogger("kvern")
Family = TypeVar("Family", Counter, Gauge, Histogram)

MILLISECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
COUNTED = {
    "queried_tokens": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "cached_tokens": ("prefix_cache_hits", "Prompt tokens taken from the prefix cache."),
    "preemptions": ("num_preemptions", "Times that a running request lost its blocks to others."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "decoded_images": ("images_decoded", "Files of images that were decoded."),
    "encoded_images": ("images_encoded", "Images that the encoder computed."),
    "image_rows_hit": ("image_rows_hit", "Rows of images that requests needed and that were there."),
    "prefill_tokens": ("prefill_tokens", "Tokens computed in runs of more than one."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed again, after preemptions or by another engine."),
}
"""Counters by the fields of `EngineStatistics` that they follow: name and help."""


@dataclass(frozen=True)
class RequestTimes:
    """Seconds from arrival to the end, and from the first token to the end; None if there was no token."""

    whole: float
    decode: float | None


class Metrics:
    """The metrics of one engine, in a registry of their own.

    `model` is their label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine_name: str | None = None
        """The label `engine`, set if a model has several engines."""
        self._labels = {"model_name": model}
        self._seen = EngineStatistics()
        gauge = self._gauge
        counter = self._counter
        histogram = self._histogram
        self._running = gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Sequences that wait for their first step.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the KV blocks that running requests hold, 0 to 1.")
        self._target = gauge("target_itl_seconds", "What a step with decodes should take at most, 0: no matter what.")
        self._ratio = gauge("step_time_ratio", "Time of steps relative to what is usual for such steps, 0: not known.")
        self._counted = {field: counter(name, text) for field, (name, text) in COUNTED.items()}
        self._drafts = counter("spec_decode_num_draft_tokens", "Drafts that were verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafts that were right.")
        self._drafted = counter("spec_decode_num_drafts", "Times that drafts of a request were verified.")
        self._drafts_at = self._by_position("spec_decode_num_draft_tokens_per_pos", "Drafts that were verified")
        self._accepted_at = self._by_position("spec_decode_num_accepted_tokens_per_pos", "Drafts that were right")
        self._ready = gauge(
            "engine_ready",
            "1 if an engine takes requests, 0 while another is started, NaN while the model is not awake.",
        )
        self._restarts = counter("engine_restarts", "Times that a dead or silent engine was replaced.")
        self._weight_updates = counter("weight_updates", "Times that the engine's weights changed while it ran.")
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in one step.", TOKENS)
        self._step_requests = histogram("step_requests", "Sequences in one step.", SEQUENCES)
        self._step_seconds = histogram("step_duration_seconds", "Time of one step.", MILLISECONDS)
        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._next_token = histogram("inter_token_latency_seconds", "Between two tokens of a request.", MILLISECONDS)
        self._whole = self._by_reason("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = self._by_reason("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = self._by_reason("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = self._by_reason("request_decode_time_seconds", "From the first token to the last.")
        self._waits = self._family(
            Counter,
            "request_wait_seconds",
            "Seconds for which answers that have ended had no row, by what they waited for.",
            "cause",
        )
        for cause in WAITS:
            self._waits.labels(**self._labels, cause=cause)
        self._prompt_length = histogram("request_prompt_tokens", "Tokens of one prompt.", TOKENS)
        self._answer_length = histogram("request_generation_tokens", "Tokens of one answer.", TOKENS)
        self.experts = ExpertTokens(self._labels)
        self.registry.register(self.experts)
        self.stores = StoreMetrics(self._labels)
        self.registry.register(self.stores)
        self.time = EngineTime(self._labels)
        self.registry.register(self.time)
        self.layers = StepParts(self._labels)
        self.registry.register(self.layers)
        self._finished = self._family(Counter, "request_success", "Answers that ended, by reason.", "finished_reason")
        self._handed_over = self._counter("prompts_handed_over", "Prompts that the engine has computed for others.")

    def watch_gpu(self, uuid: str) -> None:
        """Adds memory and utilization of this GPU, if the driver reports them."""
        try:
            self.registry.register(imported("kvern.observe.exposition:GpuCollector")(uuid, self._labels))
        except Exception as error:  # the driver's library may raise anything, and metrics are no reason not to serve
            logger.warning("no GPU memory and utilisation in the metrics: %s", error)

    def step(self, statistics: EngineStatistics, seconds: float) -> None:
        """Updates the metrics from an engine's counters, after a step or while it is idle."""
        seen, self._seen = self._seen, statistics
        self._running.set(statistics.running)
        self._waiting.set(statistics.waiting)
        self._usage.set(statistics.kv_cache_usage)
        self._target.set(statistics.target_itl)
        self._ratio.set(statistics.step_time_ratio)
        self.stores.update(statistics.stores)
        self.time.hear(statistics, self.engine_name)
        steps = statistics.steps - seen.steps
        if not steps:
            return
        for field, total in self._counted.items():
            total.inc(getattr(statistics, field) - getattr(seen, field))
        drafts = DraftFigures.between(seen, statistics)
        self._drafts.inc(drafts.count)
        self._accepted.inc(drafts.accepted)
        self._drafted.inc(drafts.runs)
        for position, (count, accepted) in enumerate(zip(drafts.by_position, drafts.accepted_by_position, strict=True)):
            self._drafts_at.labels(**self._labels, position=position).inc(count)
            self._accepted_at.labels(**self._labels, position=position).inc(accepted)
        self._step_tokens.observe((statistics.computed_tokens - seen.computed_tokens) / steps)
        self._step_requests.observe((statistics.scheduled - seen.scheduled) / steps)
        self._step_seconds.observe(seconds)

    def engine(self, ready: bool) -> None:
        """Sets whether an engine takes requests."""
        self._ready.set(ready)
        if not ready:
            self._ratio.set(0)

    def restarted(self) -> None:
        """Counts a restart; the new engine's counters begin at 0."""
        self._restarts.inc()
        self._begin_anew()

    def handed_over(self) -> None:
        """Counts a prompt that the engine has computed for another."""
        self._handed_over.inc()

    def weights_changed(self) -> None:
        """Counts a change of weights."""
        self._weight_updates.inc()

    def sleeps(self) -> None:
        """Notes that the engine runs nothing until the model is woken; its counters go on then."""
        for gauge in (self._running, self._waiting, self._usage, self._ratio):
            gauge.set(0)
        self._ready.set(math.nan)
        self.time.forget()

    def rests(self) -> None:
        """Notes that there is no engine until the model is woken, whose counters begin at 0."""
        self.sleeps()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._seen = EngineStatistics()
        self.experts.restarted()
        self.stores.restarted()
        self.time.restarted()
        self.layers.restarted()

    def first_token(self, seconds: float) -> None:
        """Records the seconds from a request to its first token."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Records the seconds between two tokens of a request."""
        self._next_token.observe(seconds)

    def finished(self, output: RequestOutput, times: RequestTimes) -> None:
        """Records a request that has ended, by itself or because its client left."""
        for answer in output.outputs:
            self._finished.labels(**self._labels, finished_reason=answer.finish_reason).inc()
        labels = {**self._labels, "finished_reason": output.outputs[0].finish_reason}
        self._whole.labels(**labels).observe(times.whole)
        if times.decode is None:
            return  # the request never started
        self._queue.labels(**labels).observe(output.queue_seconds)
        self._prefill.labels(**labels).observe(max(0.0, times.whole - times.decode - output.queue_seconds))
        self._decode.labels(**labels).observe(times.decode)
        self._prompt_length.observe(len(output.prompt_token_ids))
        for answer in output.outputs:
            self._answer_length.observe(len(answer.token_ids))

    def recorded(self, record: RequestRecord) -> None:
        """Records what an answer that has ended waited for."""
        for cause, seconds in record.waits.items():
            self._waits.labels(**self._labels, cause=cause).inc(seconds)

    def _by_reason(self, name: str, text: str) -> Histogram:
        return self._family(Histogram, name, text, "finished_reason", buckets=SECONDS)

    def _by_position(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, f"{text}, by their position, from 0 on.", "position")

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._family(Gauge, name, text).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._family(Histogram, name, text, buckets=buckets).labels(**self._labels)

    def _family(self, kind: Callable[..., Family], name: str, text: str, *by: str, **more: Any) -> Family:
        return kind(f"kvern:{name}", text, [*self._labels, *by], registry=self.registry, **more)


class Refusals:
    """Counts of refused requests for a model, over all its engines."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine_name = None
        self._model = model
        self._refused = Counter(
            "kvern:requests_refused",
            "Requests that were not run, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )

    def count(self, reason: str) -> None:
        """Counts a refused request."""
        self._refused.labels(self._model, reason).inc()


class ModelFigures:
    """The state of one of several models, and what its wakes took."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine_name = None
        labels, registry = ["model_name"], self.registry
        state = Gauge("kvern:model_state", "0: cold, 1: asleep, 2: awake.", labels, registry=registry)
        memory = Gauge("kvern:model_memory_bytes", "Memory of a model that is not cold.", labels, registry=registry)
        wakes = Counter("kvern:model_wakes", "Times that the model was woken.", labels, registry=registry)
        seconds = Counter("kvern:model_wake_seconds", "Seconds that this took, in all.", labels, registry=registry)
        text = "Times that the model made way because the machine had too little memory left."
        relieved = Counter("kvern:model_pressure_moves", text, labels, registry=registry)
        self._relieved = relieved.labels(model)
        self._state, self._memory = state.labels(model), memory.labels(model)
        self._wakes, self._seconds = wakes.labels(model), seconds.labels(model)

    def woke(self, seconds: float, memory: int) -> None:
        """Counts a wake, after which the model takes so many bytes."""
        self._state.set(2)
        self._memory.set(memory)
        self._wakes.inc()
        self._seconds.inc(seconds)

    def rests(self, memory: int) -> None:
        """Notes that the model is asleep and takes so many bytes, or is cold if that is 0."""
        self._state.set(1 if memory else 0)
        self._memory.set(memory)

    def relieves(self) -> None:
        """Counts that the model makes way for other programs."""
        self._relieved.inc()


class KeyFigures:
    """Counts of what each API key asked of a model, over all its engines. `-` is who sent no key that is known."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine_name = None
        self._model = model
        self._requests = self._by_key("http_requests", "HTTP requests but successful probes, by key.", "status")
        self._prompt = self._by_key("key_prompt_tokens", "Prompt tokens of each key.")
        self._cached = self._by_key("key_cached_prompt_tokens", "Prompt tokens of each key that were cached.")
        self._answer = self._by_key("key_generation_tokens", "Generated tokens of each key.")

    def know(self, keys: Iterable[str], has_requests: bool = True) -> None:
        """Shows keys before they ask, because Prometheus counts from the first figure that it sees.

        `has_requests`: HTTP requests are counted here, whatever model they name.
        """
        for key in keys:
            self.used(key, 0, 0, 0)
            if has_requests:
                self._requests.labels(self._model, key, 200)

    def answered(self, key: str, status: int) -> None:
        """Counts an HTTP request."""
        self._requests.labels(self._model, key, status).inc()

    def used(self, key: str, prompt: int, cached: int, answer: int) -> None:
        """Counts tokens of a request that has ended, or whose client has left."""
        for counter, tokens in ((self._prompt, prompt), (self._cached, cached), (self._answer, answer)):
            counter.labels(self._model, key).inc(tokens)

    def _by_key(self, name: str, text: str, *by: str) -> Counter:
        return Counter(f"kvern:{name}", text, ["model_name", "key", *by], registry=self.registry)
