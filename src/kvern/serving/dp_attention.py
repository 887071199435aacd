"""The first rank's side of DP attention: each rank has a scheduler, rows and a KV cache of its own.

    add / finish --> RankRequests of the request --TakeTurn--> EngineCore of that rank --TurnTaken--> TokenEvents

A turn is one step of all ranks: each schedules for itself, and their experts compute the rows of all. The first rank,
which is this process, calls the turns, and its own core is asked without messages.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from kvern.cache.journal import NameLedger
from kvern.cache.prefix_names import prefix_names
from kvern.engine.core import EngineCore
from kvern.engine.loop import EngineLoop, refused
from kvern.engine.step_watch import StepWatch
from kvern.errors import EngineDied
from kvern.request.events import CAUSES, EngineStatistics, TokenEvent, all_together
from kvern.request.request import FinishReason, Progress, RequestSpec
from kvern.runner.ranks.rank_executors import DPAttentionExecutor
from kvern.runner.ranks.rank_processes import RANKS_DISAGREE, RankProcesses
from kvern.runner.ranks.rank_wire import AddAdapter, TakeTurn
from kvern.serving.prefix_record import PrefixRecord, answer_tokens

if TYPE_CHECKING:
    from kvern.adapters.peft import Adapter
    from kvern.runner.ranks.experts import LayerCounts


IDLE = CAUSES.index("idle")
NONE = (0.0,) * len(CAUSES)


def take_turn(core: EngineCore, executor: DPAttentionExecutor, message: TakeTurn) -> list[TokenEvent]:
    """Do what is asked of a rank, and its part of one step of all ranks; what came of it for which answers."""
    events = []
    for spec, progress in message.added:
        try:
            core.add(spec, progress)
        except Exception as error:
            events += refused(spec, error)
    for request_ids, reason, stop_reason in message.finished:
        events += core.finish(request_ids, reason, stop_reason)
    for key in message.unloaded:
        core.unload_adapter(key)
    if core.has_work:
        events += core.step()
    executor.end_turn()
    return events


class RankRequests:
    """The requests of one rank, running and to be sent, and the prefixes that it has cached."""

    def __init__(self, sequences: int, cache_tokens: int) -> None:
        """Runs at most `sequences` sequences at a time, and caches `cache_tokens` tokens."""
        self.message = TakeTurn()
        self.statistics = EngineStatistics()
        self.has_work = False
        self.record = PrefixRecord(cache_tokens)
        self._most = sequences
        self._sequences = 0
        self._tokens = 0
        self._asked: dict[str, _Asked] = {}
        """Running requests by the ids of answers that have not ended."""

    @property
    def waits(self) -> bool:
        """True if a turn has something to do on this rank."""
        return self.has_work or self.message != TakeTurn()

    def cost(self, spec: RequestSpec, names: Sequence[bytes]) -> tuple[bool, int, int]:
        """Returns whether a request would wait here, the tokens to compute, and the tokens that this rank has
        computed."""
        uncached = spec.prompt_length - self.record.cached_tokens(names)
        return self._sequences >= self._most, self._tokens + uncached, self.record.added

    def add(self, spec: RequestSpec, progress: Sequence[Progress], names: list[bytes]) -> None:
        """Lets the rank start a request in its next turn. `names`: those of its prompt."""
        alone = progress if spec.params.beam_width is None else ()
        answers = [spec.answer_ids[one.index] for one in alone] or spec.answer_ids
        tokens = spec.prompt_length - self.record.cached_tokens(names) + answer_tokens(spec)
        asked = _Asked(spec, names, tokens, len(answers))
        self._asked |= dict.fromkeys(answers, asked)
        self._sequences += spec.params.sequences
        self._tokens += tokens
        self.record.add(names)
        self.message.added.append((spec, progress))

    def finish(self, request_ids: Iterable[str], reason: FinishReason, stop_reason: str | None) -> None:
        """Have the rank end those of these answers that are here."""
        found = [name for name in request_ids if name in self._asked]
        if found:
            self.message.finished.append((found, reason, stop_reason))
        for name in found:
            self._end(name)

    def take(self) -> TakeTurn:
        """Returns the message for the rank's next turn."""
        message, self.message = self.message, TakeTurn()
        return message

    def hear(self, events: Sequence[TokenEvent], statistics: EngineStatistics, has_work: bool) -> list[TokenEvent]:
        """Takes the results of a turn. Returns the events of answers that were not finished meanwhile, and records."""
        self.statistics, self.has_work = statistics, has_work
        known = [event for event in events if event.request_id in self._asked or event.record is not None]
        for event in known:
            asked = self._asked.get(event.request_id)
            if asked is None:
                continue
            if event.request_id == asked.spec.answer_ids[0]:
                asked.answer += event.token_ids
            if event.finish_reason is not None:
                self._end(event.request_id)
        return known

    @property
    def answer_ids(self) -> list[str]:
        """The ids of answers that have not ended."""
        return [*self._asked]

    def _end(self, name: str) -> None:
        asked = self._asked.pop(name)
        asked.left -= 1
        if not asked.left:
            self._sequences -= asked.spec.params.sequences
            self._tokens -= asked.tokens
            self.record.add(prefix_names(asked.spec, asked.answer, asked.names))


class _Asked:
    """A request that has not ended: its prompt's names, its cost, how many answers are `left`, and the first of
    them."""

    def __init__(self, spec: RequestSpec, names: list[bytes], tokens: int, left: int) -> None:
        self.spec = spec
        self.names = names
        self.tokens = tokens
        self.left = left
        self.answer: list[int] = []


class DPAttentionCore(EngineLoop):
    """The cores of all ranks as one."""

    def __init__(
        self,
        core: EngineCore,
        executor: DPAttentionExecutor,
        others: RankProcesses,
        ranks: list[RankRequests],
        seconds: float,
        watch: StepWatch | None = None,
    ) -> None:
        """`core` and `executor` are the first rank's, the first of the `ranks`; `others` answer within so many seconds.

        `watch` is told the answers that any rank may work on, before it does.
        """
        self._core = core
        self._executor = executor
        self._others = others
        self._ranks = ranks
        self._seconds = seconds
        self._watch = watch
        self._ring = None if watch is None else watch.ring
        self._until = time.monotonic()
        """The end of the last turn."""
        self._told = [0.0] * len(CAUSES)
        """The seconds of each cause, as they were told last."""
        self._is_broken = False
        self._digests: dict[int, bytes] = {}
        """The digests of the adapters that requests may use, by their keys."""
        self._ledger: NameLedger | None = None

    @property
    def has_work(self) -> bool:
        return any(rank.waits for rank in self._ranks)

    def add(self, spec: RequestSpec, progress: Sequence[Progress] = ()) -> None:
        names = []
        if any(rank.record.is_kept for rank in self._ranks):
            digest = b"" if spec.adapter is None else self._digests.get(spec.adapter, b"")
            names = prefix_names(spec, adapter_digest=digest)
        min(self._ranks, key=lambda rank: rank.cost(spec, names)).add(spec, progress, names)

    def finish(
        self, request_ids: Iterable[str], reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> list[TokenEvent]:
        names = list(request_ids)
        for rank in self._ranks:
            rank.finish(names, reason, stop_reason)
        return []  # each rank tells the records in its next turn

    def step(self) -> list[TokenEvent]:
        """Have all ranks take a turn. Raises EngineDied if a step of one of them fails, and whatever interrupts it."""
        if self._is_broken:
            raise EngineDied(RANKS_DISAGREE)
        try:
            return self._turn()
        except BaseException as error:
            self._is_broken = True
            if isinstance(error, Exception) and not isinstance(error, EngineDied):  # another rank has ended
                raise self._others.give_up() from error
            self._others.end()
            raise

    def _turn(self) -> list[TokenEvent]:
        first, *others = self._ranks
        began = time.monotonic()
        if self._watch is not None:
            self._watch.began([name for rank in self._ranks for name in rank.answer_ids], began)
        before = self._sum("computed_tokens"), self._sum("scheduled")
        self._executor.begin_turn()
        self._others.send_each([rank.take() for rank in others])
        own = take_turn(self._core, self._executor, first.take())
        events = first.hear(own, self._core.statistics(), self._core.has_work)
        for rank, taken in zip(others, self._others.turns(self._seconds), strict=True):
            events += rank.hear(taken.events, taken.statistics, taken.has_work)
        self._until = time.monotonic()
        if self._watch is not None:
            self._watch.ended(self._until)
        if self._ring is not None:
            last = self._until, self._until - began, self._sum("computed_tokens") - before[0]
            rows = self._sum("scheduled") - before[1]
            self._ring.write(last, rows, self._sum("waiting"), self._sum("generation_tokens"))
        return events

    def _sum(self, counter: str) -> int:
        return sum(getattr(rank.statistics, counter) for rank in self._ranks)

    def _spent(self) -> Sequence[float]:
        """The seconds of each cause of a rank on average, so that they add up to the time."""
        each = [rank.statistics.seconds for rank in self._ranks]
        spent = [sum(seconds) / len(each) for seconds in zip_longest(*each, NONE, fillvalue=0.0)]
        if not self.has_work:
            spent[IDLE] += time.monotonic() - self._until
        self._told = [*map(max, self._told, spent)]  # a rank tells of its time now and then, and later
        return self._told

    def statistics(self) -> EngineStatistics:
        together = all_together([rank.statistics for rank in self._ranks])
        together.seconds = tuple(self._spent())
        return together

    def watch_cache(self, wanted: bool) -> None:
        self._ledger = NameLedger() if wanted else None
        for rank in self._ranks:
            rank.record.tell(self._ledger)

    @property
    def cached_names(self) -> NameLedger | None:
        return self._ledger

    def count_experts(self) -> "Callable[[], LayerCounts]":
        return self._core.count_experts()  # each rank's router reads the rows of all

    def read_adapter(self, path: str) -> "Adapter":
        return self._core.read_adapter(path)

    def add_adapter(self, key: int, adapter: "Adapter") -> None:
        self._others.send(AddAdapter.of(key, adapter))
        self._digests[key] = adapter.digest
        self._core.add_adapter(key, adapter)

    def unload_adapter(self, key: int) -> None:
        for rank in self._ranks:  # behind requests that wait for the next turn and use it
            rank.message.unloaded.append(key)
