"""Turns by which several users share one engine: start-time fair queueing (Goyal, Vin and Cheng 1996)."""

from collections import Counter


class Turns:
    """Hands out turns; the scheduler runs lower ones first.

    A user who asks for much gets turns further and further out, and one who was away gets the present one.
    """

    def __init__(self) -> None:
        self._present = 0
        self._next: dict[str, int] = {}
        self._waiting: Counter[str] = Counter()

    def waiting(self, owner: str) -> int:
        """Sequences of this user that have a turn and have not begun."""
        return self._waiting[owner]

    def take(self, owner: str, count: int) -> int:
        """The turn of `count` sequences that belong to this user."""
        turn = max(self._present, self._next.get(owner, 0))
        self._next[owner] = turn + count
        self._waiting[owner] += count
        return turn

    def give_back(self, owner: str, count: int) -> None:
        """Sequences were ended before they began."""
        self._leave(owner, count)
        if owner in self._next:
            self._next[owner] = max(self._present, self._next[owner] - count)

    def began(self, turn: int, owner: str, count: int) -> None:
        """Sequences with this turn have begun to run."""
        self._leave(owner, count)
        if turn > self._present:
            self._present = turn
            self._next = {owner: following for owner, following in self._next.items() if following > turn}

    def _leave(self, owner: str, count: int) -> None:
        self._waiting[owner] -= count
        if not self._waiting[owner]:
            del self._waiting[owner]
