"""News of what the prefix cache has: names of prefixes (`cache/prefix_names.py`) that came and went.

prefix tree --gain, lose--> CacheJournal --add, remove--> NameLedger --take--> who wants to know
"""

from bisect import bisect_right
from collections.abc import Iterable

from kvern.cache.keys import WORD_BYTES, block_key, contents_in, edge_key, has_marks, length_of, root_key
from kvern.cache.prefix_names import ENDS, named_tokens
from kvern.cache.radix import Node, RadixCache


class NameLedger:
    """Names that there are, each as often as something has it, and what changed since it was last told.

    What came and went between is not told, so that what is to be told is never more than there is and was.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, name: bytes) -> None:
        """Something has this name now."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if not count and self._removed.pop(name, name) is not None:
            self._stored[name] = None

    def remove(self, name: bytes) -> None:
        """Something that had this name is gone."""
        count = self._counts[name] - 1
        if count:
            self._counts[name] = count
            return
        del self._counts[name]
        if self._stored.pop(name, name) is not None:
            self._removed[name] = None

    @property
    def has_news(self) -> bool:
        """There is something to tell."""
        return bool(self._stored or self._removed)

    def take(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """Returns the names that came and those that went since they were told, `most` of them; these count as told.

        Beginnings come before what follows them, and go after it.
        """
        removed = _first(self._removed, most)
        return _first(self._stored, most - len(removed)), removed


def _first(names: dict[bytes, None], most: int) -> list[bytes]:
    """Takes the first names out."""
    if len(names) <= most:
        taken = list(names)
        names.clear()
        return taken
    taken = [name for name, _ in zip(names, range(most), strict=False)]
    for name in taken:
        del names[name]
    return taken


class CacheJournal:
    """Keeps the ledger of the prefixes that a prefix tree has, from now on until `close`."""

    def __init__(self, tree: RadixCache) -> None:
        self.ledger = NameLedger()
        self._tree = tree
        self._ends: dict[Node, int] = {}
        """The tokens up to the end of each node."""
        self._names: dict[Node, list[bytes]] = {}
        """The names of the nodes within which pieces end."""
        for namespace, node in tree.named_nodes():
            self._gain(namespace, node)
        tree.gaining.append(self._gain)
        tree.losing.append(self._lose)

    def close(self) -> None:
        """Keep it no longer."""
        self._tree.gaining.remove(self._gain)
        self._tree.losing.remove(self._lose)

    def names_of(self, nodes: Iterable[Node]) -> list[bytes]:
        """Returns the names of the pieces that end within nodes."""
        return [name for node in nodes for name in self._names.get(node, ())]

    def _gain(self, namespace: bytes, node: Node) -> None:
        assert node.parent is not None
        edge = node.edge
        start = self._ends.get(node.parent, 0)
        end = self._ends[node] = start + length_of(edge)
        first = bisect_right(ENDS, start)
        if ENDS[first] <= end:
            names = self._names[node] = self._made(namespace, node, first)
            for name in names:
                self.ledger.add(name)

    def _lose(self, node: Node) -> None:
        del self._ends[node]
        for name in self._names.pop(node, ()):
            self.ledger.remove(name)

    def _made(self, namespace: bytes, node: Node, first: int) -> list[bytes]:
        """The names of the pieces from number `first` on that end within a node."""
        start, stops = named_tokens(first), ENDS[first : bisect_right(ENDS, self._ends[node])]
        edges, above = [node.edge], node.parent
        assert above is not None
        while above.parent is not None and above not in self._names:
            edges.append(above.edge)
            above = above.parent
        extra = 0
        if above.parent is None:
            name = root_key(b"", namespace)
        else:
            name = self._names[above][-1]
            edges.append(above.edge)
            extra = length_of(above.edge) - (self._ends[above] - start)
        edge, names = b"".join(reversed(edges)), []
        if not has_marks(edge):
            start -= extra
            for stop in stops:
                name = edge_key(name, edge[WORD_BYTES * extra : WORD_BYTES * (stop - start)])
                names.append(name)
                extra = stop - start
            return names
        contents = contents_in(edge)[extra:]
        for stop in stops:
            name = block_key(name, contents[: stop - start])
            names.append(name)
            contents, start = contents[stop - start :], stop
        return names
