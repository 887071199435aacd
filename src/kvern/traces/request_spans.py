"""The spans of a request, made of its records when it has ended: names, attributes, and which requests are traced.

    request               the client's request, in the server
      prefill engine      its prompt's time in one that computed it for another: the same without `decode`
      engine              its time in one engine
        queue             the time before its first step
          load            keys and values come from a KV tier; `grammar`, `images` and `turn` are other waits of its own
        prefill           the steps that compute its prompt, each a `prefill chunk`
        decode            from its first token to its last
      detokenize          from the first text of its answers to the last, in the server

Attributes are those of OpenTelemetry's semantic conventions for generative AI, version 1.44, and `kvern.*` beside.
"""

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence

from kvern.request.record import RequestRecord
from kvern.traces.spans import Context, Event, Span, Value

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
ERROR_TYPE = "error.type"
STATUS_CODE = "http.response.status_code"
URL_PATH = "url.path"
PREFILL_ENGINE = "prefill engine"
"""The name of the span of a prompt in an engine that computed it for another."""

SLOWEST = 0.01
"""The share of the slowest requests, all of which are traced."""
REMEMBERED = 1000
"""The number of the last requests among which a request may be slow."""
FEWEST = 100
"""Before so many have ended none counts as slow."""


class Sampling:
    """Decides which requests are traced.

    The client's decision holds if it made one. Otherwise these are a `share` of all, those that failed and the slowest.
    """

    def __init__(self, share: float, dice: Callable[[], float] = random.random) -> None:
        self._share, self._dice = share, dice
        self._last: deque[float] = deque()
        self._ordered: list[float] = []

    def takes(self, context: Context | None, seconds: float, *, failed: bool) -> bool:
        """Returns whether a request of so many seconds is traced, which has just ended."""
        is_slow = self._is_slow(seconds)
        if context is not None:
            return context.is_sampled
        return failed or is_slow or self._dice() < self._share

    def _is_slow(self, seconds: float) -> bool:
        """Returns whether it is slower than all but SLOWEST of the last ones, among which it counts from now on."""
        faster = bisect_left(self._ordered, seconds)
        is_slow = len(self._ordered) >= FEWEST and faster >= len(self._ordered) * (1 - SLOWEST)
        insort(self._ordered, seconds)
        self._last.append(seconds)
        if len(self._last) > REMEMBERED:
            del self._ordered[bisect_left(self._ordered, self._last.popleft())]
        return is_slow


def engine_spans(record: RequestRecord, parent: int, place: int, name: str = "engine") -> list[Span]:
    """The spans of an answer's time in one engine: the first is at `place` of the trace, within that at `parent`.

    `name`: of the first.
    """
    began = record.arrived

    def span(name: str, start: float, end: float, within: int, **more: Value) -> Span:
        return Span(name, began + start, began + max(start, end), within, more)

    events = [Event("preempted", began + at) for at in record.preemptions]
    if (gap := record.longest_gap) is not None:
        cause: dict[str, Value] = {"kvern.gap.seconds": gap.seconds, "kvern.gap.cause": gap.cause}
        events.append(Event("longest gap", began + gap.began, cause))
    whole: dict[str, Value] = {
        "kvern.request_id": record.request_id,
        INPUT_TOKENS: record.prompt_tokens,
        OUTPUT_TOKENS: record.answer_tokens,
        FINISH_REASONS: [record.finish_reason],
        "kvern.preemptions": record.preemption_count,
        **{f"kvern.cached_tokens.{source}": count for source, count in record.cached.items()},
        **{f"kvern.wait.{cause}": seconds for cause, seconds in record.waits.items()},
    }
    found = [Span(name, began, began + record.ended, parent, whole, events)]
    queued = record.ended if record.first_step is None else record.first_step
    found.append(span("queue", 0, queued, place))
    for wait in record.own_waits:
        within = place + 1 if wait.ended <= queued else place
        came = {source: count for source, count in record.cached.items() if wait.cause == "load" and source != "device"}
        tokens = {f"kvern.cached_tokens.{source}": count for source, count in came.items()}
        found.append(span(wait.cause, wait.began, wait.ended, within, **tokens))
    if record.chunks and record.first_step is not None:
        end = record.chunks[-1].ended
        prefill = place + len(found)
        found.append(span("prefill", record.first_step, end, place, **{"kvern.chunks": record.chunk_count}))
        for chunk in record.chunks:
            of_chunk = {"kvern.tokens": chunk.tokens, "kvern.position": chunk.start}
            found.append(span("prefill chunk", chunk.began, chunk.ended, prefill, **of_chunk))
    if record.first_token is not None and name != PREFILL_ENGINE:
        steps = {"kvern.steps": record.steps, "kvern.company": record.company}
        drafts = {"kvern.draft_tokens": record.drafts.verified, "kvern.accepted_tokens": record.drafts.accepted}
        found.append(span("decode", record.first_token, record.ended, place, **steps, **drafts))
    return found


def request_spans(
    whole: Span, records: Sequence[RequestRecord], text: Span | None = None, prompts: Sequence[RequestRecord] = ()
) -> list[Span]:
    """The spans of a request, of which `whole` is the first, with its time in each engine; `text`: what made text.

    `prompts`: the records of its prompts in engines that computed these for others.
    """
    found = [whole]
    for record in prompts:
        found += engine_spans(record, 0, len(found), PREFILL_ENGINE)
    for record in records:
        found += engine_spans(record, 0, len(found))
    return found if text is None else [*found, text]
