"""Rows that go on behind others: planned when a beam search has chosen, done by the next step before all else."""

from kvern.step import BlockCopy, Fork, SchedulerOutput


class PendingForks:
    """What no step has been told yet; one fork a row at most."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._forks: dict[int, tuple[Fork, list[BlockCopy]]] = {}

    def add(self, fork: Fork, copies: list[BlockCopy]) -> None:
        """Let a row fork; `copies` is at most one, of the head of its last block."""
        self._forks[fork.slot] = fork, copies

    def cancel(self, slot: int) -> bool:
        """The row's request loses its place; whether the head of its last block has not been copied."""
        _, copies = self._forks.pop(slot, (None, []))
        return bool(copies)

    def tell(self, output: SchedulerOutput) -> None:
        """Let a step that was planned do it."""
        forks = self._forks.values()
        output.forked = [fork for fork, _ in forks]
        output.copies[:0] = [copied for _, copies in forks for copied in copies]
        output.grown[:0] = [
            (fork.slot, fork.length // self._block_size, [copied.target]) for fork, copies in forks for copied in copies
        ]
        self._forks.clear()
