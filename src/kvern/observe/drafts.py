"""Counts of verified and accepted drafts, by position."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from kvern.request.events import EngineStatistics


@dataclass(frozen=True)
class DraftFigures:
    """The number of drafts that were the 1st, 2nd, ... after a known token, and how many of them were accepted."""

    by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def between(cls, earlier: EngineStatistics, later: EngineStatistics) -> Self:
        """Returns the drafts that were verified between two statistics."""
        pairs = (
            (earlier.drafts_by_position, later.drafts_by_position),
            (earlier.accepted_by_position, later.accepted_by_position),
        )
        return cls(*(tuple(b - a for a, b in zip_longest(*pair, fillvalue=0)) for pair in pairs))

    @property
    def count(self) -> int:
        """The number of verified drafts."""
        return sum(self.by_position)

    @property
    def accepted(self) -> int:
        """The number of accepted drafts."""
        return sum(self.accepted_by_position)

    @property
    def runs(self) -> int:
        """The number of times that drafts of a request were verified: each time there was a 1st one."""
        return next(iter(self.by_position), 0)

    @property
    def shares(self) -> list[float]:
        """The accepted share of the 1st, 2nd, ... drafts."""
        return [
            right / count for right, count in zip(self.accepted_by_position, self.by_position, strict=True) if count
        ]

    @property
    def tokens_a_step(self) -> float:
        """The mean number of tokens that a step with drafts gave a request: accepted drafts and one more."""
        return 1 + self.accepted / self.runs if self.runs else 1.0

    def rows(self) -> list[tuple[str, str]]:
        """Returns rows for a final table; none if there were no drafts."""
        if not self.count:
            return []
        return [
            ("drafts that were right", f"{self.accepted:,} of {self.count:,} ({self.accepted / self.count:.1%})"),
            ("right at the 1st, 2nd ... place", " ".join(f"{share:.0%}" for share in self.shares)),
            ("tokens of a step with drafts", f"{self.tokens_a_step:.2f}"),
        ]
