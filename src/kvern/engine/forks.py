"""Rows that go on behind others: planned when a beam search has chosen, done by the next step before all else."""

from collections.abc import Sequence

from kvern.request.step import BlockCopy, Fork, GrownTable, SchedulerOutput


class PendingForks:
    """What no step has been told yet; one fork a row at most."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._forks: dict[int, tuple[Fork, Sequence[BlockCopy], Sequence[int]]] = {}

    def add(self, fork: Fork, copies: Sequence[BlockCopy] = (), blocks: Sequence[int] = ()) -> None:
        """Let a row fork; its last `blocks`, one in each block table, have heads that are copies, or are shared."""
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
            column = fork.length // self._block_size
            for table, block in enumerate(blocks, -1):
                if table < 0:
                    output.grown.append((fork.slot, column, [block]))
                else:
                    output.grown_windows.append(GrownTable(fork.slot, table, column, [block]))
        self._forks.clear()
