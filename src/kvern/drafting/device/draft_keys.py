"""The reach of the keys of a draft model in each row and block: missing keys are computed when they are needed.

A draft model's cache has the blocks and block tables of the model's, so that cached prefixes, copies and preemption
hold for both. But its keys are made only for requests that get drafts: they fall behind, and catch up. No torch.
"""

from kvern.cache.messages import TierMessage
from kvern.request.step import SchedulerOutput


class DraftKeys:
    """The keys of `slots` rows over `blocks` blocks of `block_size` tokens; only verified tokens count."""

    def __init__(self, slots: int, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._held = [0] * blocks
        """The number of first places of each block that have keys of the tokens that the model has there."""
        self._tables: list[list[int]] = [[] for _ in range(slots)]
        self._reach = [0] * slots
        self._guessed = [0] * slots

    def prepare(self, output: SchedulerOutput) -> None:
        """Let rows and blocks change as a step says. Rows that fork are beams, which get no drafts."""
        tier = output.message(TierMessage)
        if tier is not None:
            self._clear(tier.undrafted)
            for block in tier.drafted:
                self._held[block] = self._size
        for copy in output.copies:
            self._held[copy.target] = min(self._held[copy.source], copy.tokens)
        for request in output.joined:
            table = list(request.block_ids)
            self._clear(table[-(-request.num_computed_tokens // self._size) :])
            self._tables[request.slot] = table
            self._reach[request.slot] = 0
            self._guessed[request.slot] = 0
        for slot, first, blocks in output.grown:
            self._clear(blocks)
            self._tables[slot][first:] = blocks
        for slot, _, _ in output.drafts:
            self._guessed[slot] = 0  # others are verified

    def reach(self, slot: int) -> int:
        """Returns how many of a row's first tokens have keys; other rows may have made some in shared blocks."""
        table, size = self._tables[slot], self._size
        reach = self._reach[slot]
        while reach // size < len(table) and self._held[table[reach // size]] > reach % size:
            reach += self._held[table[reach // size]] - reach % size
        self._reach[slot] = reach
        return reach

    def computed(self, slot: int, tokens: int, guessed: int = 0) -> None:
        """So many of a row's first tokens, all verified, have keys now, and so many of the drafts behind them."""
        table = self._tables[slot]
        size = self._size
        reach = self._reach[slot]
        for column in range(reach // size, -(-tokens // size)):
            block = table[column]
            self._held[block] = max(self._held[block], min(size, tokens - column * size))
        self._reach[slot], self._guessed[slot] = max(tokens, reach), guessed

    def accepted(self, slot: int, drafts: int) -> int:
        """Returns the `reach` of a row when so many of its last drafts were right."""
        return self.reach(slot) + min(drafts, self._guessed[slot])

    def _clear(self, blocks: list[int]) -> None:
        for block in blocks:
            self._held[block] = 0
