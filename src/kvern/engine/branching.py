"""Carries out what a beam search has chosen: some of its beams go on, and others take the places of those that end.

The beams of a search are requests like others. Each is held when its step has come back, until those of all have. What
a beam has reported outlives its blocks, so beams that find no room at the same time are computed one after the other.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

from kvern.engine.scheduler import Scheduler
from kvern.request.progress import DraftProgress
from kvern.request.request import Request, State
from kvern.request.step import Fork


class Branching:
    """Lets held beams go on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._names = 0

    def branch(self, members: Sequence[Request], children: Sequence[tuple[Request, int]]) -> list[Request]:
        """Let the held beams `members` go on as `children`: each a member and the token that follows it.

        A member's first child is itself; the others take the places of members without children, or new ones. Those
        for which there is no room wait. Returns one request for each child.
        """
        parents = {parent for parent, _ in children}
        spare = [member for member in members if member not in parents]
        for member in reversed(spare):
            self._scheduler.remove(member, keep_cached=False)
        first: dict[Request, int] = {}
        requests = []
        for parent, token_id in children:
            if parent in first:
                child = spare.pop(0) if spare else self._sibling(parent)
                self._fork(parent, child, token_id)
                requests.append(child)
            else:
                first[parent] = token_id
                requests.append(parent)
        for parent, token_id in first.items():
            if parent.state is State.RUNNING:
                self._scheduler.forks.add(Fork(parent.slot, parent.slot, len(parent.token_ids), token_id))
            self._scheduler.go_on(parent, token_id)
        for member in spare:
            self._retire(member, requests[0])
        return requests

    def _fork(self, parent: Request, child: Request, token_id: int) -> None:
        """Let `child`, which neither runs nor waits, continue from `parent`."""
        scheduler = self._scheduler
        child.token_ids = [*parent.token_ids, token_id]
        if child.search is not None:
            child.search.held.discard(child)
        fits = parent.state is State.RUNNING and scheduler.running.free_rows
        copies = scheduler.cache.fork(parent, child) if fits else None
        if copies is None:
            scheduler.requeue(child)
            return
        scheduler.enter(child)
        fork = Fork(child.slot, parent.slot, len(parent.token_ids), token_id)
        scheduler.forks.add(fork, copies, child.block_ids[-1:] if copies else [])

    def _sibling(self, parent: Request) -> Request:
        """One more beam of the same search; it reports nothing of the prompt, which its first beam computes."""
        sibling = copy.copy(parent)
        sibling.request_id = f"{parent.request_id}/{self._names}"
        self._names += 1
        sibling.params = parent.params.replace(prompt_logprobs=None)
        sibling.block_ids = []
        sibling.nodes = []
        sibling.num_computed_tokens = 0
        sibling.slot = -1
        sibling.drafts = DraftProgress()
        sibling.answer, sibling.queue = replace(parent.answer), replace(parent.queue)
        self._scheduler.register(sibling)
        return sibling

    def _retire(self, request: Request, heir: Request) -> None:
        """End a beam that was removed. The search keeps the name by which it is known outside."""
        assert request.search is not None
        if request.request_id == request.search.name:
            self._scheduler.exchange_ids(request, heir)
        request.search.held.discard(request)
        self._scheduler.forget(request)
