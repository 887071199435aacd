"""The server's record of prefixes that an engine has probably cached, from the requests that it got."""

from collections import OrderedDict
from collections.abc import Sequence

from kvern.cache.keys import block_keys, contents_of, root_key
from kvern.request.request import RequestSpec, cache_namespace

PIECE_TOKENS = 32
"""A shorter beginning is computed sooner than it is worth a thought."""
SEQUENCE_TOKENS = 64
"""So many tokens of a prompt to compute are as much work as a sequence that has not ended, and may at any token."""
MOST_PIECES = 1 << 18
"""The limit of one engine: 8 million tokens, some 40 MB."""


def answer_tokens(spec: RequestSpec) -> int:
    """Returns the work of the answers in tokens: all their tokens, if only their length ends them."""
    may_end = spec.stop_token_ids or spec.params.stop_strings or spec.grammar is not None
    return spec.params.sequences * (SEQUENCE_TOKENS if may_end else spec.max_tokens)


def piece_keys(spec: RequestSpec, answer: Sequence[int] = (), known: Sequence[bytes] = ()) -> list[bytes]:
    """Content keys of the full pieces of a prompt and an answer: equal where they begin alike in one namespace.

    `known`: those of the first pieces, which need not be made again.
    """
    contents = [*contents_of(spec.prompt.token_ids, dict(spec.prompt.block_keys)), *answer]
    parent = known[-1] if known else root_key(b"", cache_namespace(spec))
    return [*known, *block_keys(parent, contents[PIECE_TOKENS * len(known) :], PIECE_TOKENS)]


class PrefixRecord:
    """Keys of pieces, as many as the engine's cache has room for; those used longest ago go first, as they do there."""

    def __init__(self) -> None:
        self._most = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.added = 0
        """Pieces that the engine computed or used again, so far."""

    @property
    def is_kept(self) -> bool:
        """There is something to remember: an engine with a cache, among others."""
        return self._most > 0

    def begin(self, cache_tokens: int) -> None:
        """Starts the record of a new engine, whose cache is empty and holds `cache_tokens` tokens."""
        self._most = min(MOST_PIECES, cache_tokens // PIECE_TOKENS)
        self._keys.clear()

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Tokens of the pieces that are there from the first on."""
        known = next((place for place, key in enumerate(keys) if key not in self._keys), len(keys))
        return PIECE_TOKENS * known

    def add(self, keys: Sequence[bytes]) -> None:
        """The engine computes these, or uses them again."""
        for key in reversed(keys):  # so that no piece outlives those before it
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)
        self.added += len(keys)
