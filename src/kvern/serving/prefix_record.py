"""The record of prefixes that a rank in DP attention has probably cached, from the requests that it got."""

from collections import OrderedDict
from collections.abc import Sequence

from kvern.cache.journal import NameLedger
from kvern.cache.prefix_names import named_tokens
from kvern.request.request import RequestSpec

SEQUENCE_TOKENS = 64
"""So many tokens of a prompt to compute are as much work as a sequence that has not ended, and may at any token."""


def answer_tokens(spec: RequestSpec) -> int:
    """Returns the work of the answers in tokens: `max_tokens` of each if nothing else can end it, else an estimate."""
    may_end = spec.stop_token_ids or spec.params.stop_strings or spec.grammar is not None
    return spec.params.sequences * (SEQUENCE_TOKENS if may_end else spec.max_tokens)


class PrefixRecord:
    """Names of prefixes, as many as the rank's cache has room for; those used longest ago go first, as they do there.

    `cache_tokens`: the tokens that it has room for.
    """

    def __init__(self, cache_tokens: int) -> None:
        self._most = cache_tokens
        self._tokens = 0
        self._names: OrderedDict[bytes, int] = OrderedDict()
        """The names, and the tokens of their pieces."""
        self._ledger: NameLedger | None = None
        self.added = 0
        """Pieces that the rank computed or used again, so far."""

    @property
    def is_kept(self) -> bool:
        """There is something to remember."""
        return self._most > 0

    def tell(self, ledger: NameLedger | None) -> None:
        """Have a ledger know of the names from now on; None: nobody wants to know."""
        self._ledger = ledger
        if ledger is not None:
            for name in reversed(self._names):
                ledger.add(name)

    def cached_tokens(self, names: Sequence[bytes]) -> int:
        """Tokens of the pieces that are there from the first on."""
        return named_tokens(next((place for place, name in enumerate(names) if name not in self._names), len(names)))

    def add(self, names: Sequence[bytes]) -> None:
        """The rank computes these, or uses them again."""
        for place in reversed(range(len(names))):  # so that no piece outlives those before it
            name = names[place]
            if name not in self._names:
                self._names[name] = named_tokens(place + 1) - named_tokens(place)
                self._tokens += self._names[name]
                if self._ledger is not None:
                    self._ledger.add(name)
            self._names.move_to_end(name)
        while self._tokens > self._most:
            name, tokens = self._names.popitem(last=False)
            self._tokens -= tokens
            if self._ledger is not None:
                self._ledger.remove(name)
        self.added += len(names)
