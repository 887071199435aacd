"""What became of the drafts of a run: how many were right, and where they stood."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from kvern.request.events import EngineStatistics


@dataclass(frozen=True)
class DraftFigures:
    """How many drafts were the 1st, 2nd, ... behind a known token, and how many of these were right."""

    by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def between(cls, earlier: EngineStatistics, later: EngineStatistics) -> Self:
        """Those that were verified meanwhile."""
        pairs = (
            (earlier.drafts_by_position, later.drafts_by_position),
            (earlier.accepted_by_position, later.accepted_by_position),
        )
        return cls(*(tuple(b - a for a, b in zip_longest(*pair, fillvalue=0)) for pair in pairs))

    @property
    def count(self) -> int:
        """Drafts that were verified."""
        return sum(self.by_position)

    @property
    def accepted(self) -> int:
        """Drafts that were right."""
        return sum(self.accepted_by_position)

    @property
    def runs(self) -> int:
        """How often drafts of a request were verified: each time there was a 1st one."""
        return next(iter(self.by_position), 0)

    @property
    def shares(self) -> list[float]:
        """How often the 1st, 2nd, ... draft was right, where there was one."""
        return [
            right / count for right, count in zip(self.accepted_by_position, self.by_position, strict=True) if count
        ]

    @property
    def tokens_a_step(self) -> float:
        """That a request got of a step that verified drafts of it: those that were right, and one more."""
        return 1 + self.accepted / self.runs if self.runs else 1.0

    def rows(self) -> list[tuple[str, str]]:
        """For a closing table; none if there were no drafts."""
        if not self.count:
            return []
        return [
            ("drafts that were right", f"{self.accepted:,} of {self.count:,} ({self.accepted / self.count:.1%})"),
            ("right at the 1st, 2nd ... place", " ".join(f"{share:.0%}" for share in self.shares)),
            ("tokens of a step with drafts", f"{self.tokens_a_step:.2f}"),
        ]
