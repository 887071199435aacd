"""The story of a request in plain words: the causes of its time, the largest first, and a timeline."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from kvern.request.record import RequestRecord, Wait
from kvern.serving.served import PREFILLED, ServedRequest

WAITED: dict[Wait, str] = {
    "queue": "for the next step",
    "rows": "for a row of the batch, all of which others had",
    "blocks": "for blocks of the KV cache",
    "budget": "for a place in a step, which were filled by others",
    "adapter": "for a place of its adapter, all of which others had",
    "batch": "for the static batch to end",
    "grammar": "for its grammar to be prepared",
    "load": "for cached keys and values to be loaded from a tier",
    "images": "for its images to be decoded and encoded",
    "turn": "for the prompt that it shares with the first answer",
    "trial": "while requests ran apart from each other after a step failed",
}
GAPS = {
    "prefill": "steps also computed prompts of others",
    "preempted": "it lost its row to others",
    "undone": "a step failed and was undone",
    "weights": "the weights of the model changed",
    "step": "a step took so long",
}
MOST_EVENTS = 200
"""The events of a timeline; of more the first and the last half are told."""


@dataclass(frozen=True)
class Part:
    """A part of a request's time, by the cause."""

    cause: str
    seconds: float
    text: str

    def told(self, whole: float) -> dict[str, Any]:
        """Returns it for the answer, with its share of the whole time."""
        share = self.seconds / whole if whole > 0 else 0.0
        return {"cause": self.cause, "seconds": _round(self.seconds), "share": round(share, 3), "text": self.text}


def explained(served: ServedRequest) -> dict[str, Any]:
    """Returns the answer about a request that runs or has ended. This takes long if it has many records."""
    whole = served.seconds if served.ended is None else served.ended
    records = served.records
    last = max((record for _, record in records), key=lambda record: record.arrived + record.ended, default=None)
    parts = sorted(_parts(served, last, whole), key=lambda part: part.seconds, reverse=True)
    events = _shortened(sorted(_events(served, [record for _, record in records]), key=lambda event: event[0]))
    return {
        "id": served.request_id,
        "object": "request.explanation",
        "answer_id": served.answer_id,
        "path": served.path,
        "model": served.model,
        "status": served.status or None,
        "running": served.ended is None,
        "created": int(served.arrived),
        "seconds": _round(whole),
        "first_token_seconds": _round(served.first_token),
        "first_byte_seconds": _round(served.first_byte),
        "traceparent": served.traceparent,
        "summary": _summary(served, parts, last, whole),
        "causes": [part.told(whole) for part in parts],
        "timeline": [{"seconds": _round(seconds), "text": text} for seconds, text in events],
        "moves": served.moves,
        "answers": served.answers,
        "records": [{"engine": engine, **_named(record)} for engine, record in records],
        "prompts": [{"engine": engine, **_named(record)} for engine, record in served.prompts],
    }


def _parts(served: ServedRequest, record: RequestRecord | None, whole: float) -> Iterator[Part]:
    """Yields the parts of the time of the answer that ended last."""
    before = min((passage.given for passage in served.passages), default=whole)
    for passage in served.passages:
        if passage.until is not None:
            cause = "prefill" if (passage.reason or "").startswith(PREFILLED) else "lost"
            yield Part(cause, passage.until - passage.given, f"in engine {passage.engine}: {passage.reason}")
    if record is None:
        given = [passage.given for passage in served.passages if passage.until is None]
        if given:
            text = "where it has not ended" if served.ended is None else "which has told nothing of it"
            yield Part("engine", whole - max(given), f"in its engine, {text}")
        yield Part("server", before, "in the server, before an engine had it")
        return
    came = record.arrived - served.arrived
    spent = sum(passage.until - passage.given for passage in served.passages if passage.until is not None)
    yield Part("server", max(0.0, came - spent), "in the server, before its engine had it")
    for cause, seconds in record.waits.items():
        yield Part(cause, seconds, f"waiting {WAITED[cause]}{_losses(record) if cause == 'blocks' else ''}")
    yield from _computed(record)
    after = whole - came - record.ended
    if served.ended is not None and after > 0:
        yield Part("sending", after, "in the server, after its engine had ended it")


def _computed(record: RequestRecord) -> Iterator[Part]:
    """Yields the parts in which a request had a row: before its first token, and after.

    They are one part if it lost its row and the record does not say how long it waited before its first token.
    """
    if record.first_step is None:
        return
    waited = sum(record.waits.values())
    computed = max(0.0, record.ended - waited)
    if record.first_token is None:
        yield Part("prompt", computed, f"computing its prompt: {_prompt(record)}")
        return
    early = sum(time < record.first_token for time in record.preemptions)
    if record.undone or 0 < early < record.preemption_count:
        yield Part("computing", computed, f"computing its prompt, {_prompt(record)}, and its answer, {_answer(record)}")
        return
    prompt = max(0.0, record.first_token - (waited if early else record.first_step))
    yield Part("prompt", prompt, f"computing its prompt: {_prompt(record)}")
    yield Part("answer", max(0.0, computed - prompt), f"computing its answer: {_answer(record)}")


def _prompt(record: RequestRecord) -> str:
    cached = ", ".join(f"{tokens:,} from {_source(source)}" for source, tokens in record.cached.items())
    again = ", with what was computed again" if record.preemption_count or record.undone else ""
    parts = f"in {record.chunk_count} parts{again}" if record.chunk_count > 1 else "at once"
    return f"{record.prompt_tokens:,} tokens{f', {cached}, the rest' if cached else ''} {parts}"


def _source(source: str) -> str:
    return "the prefix cache" if source == "device" else f"the store {source}"


def _answer(record: RequestRecord) -> str:
    text = f"{record.answer_tokens:,} tokens in {record.steps:,} steps with {record.company:.1f} others on average"
    if record.drafts.verified:
        text += f"; {record.drafts.accepted:,} of {record.drafts.verified:,} drafts were right"
    return text


def _losses(record: RequestRecord) -> str:
    count = record.preemption_count
    times = {1: "once", 2: "twice"}.get(count, f"{count} times")
    return f" (preempted {times})" if count else ""


def _summary(served: ServedRequest, parts: list[Part], record: RequestRecord | None, whole: float) -> str:
    sentences = []
    if parts and parts[0].seconds > 0:
        first = parts[0]
        sentences.append(f"It spent {_shown(first.seconds)} of {_shown(whole)} {first.text}.")
    if record is not None and record.preemption_count and (not parts or parts[0].cause != "blocks"):
        sentences.append(f"It lost its row to others{_losses(record).replace('preempted ', '')}.")
    sentences += [
        f"Engine {passage.engine} gave it up after {_shown(passage.until)}: {passage.reason}."
        for passage in served.passages
        if passage.until is not None
    ]
    gap = None if record is None else record.longest_gap
    if gap is not None:
        sentences.append(f"The longest time between two tokens was {_shown(gap.seconds)}: {GAPS[gap.cause]}.")
    return " ".join(sentences) or "Nothing is known of it yet."


def _shortened(events: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Returns the first and the last events, and how many are left out between."""
    if len(events) <= MOST_EVENTS:
        return events
    half = MOST_EVENTS // 2
    return [*events[:half], (events[half][0], f"{len(events) - 2 * half:,} events are left out"), *events[-half:]]


def _events(served: ServedRequest, records: list[RequestRecord]) -> Iterator[tuple[float, str]]:
    yield 0.0, f"{served.path} arrives"
    for passage in served.passages:
        yield passage.given, f"engine {passage.engine} gets it"
        if passage.until is not None:
            yield passage.until, f"engine {passage.engine} gives it up: {passage.reason}"
    for engine, record in served.prompts:
        start = record.arrived - served.arrived
        if record.first_step is not None:
            yield start + record.first_step, f"its prompt gets a row in engine {engine}"
        yield from _chunks(record, start, "its prompt")
        for time in record.preemptions:
            yield start + time, "its prompt loses its row to others"
        yield start + record.ended, "its prompt is computed"
    for record in records:
        start, name = record.arrived - served.arrived, record.request_id.rpartition("-")[2]
        if record.first_step is not None:
            yield start + record.first_step, f"answer {name} gets a row"
        yield from _chunks(record, start, f"answer {name}")
        for time in record.preemptions:
            yield start + time, f"answer {name} loses its row to others"
        if record.first_token is not None:
            yield start + record.first_token, f"answer {name} has its first token"
        if (gap := record.longest_gap) is not None:
            yield start + gap.began, f"answer {name} has no token for {_shown(gap.seconds)}: {GAPS[gap.cause]}"
        yield start + record.ended, f"answer {name} ends: {record.finish_reason}"
    if served.first_byte is not None:
        yield served.first_byte, "the first byte goes out"
    if served.ended is not None:
        yield served.ended, f"it has ended with status {served.status}"


def _chunks(record: RequestRecord, start: float, name: str) -> Iterator[tuple[float, str]]:
    """Yields the events of the parts of a prompt."""
    for chunk in record.chunks:
        first, last = chunk.start, chunk.start + chunk.tokens - 1
        took = _shown(chunk.ended - chunk.began)
        yield start + chunk.began, f"{name}: tokens {first:,} to {last:,} are computed in {took}"


def _named(record: RequestRecord) -> dict[str, Any]:
    """Returns a record with the names of its fields."""
    found: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
    found["chunks"] = [structs.asdict(one) for one in record.chunks]
    found["drafts"] = structs.asdict(record.drafts)
    found["own_waits"] = [structs.asdict(one) for one in record.own_waits]
    if (gap := record.longest_gap) is not None:
        found["longest_gap"] = structs.asdict(gap)
    return found


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
