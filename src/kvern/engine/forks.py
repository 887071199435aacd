"""Forks of rows: planned when a beam search has chosen its beams, carried out at the beginning of the next step."""

from collections.abc import Sequence

from kvern.request.step import BlockCopy, Fork, SchedulerOutput


class PendingForks:
    """Forks that no step has carried out yet; at most one a row."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._forks: dict[int, tuple[Fork, Sequence[BlockCopy], Sequence[int]]] = {}

    def add(self, fork: Fork, copies: Sequence[BlockCopy] = (), blocks: Sequence[int] = ()) -> None:
        """Let a row fork; `blocks` are the last of its block table if they are not those of the other row."""
        self._forks[fork.slot] = fork, copies, blocks

    def cancel(self, slot: int) -> bool:
        """The row's request loses its place; whether what it was forked from has not been copied."""
        fork, *_ = self._forks.pop(slot, (None,))
        return fork is not None and fork.source != slot

    def tell(self, output: SchedulerOutput) -> None:
        """Let a step that was planned do it."""
        forks = self._forks.values()
        output.forked = [fork for fork, _, _ in forks]
        output.copies[:0] = [copied for _, copies, _ in forks for copied in copies]
        for fork, _, blocks in forks:
            if blocks:
                output.grown.append((fork.slot, fork.length // self._block_size, list(blocks)))
        self._forks.clear()
