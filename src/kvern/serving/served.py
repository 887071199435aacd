"""The requests of a server, running and ended, with what became of them in its engines and nothing of their texts.

gate --ServedRequest--> service: asks --> engines: Passage, RequestRecord --> gate: ended
                          |
                          +--> Ledger, from which `kvern explain` and its route read
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import msgspec

from kvern.request.record import RequestRecord, Wait
from kvern.request.request import FinishReason

PREFILLED = "its prompt was computed for another engine"
"""The reason for which a prefill engine gives a prompt up."""
MOST_ENDED = 10_000
"""The number of ended requests that are remembered."""
MOST_BYTES = 64 << 20
MOST_RECORDS = 64
"""The answers of one request whose records are kept, and the times at which engines were given prompts."""
BASE_BYTES = 1024
"""The bytes of a request without records, about."""
PART_BYTES = 100
"""The bytes of a passage, about, and of a record beside its content."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(RequestRecord).decode


@dataclass(slots=True)
class Passage:
    """The time that an engine had a prompt, in seconds after the request's arrival."""

    engine: str
    given: float
    until: float | None = None
    """The time at which it had to give the prompt up; None: it did not."""
    reason: str | None = None
    prompt: bytes | None = None
    """The record of a prompt that it computed for another engine, if it made one."""


@dataclass(slots=True)
class TextWork:
    """The work of making text of tokens and looking for stop strings."""

    until: float = 0.0
    """Its end, in seconds after the request's arrival."""
    seconds: float = 0.0
    stopped: dict[str, FinishReason] = field(default_factory=dict)
    """The reasons of answers that were ended here, as by a stop string. An engine may have ended one as well before it
    learnt of that."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ServedRequest:
    """An HTTP request. Times but `arrived` are seconds after it."""

    request_id: str
    path: str
    key: str
    """A hash of the name of its API key, and of the client if there are no keys."""
    traceparent: str | None
    """The header of W3C Trace Context that the client sent, as it came."""
    began: float = field(default_factory=time.monotonic)
    """The time of its arrival, by the monotonic clock."""
    arrived: float = field(default_factory=time.time)
    """The time of its arrival, in seconds since 1970."""
    model: str | None = None
    answer_id: str | None = None
    status: int = 0
    first_byte: float | None = None
    first_token: float | None = None
    text: TextWork = field(default_factory=TextWork)
    ended: float | None = None
    passages: list[Passage] = field(default_factory=list)
    moves: int = 0
    """The number of passages that ended because the engine could not go on."""
    asked: int = 0
    """The number of answers that engines were asked for, each of which has a record at its end."""
    answers: int = 0
    """The number of records that came; `MOST_RECORDS` of them are kept."""
    grown: "Callable[[ServedRequest], None] | None" = None
    """The one who is told of records that come after its end."""
    told: Callable[[], None] | None = None
    """The callback for the last of its records, when that comes after its end."""
    _records: list[tuple[str, bytes]] = field(default_factory=list)

    def apart(self, answer_id: str) -> "ServedRequest":
        """Returns the request for work of it that goes on in the background after its answer."""
        names = self.request_id, self.path, self.key, self.traceparent
        return ServedRequest(*names, self.began, self.arrived, answer_id=answer_id)

    def copy(self) -> "ServedRequest":
        """Returns the request as it is now, for another thread."""
        passages = [replace(passage) for passage in self.passages]
        return replace(self, passages=passages, _records=list(self._records))

    @property
    def seconds(self) -> float:
        """The seconds since its arrival."""
        return time.monotonic() - self.began

    @property
    def size(self) -> int:
        """The bytes that it takes, about."""
        parts = len(self.passages) + len(self._records)
        contents = [*(content for _, content in self._records), *(one.prompt or b"" for one in self.passages)]
        return BASE_BYTES + PART_BYTES * parts + sum(map(len, contents))

    @property
    def records(self) -> Sequence[tuple[str, RequestRecord]]:
        """The records of its answers, each with the name of the engine."""
        return [(engine, decode(content)) for engine, content in self._records]

    @property
    def prompts(self) -> Sequence[tuple[str, RequestRecord]]:
        """The records of prompts that engines computed for others, each with the name of the engine."""
        return [(one.engine, decode(one.prompt)) for one in self.passages if one.prompt is not None]

    @property
    def waits(self) -> dict[Wait, float]:
        """The seconds that its answers have waited for each cause, of several answers the most."""
        found: dict[Wait, float] = {}
        for _, record in self.records:
            for cause, seconds in record.waits.items():
                found[cause] = max(seconds, found.get(cause, 0.0))
        return found

    def given(self, engine: str, answers: int = 1) -> Passage:
        """An engine gets a prompt, with so many answers to it that none had before."""
        self.asked += answers
        passage = Passage(engine, self.seconds)
        if len(self.passages) < MOST_RECORDS:
            self.passages.append(passage)
        return passage

    def refused(self, engine: str, reason: str) -> None:
        """An engine that computes prompts for others does not take this one."""
        if len(self.passages) < MOST_RECORDS:
            self.passages.append(Passage(engine, self.seconds, self.seconds, reason))

    def lost(self, passage: Passage, reason: str) -> None:
        """The engine gives a prompt up that has not ended."""
        passage.until = self.seconds
        passage.reason = reason
        self.moves += 1

    def handed_over(self, passage: Passage, record: RequestRecord | None, lacks: str = "") -> None:
        """Another engine goes on with a prompt, as was intended. `lacks`: what it does not find, if it is not all."""
        passage.until = self.seconds
        passage.reason = f"{PREFILLED}; {lacks}" if lacks else PREFILLED
        passage.prompt = None if record is None else encode(record)

    def recorded(self, engine: str, record: RequestRecord) -> None:
        """An answer has ended in an engine."""
        self.answers += 1
        if (reason := self.text.stopped.get(record.request_id)) is not None:
            record = msgspec.structs.replace(record, finish_reason=reason)
        if len(self._records) < MOST_RECORDS:
            self._records.append((engine, encode(record)))
            if self.ended is not None and self.grown is not None:
                self.grown(self)
        if self.told is not None and self.answers >= self.asked:
            self.told()


SERVED: ContextVar[ServedRequest | None] = ContextVar("SERVED", default=None)
"""The HTTP request that is being answered; None outside servers."""


def named(answer_id: str) -> str:
    """Returns an answer's id, by which the HTTP request that is being answered is found as well."""
    if (served := SERVED.get()) is not None:
        served.answer_id = answer_id
    return answer_id


def key_hash(name: str, client: str = "") -> str:
    """Returns the name under which a key's requests are kept."""
    return hashlib.blake2b(f"{name}\0{client}".encode(), digest_size=12).hexdigest()


class Ledger:
    """Remembers the requests that asked a model: all that run, and the last that have ended."""

    def __init__(self, most: int = MOST_ENDED, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._running: dict[tuple[str, str], ServedRequest] = {}
        """The requests by key and request id."""
        self._ended: OrderedDict[tuple[str, str], ServedRequest] = OrderedDict()
        """The others, in the order in which they ended."""
        self._answers: dict[tuple[str, str], tuple[str, str]] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def begin(self, served: ServedRequest) -> None:
        """Remember a request from now on."""
        place = served.key, served.request_id
        self._forget(place)
        self._running[place] = served
        served.grown = self.end
        if served.answer_id is not None:
            self._answers[served.key, served.answer_id] = place

    def end(self, served: ServedRequest) -> None:
        """A request has ended, or has grown since."""
        place = served.key, served.request_id
        if self._running.get(place) is served:
            del self._running[place]
        elif self._ended.get(place) is not served:
            return
        self._ended[place] = served
        if served.answer_id is not None:
            self._answers[served.key, served.answer_id] = place
        size = served.size
        self._bytes += size - self._sizes.get(place, 0)
        self._sizes[place] = size
        while len(self._ended) > 1 and (len(self._ended) > self._most or self._bytes > self._most_bytes):
            self._forget(next(iter(self._ended)))

    def find(self, key: str, name: str) -> ServedRequest | None:
        """The request of a key, by its id or the id of its answer."""
        place = self._answers.get((key, name), (key, name))
        return self._running.get(place) or self._ended.get(place)

    def _forget(self, place: tuple[str, str]) -> None:
        earlier = self._running.pop(place, None) or self._ended.pop(place, None)
        self._bytes -= self._sizes.pop(place, 0)
        if earlier is not None and earlier.answer_id is not None:
            answer = earlier.key, earlier.answer_id
            if self._answers.get(answer) == place:
                del self._answers[answer]
