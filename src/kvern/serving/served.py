"""The requests of a server, running and ended, with what became of them in its engines and nothing of their texts.

gate --ServedRequest--> service: asks --> engines: Passage, RequestRecord --> gate: ended
                          |
                          +--> Ledger, from which `kvern explain` and its route read
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from kvern.request.record import RequestRecord, Wait

MOST_ENDED = 10_000
"""The number of requests that are remembered."""
MOST_BYTES = 64 << 20
MOST_RECORDS = 64
"""The answers of one request whose records are kept, and the times at which engines were given prompts."""
BASE_BYTES = 1024
"""The bytes of a request without records, about."""

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
    ended: float | None = None
    passages: list[Passage] = field(default_factory=list)
    moves: int = 0
    """The number of passages that ended because the engine could not go on."""
    answers: int = 0
    """The number of records that came; `MOST_RECORDS` of them are kept."""
    _records: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The seconds since its arrival."""
        return time.monotonic() - self.began

    @property
    def size(self) -> int:
        """The bytes that it takes, about."""
        return BASE_BYTES + sum(len(content) for _, content in self._records)

    @property
    def records(self) -> Sequence[tuple[str, RequestRecord]]:
        """The records of its answers, each with the name of the engine."""
        return [(engine, decode(content)) for engine, content in self._records]

    @property
    def waits(self) -> dict[Wait, float]:
        """The seconds that its answers have waited for each cause, of several answers the most."""
        found: dict[Wait, float] = {}
        for _, record in self.records:
            for cause, seconds in record.waits.items():
                found[cause] = max(seconds, found.get(cause, 0.0))
        return found

    def given(self, engine: str) -> Passage:
        """An engine gets a prompt."""
        passage = Passage(engine, self.seconds)
        if len(self.passages) < MOST_RECORDS:
            self.passages.append(passage)
        return passage

    def lost(self, passage: Passage, reason: str) -> None:
        """The engine gives a prompt up that has not ended."""
        passage.until = self.seconds
        passage.reason = reason
        self.moves += 1

    def recorded(self, engine: str, record: RequestRecord) -> None:
        """An answer has ended in an engine."""
        self.answers += 1
        if len(self._records) < MOST_RECORDS:
            self._records.append((engine, encode(record)))


SERVED: ContextVar[ServedRequest | None] = ContextVar("SERVED", default=None)
"""The HTTP request that is being answered; None outside servers."""


def key_hash(name: str, client: str = "") -> str:
    """Returns the name under which a key's requests are kept."""
    return hashlib.blake2b(f"{name}\0{client}".encode(), digest_size=12).hexdigest()


class Ledger:
    """Remembers the requests that asked a model: those that run, and the last that have ended."""

    def __init__(self, most: int = MOST_ENDED, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], ServedRequest] = OrderedDict()
        """The requests by key and request id, in the order in which they began or ended."""
        self._answers: dict[tuple[str, str], tuple[str, str]] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, served: ServedRequest) -> None:
        """Remember a request from now on."""
        self._put(served)

    def end(self, served: ServedRequest) -> None:
        """A request has ended; what its engines still say of it is added."""
        if self._kept.get((served.key, served.request_id)) is served:
            self._put(served)

    def find(self, key: str, name: str) -> ServedRequest | None:
        """The request of a key, by its id or the id of its answer."""
        return self._kept.get(self._answers.get((key, name), (key, name)))

    def _put(self, served: ServedRequest) -> None:
        place = served.key, served.request_id
        self._drop(place)
        self._kept[place] = served
        if served.answer_id is not None:
            self._answers[served.key, served.answer_id] = place
        self._sizes[place] = served.size
        self._bytes += self._sizes[place]
        while len(self._kept) > 1 and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            self._drop(next(iter(self._kept)))

    def _drop(self, place: tuple[str, str]) -> None:
        earlier = self._kept.pop(place, None)
        if earlier is not None:
            self._bytes -= self._sizes.pop(place)
            if earlier.answer_id is not None and self._answers.get((earlier.key, earlier.answer_id)) == place:
                del self._answers[earlier.key, earlier.answer_id]
