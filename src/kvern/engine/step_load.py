"""The work of a step, by which its time is predicted."""

from collections.abc import Iterable

import msgspec

from kvern.request.step import ScheduledTokens


class StepLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The work of a step: `rows` tokens, decodes that read `keys`, and `pairs` of prompt tokens and keys.

    `encoding`: what an encoder of images does besides, as about so many tokens. `prompt`: how many of the rows are
    tokens of prompts; `reach`: one more than the highest position.
    """

    rows: int = 0
    keys: int = 0
    pairs: float = 0.0
    encoding: float = 0.0
    prompt: int = 0
    reach: int = 0

    def with_prompt(self, start: int, count: int) -> "StepLoad":
        """Returns the load with tokens of a prompt from position `start` on in addition."""
        pairs, reach = self.pairs + count * (start + count / 2), max(self.reach, start + count)
        return StepLoad(self.rows + count, self.keys, pairs, self.encoding, self.prompt + count, reach)


def load_of(scheduled: Iterable[ScheduledTokens], encoding: float = 0.0) -> StepLoad:
    """Returns the load of a step with these tokens; drafts count as decodes."""
    rows = keys = prompt = reach = 0
    pairs = 0.0
    for item in scheduled:
        count = item.count
        end = item.start + count
        rows += count
        if end > reach:
            reach = end
        if count > (item.sampled or 1):
            prompt += count
            pairs += count * (item.start + count / 2)
        else:
            keys += end
    return StepLoad(rows, keys, pairs, encoding, prompt, reach)
