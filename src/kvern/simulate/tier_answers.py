"""The answers of a tier while steps were recorded, in order: a replay hears the same, at the same places.

Its threads end when they do, so that nothing but their answers says what was known when something was decided.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvern.cache.messages import ALL_STEPS, Part, TierIndex
from kvern.request.store_figures import StoreFigures, StorePrice

Page = tuple[bytes, Part]


class PricedTier(TierIndex, Protocol):
    """A tier that is told what computing takes: the seconds of a prompt's tokens between two positions."""

    computing: Callable[[int, int], float] | None

    def prices(self) -> dict[str, StorePrice] | None:
        """Returns the prices of loads, for a router."""
        ...


class NotedTier:
    """Notes what a tier answers."""

    def __init__(self, tier: PricedTier) -> None:
        self.answers: list[Any] = []
        """The answers since they were taken last."""
        self.identity, self.keeps_drafts = tier.identity, tier.keeps_drafts
        self._tier = tier

    @property
    def computing(self) -> Callable[[int, int], float] | None:
        """See `PricedTier`."""
        return self._tier.computing

    @computing.setter
    def computing(self, seconds: Callable[[int, int], float] | None) -> None:
        self._tier.computing = seconds

    def _note(self, answer: Any) -> Any:
        self.answers.append(answer)
        return answer

    def wants(self, key: bytes, part: Part) -> bool:
        """See `TierIndex`."""
        return bool(self._note(self._tier.wants(key, part)))

    def source(self, key: bytes, part: Part) -> str | None:
        """See `TierIndex`."""
        found: str | None = self._note(self._tier.source(key, part))
        return found

    def is_saving(self, key: bytes, part: Part) -> bool:
        """See `TierIndex`."""
        return bool(self._note(self._tier.is_saving(key, part)))

    def others_saved(self) -> int:
        """See `TierIndex`."""
        return self._tier.others_saved()

    def pays(
        self,
        pages: Sequence[tuple[str, Part]],
        start: int,
        end: int,
        ahead: Sequence[tuple[int, int]] = (),
        is_next: bool = True,
    ) -> bool:
        """See `TierIndex`."""
        return bool(self._note(self._tier.pays(pages, start, end, ahead, is_next)))

    def patience(self, start: int, end: int) -> float:
        """See `TierIndex`."""
        return self._tier.patience(start, end)

    def ask(self, pages: Iterable[Page]) -> int | None:
        """See `TierIndex`."""
        found: int | None = self._note(self._tier.ask(pages))
        return found

    def answered(self, question: int) -> bool:
        """See `TierIndex`."""
        return bool(self._note(self._tier.answered(question)))

    def figures(self) -> dict[str, StoreFigures]:
        """See `TierIndex`."""
        return self._tier.figures()

    def prices(self) -> dict[str, StorePrice] | None:
        """See `PricedTier`."""
        return self._tier.prices()


class RepeatedTier:
    """Gives the answers that were noted; none is left where other things are asked than then: then it has nothing."""

    keeps_drafts = False

    def __init__(self, identity: bytes, stores: Sequence[str], answers: Iterator[Any]) -> None:
        self.identity = identity
        self.computing: Callable[[int, int], float] | None = None
        self._stores, self._answers = stores, answers

    def wants(self, key: bytes, part: Part) -> bool:
        """See `TierIndex`."""
        return bool(next(self._answers, False))

    def source(self, key: bytes, part: Part) -> str | None:
        """See `TierIndex`."""
        found = next(self._answers, None)
        return found if isinstance(found, str) else None

    def is_saving(self, key: bytes, part: Part) -> bool:
        """See `TierIndex`."""
        return bool(next(self._answers, False))

    def others_saved(self) -> int:
        """See `TierIndex`: a replay has no other ranks."""
        return ALL_STEPS

    def pays(
        self,
        pages: Sequence[tuple[str, Part]],
        start: int,
        end: int,
        ahead: Sequence[tuple[int, int]] = (),
        is_next: bool = True,
    ) -> bool:
        """See `TierIndex`."""
        return bool(next(self._answers, False))

    def patience(self, start: int, end: int) -> float:
        """See `TierIndex`."""
        return 0.0

    def ask(self, pages: Iterable[Page]) -> int | None:
        """See `TierIndex`."""
        found = next(self._answers, None)
        return found if isinstance(found, int) else None

    def answered(self, question: int) -> bool:
        """See `TierIndex`."""
        return bool(next(self._answers, True))

    def figures(self) -> dict[str, StoreFigures]:
        """See `TierIndex`."""
        return {name: StoreFigures() for name in self._stores}

    def prices(self) -> dict[str, StorePrice] | None:
        """See `PricedTier`; nothing is chosen by them in a replay of one engine."""
        return None
