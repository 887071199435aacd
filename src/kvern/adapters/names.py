"""Names and keys of adapters: a name may be given again to other weights, a key is never reused."""

import itertools
import re
from dataclasses import dataclass

from kvern.errors import InvalidAdapter, InvalidRequest

NAME = re.compile(r"[\w./:@+-]{1,128}")
MOST_LOADING = 4
"""The number of adapters that are loaded at the same time: one is read, the others wait."""
MOST_SECONDS = 30
"""The longest time for a check of an adapter's files, also on a slow disk."""


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that requests can name. `key` distinguishes it from earlier adapters of its name."""

    name: str
    path: str
    key: int


class AdapterNames:
    """The adapters that new requests may use; none may have one of the `taken` names."""

    def __init__(self, taken: frozenset[str] = frozenset()) -> None:
        self.taken = taken
        self._adapters: dict[str, NamedAdapter] = {}
        self._reserved: set[str] = set()
        self._keys = itertools.count(1)

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def all(self) -> list[NamedAdapter]:
        """The adapters in the order in which they were loaded."""
        return list(self._adapters.values())

    def reserve(self, name: str, path: str) -> NamedAdapter:
        """A name for an adapter that is being loaded, until `add` or `release`. Raises InvalidAdapter."""
        if not NAME.fullmatch(name):
            raise InvalidAdapter(
                f"adapter name {name!r:.200} is not valid: it may have 128 letters, digits and . / : @ + - _ at most"
            )
        if name in self._adapters or name in self._reserved:
            raise InvalidAdapter(f"adapter {name} is loaded already: unload it first, or choose another name")
        if len(self._reserved) >= MOST_LOADING:
            raise InvalidAdapter(f"{MOST_LOADING} adapters are being loaded: try again when they are")
        if name in self.taken:
            raise InvalidAdapter(f"adapter name {name} is the model's own: choose another name")
        self._reserved.add(name)
        return NamedAdapter(name, path, next(self._keys))

    def add(self, adapter: NamedAdapter) -> None:
        """Let requests use an adapter that was loaded; its reservation ends."""
        self.release(adapter)
        self._adapters[adapter.name] = adapter

    def release(self, adapter: NamedAdapter) -> None:
        """The end of a reservation, also of one that has ended."""
        self._reserved.discard(adapter.name)

    def remove(self, name: str) -> NamedAdapter:
        """Removes a name, so that no new request can use the adapter. Raises InvalidRequest for an unknown name."""
        self.key(name)
        return self._adapters.pop(name)

    def key(self, name: str | None) -> int | None:
        """The key of an adapter; None for None. Raises InvalidRequest for an unknown name."""
        if name is None:
            return None
        if not isinstance(name, str) or name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise InvalidRequest(f"there is no adapter {name!r:.100}: loaded are {known}")
        return self._adapters[name].key
