"""The work of a step, by which its time is predicted."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvern.request.step import ScheduledTokens


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of a step: `rows` tokens, decodes that read `keys`, and `pairs` of prompt tokens and keys.

    `encoding`: what an encoder of images does besides, as about so many tokens.
    """

    rows: int = 0
    keys: int = 0
    pairs: float = 0.0
    encoding: float = 0.0

    def with_prompt(self, start: int, count: int) -> "StepLoad":
        """Returns the load with tokens of a prompt from position `start` on in addition."""
        return StepLoad(self.rows + count, self.keys, self.pairs + count * (start + count / 2), self.encoding)


def load_of(scheduled: Iterable[ScheduledTokens], encoding: float = 0.0) -> StepLoad:
    """Returns the load of a step with these tokens; drafts count as decodes."""
    rows = keys = 0
    pairs = 0.0
    for item in scheduled:
        rows += item.count
        if item.count > (item.sampled or 1):
            pairs += item.count * (item.start + item.count / 2)
        else:
            keys += item.start + item.count
    return StepLoad(rows, keys, pairs, encoding)
