"""A prompt that was computed for other engines, which read its pages from a store."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvern.cache.messages import PageSave, Part, TierIndex

LAST_PART = 2048
"""Tokens of a prompt for another engine that are computed in a step after all others: the pages of these are saved and
loaded meanwhile, which takes about half as long."""


def before_last_part(remaining: int) -> int:
    """Returns how many of a prompt's tokens one step computes at most, if parts of it are told."""
    return remaining - LAST_PART if 2 * remaining >= 3 * LAST_PART else remaining


class OtherSaves:
    """The pages of which other ranks may still be saving their parts, by the steps that they were told with."""

    def __init__(self, tier: TierIndex) -> None:
        self.is_noted = False
        """There have been prompts for other engines."""
        self.tier = tier
        self._steps: dict[bytes, int] = {}

    def note(self, step: int, saves: Iterable[PageSave]) -> None:
        """The message of a step tells of these pages."""
        if self.is_noted:
            self._forget_saved()
            self._steps |= dict.fromkeys((save.key for save in saves), step)

    def has_any(self, keys: Iterable[bytes]) -> bool:
        """True if some of these pages are not there yet."""
        self._forget_saved()
        return any(key in self._steps for key in keys)

    def _forget_saved(self) -> None:
        if self._steps:
            last = self.tier.others_saved()
            self._steps = {key: step for key, step in self._steps.items() if step > last}


@dataclass(eq=False)
class SharedPrompt:
    """The pages of a prompt that other engines are to find; each is awaited as long as it is on its way to a store.

    `is_planned` says whether a part of a page will be saved, `save_again` has pages saved that the device still has:
    others may have taken their place in the store. That is tried once: a store may be too small for the prompt.
    """

    others: OtherSaves
    keys: Sequence[bytes]
    """The names of all its pages, in order."""
    awaited: deque[tuple[bytes, Part]]
    page_tokens: int
    is_planned: Callable[[bytes, Part], bool]
    save_again: Callable[[], None]
    _was_saved_again: bool = False
    _lacking: list[tuple[bytes, Part]] = field(default_factory=list)

    def has_ended(self) -> bool:
        """Returns whether nothing is awaited any more."""
        while self.awaited:
            key, part = self.awaited[0]
            if self.others.tier.source(key, part) is None:
                if self._comes(key, part):
                    return False
                if not self._was_saved_again:
                    self._was_saved_again = True
                    self.save_again()
                    continue
                self._lacking.append((key, part))
            self.awaited.popleft()
        return not self.others.has_any(self.keys)

    @property
    def arrives(self) -> bool:
        """True if what is awaited next comes without another step."""
        return not self.awaited or self.others.tier.is_saving(*self.awaited[0])

    @property
    def lacking_tokens(self) -> int:
        """The tokens that others cannot load, as far as is known now: all behind a gap, and all without a state."""
        lacking = [*self._lacking, *self.awaited]
        behind = {key for key, _ in lacking}
        first = next((place for place, key in enumerate(self.keys) if key in behind), len(self.keys))
        has_state = all(part is not Part.STATE for _, part in lacking)
        return self.page_tokens * (len(self.keys) - (first if has_state else 0))

    def _comes(self, key: bytes, part: Part) -> bool:
        return self.is_planned(key, part) or self.others.tier.is_saving(key, part)
