"""Prompts that an engine computes for others: their ends are told once a store has the pages."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.request import Request
from kvern.request.step import SchedulerOutput

if TYPE_CHECKING:
    from kvern.cache.manager import KVCacheManager
    from kvern.cache.shared_prompt import SharedPrompt

HOLD_SECONDS = 0.005
"""Seconds for which no step begins that would have to end before an end can be told."""
HAND_OVER_SECONDS = 1.0
"""Seconds after which a prompt is handed over though pages are still on their way, as to a store that hangs."""


class HandOvers:
    """The prompts of one engine that are computed for others. `statistics`: the engine's."""

    def __init__(self, cache: "KVCacheManager", statistics: EngineStatistics) -> None:
        self._cache = cache
        self._statistics = statistics
        self.computed: dict[str, Request] = {}
        """The requests that are computed now, by their ids."""
        self.awaiting: list[tuple[TokenEvent, SharedPrompt, float]] = []
        """The last events of others, or those of parts, what they wait for, and since when."""

    def begin(self, request: Request) -> None:
        """A request has come, which may be one of them."""
        if request.spec.hands_over:
            self.computed[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """A request ends otherwise, which may be one of them."""
        self.computed.pop(request_id, None)

    def withhold(self, events: list[TokenEvent], output: SchedulerOutput, now: float) -> list[TokenEvent]:
        """Returns the events of a step without those that are told later, as is what it computed of longer prompts."""
        for name, item in zip(output.request_ids, output.scheduled, strict=True):
            request, end = self.computed.get(name), item.start + item.count
            if request is not None and request.spec.tells_parts and end < request.prompt_length:
                shared = self._cache.shared_part(request, end)
                if shared is not None:
                    stored = len(shared.keys) * shared.page_tokens
                    self.awaiting.append((TokenEvent(name, stored_tokens=stored), shared, now))
        return [event for event in events if not self._awaits(event, now)]

    def _awaits(self, event: TokenEvent, now: float) -> bool:
        request = None if event.finish_reason is None else self.computed.pop(event.request_id, None)
        if request is None:
            return False
        self._statistics.generation_tokens -= len(event.token_ids)
        shared = self._cache.shared(request)
        if shared is not None:
            self.awaiting.append((event, shared, now))
        return shared is not None

    def holds(self, now: float) -> bool:
        """Returns whether an end will probably be told at once."""
        return any(now < since + HOLD_SECONDS and shared.arrives for _, shared, since in self.awaiting)

    def ended(self, now: float) -> list[TokenEvent]:
        """Returns the last events of prompts that others find now, or have to do without."""
        ready = [each for each in self.awaiting if each[1].has_ended() or now >= each[2] + HAND_OVER_SECONDS]
        if ready:
            self.awaiting = [each for each in self.awaiting if each not in ready]
        return [event if event.stored_tokens else _told(event, shared.lacking_tokens) for event, shared, _ in ready]


def _told(event: TokenEvent, lacking: int) -> TokenEvent:
    return replace(event, stop_reason=f"no store has {lacking:,} of its tokens") if lacking else event
