"""Turns by which several users share one engine: start-time fair queueing (Goyal, Vin and Cheng 1996)."""


class Turns:
    """Hands out turns; the scheduler runs lower ones first.

    A user who asks for much gets turns further and further out, and one who was away gets the present one.
    """

    def __init__(self) -> None:
        self._present = 0
        self._next: dict[str, int] = {}

    def take(self, owner: str, count: int) -> int:
        """The turn of `count` sequences that belong to this user."""
        turn = max(self._present, self._next.get(owner, 0))
        self._next[owner] = turn + count
        return turn

    def give_back(self, owner: str, count: int) -> None:
        """Sequences were ended before they began."""
        if owner in self._next:
            self._next[owner] = max(self._present, self._next[owner] - count)

    def began(self, turn: int) -> None:
        """A sequence with this turn has begun to run."""
        if turn > self._present:
            self._present = turn
            self._next = {owner: following for owner, following in self._next.items() if following > turn}
