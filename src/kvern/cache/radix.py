"""The prefix cache: a radix tree whose every edge is the tokens of one KV block.

    root(namespace) --[16 tokens]--> node(block 7) --[16 tokens]--> node(block 3) --[5 tokens]--> node(block 9)

A path spells a run of tokens whose keys and values are in the blocks along it. Only a leaf may be partial (fewer tokens
than a block holds); no request uses a partial or half-matching block, its matching head is copied instead.

Each node has a content key (`cache/keys.py`), made when it is first asked for. A node is written when the step that
computes it has completed. Requests of this process may share blocks that are still to be written, since steps run in
order; a block is given to other processes only after it is written.

Invariants: the tree owns one reference to each node's block. `users` counts the running requests whose path goes
through a node, so a node's users are at least the sum of its children's. Nodes without users stand in `_unused` in the
order of their release, children before parents: its first entry is always a leaf, and evicting is taking that entry.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvern.cache.block_pool import BlockPool
from kvern.cache.keys import block_key, contents_in, edge_key, edge_of, edges_of, root_key

Tokens = tuple[int, ...]


class Node:
    """One cached block: `edge` is made of its tokens (`keys.edge_of`), `step` is the scheduler step that computes it.

    `key` is None until it is asked for.
    """

    __slots__ = (
        "block",
        "children",
        "edge",
        "key",
        "order",
        "parent",
        "step",
        "users",
    )

    def __init__(self, parent: "Node | None", edge: bytes, block: int, step: int) -> None:
        self.parent = parent
        self.edge = edge
        self.block = block
        self.step = step
        self.users = 0
        self.key: bytes | None = None
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []  # the children's edges, sorted: neighbours share the longest prefixes

    @property
    def tokens(self) -> Tokens:
        """The tokens of its block; for marked positions what `keys.contents_of` puts in their place."""
        return contents_in(self.edge)


class RadixCache:
    """Finds, keeps and evicts the blocks of known prefixes.

    `identity` says which model's keys and values these are; see `cache/keys.py`. The functions in `gaining` are called
    with each new node and its namespace, those in `losing` with each node that is about to be removed.
    """

    def __init__(self, pool: BlockPool, block_size: int, identity: bytes = b"") -> None:
        self.gaining: list[Callable[[bytes, Node], None]] = []
        self.losing: list[Callable[[Node], None]] = []
        self.completed = 0
        """The steps up to this one have completed, but for those that were undone."""
        self._pool = pool
        self._identity = identity
        self._block_size = block_size
        self._roots: dict[bytes, Node] = {}
        self._unused: OrderedDict[Node, None] = OrderedDict()
        self._size = 0

    @property
    def evictable_count(self) -> int:
        """Blocks that eviction can free."""
        return len(self._unused)

    @property
    def size(self) -> int:
        """Blocks in the tree."""
        return self._size

    def match(
        self, namespace: bytes, tokens: Sequence[int], limit: int, before: Sequence[Node] = ()
    ) -> tuple[list[Node], Node | None, int]:
        """The longest cached prefix of tokens[:limit].

        Returns the path of whole blocks, then the node whose block begins with the following tokens (None if there
        is none) and how many of its tokens match. Changes nothing. `before` is a path of these tokens that was found
        earlier: as far as its nodes are still there, their tokens are not compared again.
        """
        root = self._roots.get(namespace)
        if root is None:
            return [], None, 0
        size = self._block_size
        path = [*before[: limit // size]]
        if path and not _is_there(path[-1]):
            del path[bisect_left(path, True, key=_is_gone) :]  # who follows a node that is gone went before it
        if path and path[0].parent is not root:
            path.clear()
        node = path[-1] if path else root
        for edge in edges_of(tokens[len(path) * size : limit], size):
            child = node.children.get(edge)
            if child is None:
                break
            path.append(child)
            node = child
        start = len(path) * size
        partial, shared = _longest_shared(node, tuple(tokens[start : min(start + size, limit)]))
        return path, partial, shared

    def acquire(self, nodes: Sequence[Node]) -> None:
        """Count one more user of each node, so that it stays."""
        for node in nodes:
            if node.users == 0:
                del self._unused[node]
            node.users += 1

    def release(self, nodes: Sequence[Node]) -> None:
        """Count one user fewer of each node of a path; unused ones become the most recently used."""
        for node in reversed(nodes):
            node.users -= 1
            if node.users == 0:
                self._unused[node] = None

    def touch(self, node: Node) -> None:
        """Mark an unused node as just used."""
        if node in self._unused:
            self._unused.move_to_end(node)

    def insert(self, namespace: bytes, parent: Node | None, tokens: Tokens, block: int, step: int) -> Node:
        """Return the node of `tokens` under `parent` (None: the root), adding it with `block` if it is new."""
        return self.insert_edge(namespace, parent, edge_of(tokens), block, step)

    def insert_edge(self, namespace: bytes, parent: Node | None, edge: bytes, block: int, step: int) -> Node:
        """Return the node of an edge under `parent`, as `insert` does that of its tokens."""
        node = parent if parent is not None else self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(None, b"", -1, step)
            node.key = self.root_key(namespace)
        known = node.children.get(edge)
        if known is not None:
            return known
        order = node.order
        position = bisect_left(order, edge)
        if position and edge.startswith(order[position - 1]):
            self._remove(node.children[order[position - 1]])  # a partial leaf that the new block contains
            position -= 1
        child = Node(node, edge, block, step)
        node.children[edge] = child
        order.insert(position, edge)
        self._pool.share([block])
        self._unused[child] = None
        self._size += 1
        for gain in self.gaining:
            gain(namespace, child)
        return child

    def grow(self, namespace: bytes, path: list[Node], blocks: Iterable[tuple[bytes, int]], step: int) -> list[Node]:
        """Lets a path that is in use go on by edges with their blocks; returns the nodes, each with a user more."""
        grown, alone = list[Node](), list[int]()
        above = path[-1] if path else None
        for edge, block in blocks:
            if above is None or above.children:
                node = self.insert_edge(namespace, above, edge, block, step)
                self.acquire([node])
                step = max(step, node.step)
            else:  # by far the most frequent case: it has no other to go before, or to be
                node = above.children[edge] = Node(above, edge, block, step)
                node.users = 1
                above.order.append(edge)
                alone.append(block)
                for gain in self.gaining:
                    gain(namespace, node)
            grown.append(node)
            above = node
        path += grown
        self._pool.share(alone)
        self._size += len(alone)
        return grown

    def insert_tail(self, namespace: bytes, parent: Node | None, tokens: Tokens, block: int, step: int) -> Node | None:
        """Keep a block that is not full, unless the tree already holds a block that begins with its tokens."""
        node = parent if parent is not None else self._roots.get(namespace)
        if node is not None:
            edge = edge_of(tokens)
            position = bisect_left(node.order, edge)
            if position < len(node.order) and node.order[position].startswith(edge):
                return node.children.get(edge)
        return self.insert_edge(namespace, parent, edge_of(tokens), block, step)

    def root_key(self, namespace: bytes) -> bytes:
        """The content key of a namespace's root."""
        return root_key(self._identity, namespace)

    def key(self, node: Node) -> bytes:
        """The node's content key."""
        path = [node]
        while path[-1].key is None:
            assert path[-1].parent is not None
            path.append(path[-1].parent)
        key = path.pop().key
        assert key is not None
        for below in reversed(path):
            key = below.key = edge_key(key, below.edge)
        return key

    def is_written(self, node: Node) -> bool:
        """True if the node's keys and values are written to its block, for others to read."""
        return node.step <= self.completed

    def evict(self, count: int) -> None:
        """Free the `count` least recently used blocks (fewer when there are fewer)."""
        blocks = []
        for _ in range(min(count, len(self._unused))):
            leaf = next(iter(self._unused))
            self._take_out(leaf)
            blocks.append(leaf.block)
            if leaf.parent is not None and leaf.parent.parent is None and not leaf.parent.children:
                self._roots = {name: root for name, root in self._roots.items() if root is not leaf.parent}
        self._pool.release(blocks)

    def oldest(self, count: int) -> Iterator[Node]:
        """The least recently used nodes that eviction can remove, in order, at most so many."""
        return islice(self._unused, count)

    def evict_from(self, block: int) -> None:
        """Free blocks of this number and higher ones, with all that follows them, but for those that are in use."""
        for node in [node for node in self._unused if node.block >= block]:
            if node in self._unused:  # it did not follow one before
                self._remove_all([node])
        self._roots = {name: root for name, root in self._roots.items() if root.children}

    def drop_namespace(self, namespace: bytes) -> None:
        """Forget a namespace none of whose nodes is in use."""
        if (root := self._roots.pop(namespace, None)) is not None:
            self._remove_all([*root.children.values()])

    def _remove_all(self, pending: list[Node]) -> None:
        """Remove nodes that nobody uses, and all that follow them."""
        nodes = []
        while pending:
            node = pending.pop()
            nodes.append(node)
            pending.extend(node.children.values())
        for node in reversed(nodes):
            self._remove(node)

    def rename(self, namespace: bytes, name: bytes) -> None:
        """Let a namespace begin anew: what it has is that of another `name`, which is new, until it is evicted."""
        if (root := self._roots.pop(namespace, None)) is not None:
            root.key = self.root_key(name)
            self._roots[name] = root

    def forget_since(self, step: int) -> None:
        """Forget what steps from `step` on were to compute. Nothing is in use."""
        for node in [node for node in self._unused if node.step >= step]:  # children are never older than parents
            self._remove(node)
        self._roots = {name: root for name, root in self._roots.items() if root.children}

    def forget(self) -> None:
        """Let go of all nodes, when nobody needs the tree any more: they end at once, not by a collector."""
        for node in [*self.nodes()]:
            node.parent = None
        self._roots.clear()
        self._unused.clear()

    def clear(self) -> None:
        """Remove all nodes that no request uses."""
        self.evict(len(self._unused))

    def _remove(self, node: Node) -> None:
        self._take_out(node)
        self._pool.release((node.block,))

    def _take_out(self, node: Node) -> None:
        """Remove a node whose block is released afterwards."""
        del self._unused[node]
        parent = node.parent
        assert parent is not None and not node.children, "only an unused leaf can be removed"
        for lose in self.losing:
            lose(node)
        edge, order = node.edge, parent.order
        del parent.children[edge]
        del order[bisect_left(order, edge) if len(order) > 1 else 0]
        self._size -= 1

    def nodes(self) -> Iterator[Node]:
        """All of them, in no order."""
        return (node for _, node in self.named_nodes())

    def named_nodes(self) -> Iterator[tuple[bytes, Node]]:
        """All of them with their namespaces, parents before children."""
        for namespace, root in self._roots.items():
            pending = [root]
            while pending:
                children = pending.pop().children.values()
                yield from ((namespace, child) for child in children)
                pending.extend(children)

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of the module's docstring is broken."""
        seen: list[Node] = []
        for root in self._roots.values():
            pending = [root]
            while pending:
                node = pending.pop()
                assert node.order == sorted(node.children), "the order of the children is stale"
                assert node.parent is not None or node.key is not None, "a root without a key"
                for edge, child in node.children.items():
                    tokens = child.tokens
                    assert child.edge == edge == edge_of(tokens) and child.parent is node
                    assert len(tokens) <= self._block_size
                    assert len(tokens) == self._block_size or not child.children, "a partial block has children"
                    assert child.key is None or child.key == block_key(self.key(node), tokens), "a stale content key"
                    assert self._pool.references(child.block) > 0, f"block {child.block} of the tree is free"
                    assert (child.users == 0) == (child in self._unused)
                    assert child.users >= sum(grandchild.users for grandchild in child.children.values())
                    seen.append(child)
                    pending.append(child)
        assert len(seen) == self._size, f"{len(seen)} nodes are reachable and {self._size} are counted"
        assert len({node.block for node in seen}) == len(seen), "two nodes hold one block"
        assert set(self._unused) <= set(seen)
        last = {node: position for position, node in enumerate(self._unused)}
        for node in self._unused:
            assert all(last[child] < last[node] for child in node.children.values()), "a parent would go before a child"


def _is_there(node: Node) -> bool:
    """True if a node has not been removed from the tree."""
    return node.parent is not None and node.parent.children.get(node.edge) is node


def _is_gone(node: Node) -> bool:
    return not _is_there(node)


def _longest_shared(node: Node, tokens: Tokens) -> tuple[Node | None, int]:
    """The child of `node` that shares the longest head with `tokens`, and that head's length."""
    position = bisect_left(node.order, edge_of(tokens))
    best, length = None, 0
    for edge in node.order[max(0, position - 1) : position + 1]:
        shared = 0
        for ours, theirs in zip(tokens, contents_in(edge), strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared > length:
            best, length = node.children[edge], shared
    return best, length


class CacheMemory(NamedTuple):
    """The parts of a KV cache that its extensions work with.

    `pool` has the blocks of the prefix tree. `memory` has those that take memory: the same pool, except in a model
    whose layers all have a window. `extensions`: those that were made before.
    """

    pool: BlockPool
    memory: BlockPool
    tree: RadixCache
    block_size: int
    extensions: Sequence[object] = ()


class CachedPrefix(NamedTuple):
    """The cached prefix of a request: the nodes of whole blocks, then `shared` tokens at the head of `partial`.

    `known`: how many whole blocks of the request the prefix tree has, whether or not a request can continue there; -1:
    the request shares no blocks with others.
    """

    path: list[Node]
    partial: Node | None
    shared: int
    known: int

    @property
    def last(self) -> Node | None:
        """The node in which the prefix ends; None: the prefix is empty."""
        if self.partial is not None:
            return self.partial
        return self.path[-1] if self.path else None


class SequenceEnd(NamedTuple):
    """The end of a request: its `known` computed tokens, the last step, and the node of the last token, if any."""

    node: Node | None
    known: int
    step: int
