"""The adapters on the device. The scheduler decides, and its output tells the runner; no torch is imported.

host memory --enter--> a free index, or that of the idle adapter used longest ago --leave--> idle, still loaded
"""

from collections import Counter


class AdapterPlaces:
    """`count` places for adapters, which are known by their keys. An adapter with running requests keeps its place."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.load_count = 0
        self.users: Counter[int] = Counter()
        """Requests, running or not, by the adapter that they use; `register` and `unregister` them."""
        self._indices: dict[int, int] = {}  # of resident adapters; idle ones are in the order of their last use
        self._running: dict[int, int] = {}
        self._free = list(range(count - 1, -1, -1))

    def register(self, key: int | None) -> None:
        """Counts a new request that uses this adapter, if any."""
        if key is not None:
            self.users[key] += 1

    def unregister(self, key: int | None) -> None:
        """Counts the end of such a request."""
        if key is not None:
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key]

    def fits(self, key: int) -> bool:
        """True if a request with this adapter could run now."""
        return key in self._indices or bool(self._free) or len(self._running) < self.count

    def enter(self, key: int) -> tuple[int, bool]:
        """Starts a request of an adapter that `fits`; returns its index, and whether it must be loaded."""
        load = key not in self._indices
        if load:
            if not self._free:
                self.forget(next(other for other in self._indices if other not in self._running))
            self._indices[key] = self._free.pop()
            self.load_count += 1
        self._running[key] = self._running.get(key, 0) + 1
        return self._indices[key], load

    def leave(self, key: int) -> None:
        """Ends or pauses a running request of the adapter."""
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
            self._indices[key] = self._indices.pop(key)

    def forget(self, key: int) -> None:
        """Frees the index of an adapter without running requests."""
        if key in self._indices:
            self._free.append(self._indices.pop(key))

    def clear(self) -> None:
        """Forgets all adapters after a failure, when a load may be incomplete. No request may be running."""
        for key in list(self._indices):
            self.forget(key)

    def check_integrity(self, running: list[int]) -> None:
        """Raise AssertionError unless exactly the adapters of `running` requests, by key, are in use."""
        assert sorted([*self._indices.values(), *self._free]) == list(range(self.count)), (
            "places of adapters do not add up"
        )
        counted = {key: running.count(key) for key in running}
        assert counted == self._running, f"adapters {counted} run and {self._running} are counted"
        assert self._running.keys() <= self._indices.keys(), "an adapter runs and has no place"
