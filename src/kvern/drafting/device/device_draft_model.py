"""Drafts by another model where the host does not wait for the device: as `draft_model.py`, without knowing where.

Where a row's newest token is, the device says. What the host knows is a bound: up to there it catches up, a token more
or less, and from the token before the newest each row goes on; that one may have keys already and gets the same again.
"""

from collections.abc import Iterator, Sequence

import torch

from kvern.device.device_batch import DeviceBatch, build_device_batch
from kvern.device.transfer import upload
from kvern.drafting.device.draft_graphs import MOST_ROWS, DraftGraphs
from kvern.drafting.device.draft_keys import DraftKeys
from kvern.drafting.device.drafter import Captures, ComputedStep
from kvern.drafting.rejection import Drawn
from kvern.kernels.batch import write_sampled
from kvern.layers.step_context import NO_ADAPTERS
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.device_sampling import sample_plain
from kvern.runner.prompt_graphs import PromptInputs, PromptKind, PromptShape
from kvern.runner.step_graphs import DeviceModel, PlannedStep, StepGraphs


def parts_of(behind: Sequence[tuple[int, int, int]], most: int) -> Iterator[list[ScheduledTokens]]:
    """Steps of `most` tokens at most that compute rows, each from a first token to before another: (row, first, end).

    Those of a single token come first in each, as batches have them.
    """
    part: list[ScheduledTokens] = []
    room = most
    for slot, first, end in behind:
        while first < end:
            count = min(end - first, room)
            part.append(ScheduledTokens(slot, first, count, 1))
            first, room = first + count, room - count
            if not room:
                yield sorted(part, key=lambda item: item.count > 1)
                part, room = [], most
    if part:
        yield sorted(part, key=lambda item: item.count > 1)


class DeviceDraftModel:
    """A `Drafter` whose batch lives on the device; `max_tokens`: of a step that catches up with a prompt."""

    reads_hidden, inputs = False, None

    def __init__(
        self,
        model: DeviceModel,
        max_tokens: int,
        drafts: DraftGraphs | None = None,
        prompts: StepGraphs[PromptShape, PromptInputs] | None = None,
        drawn: Drawn | None = None,
    ) -> None:
        """`drafts`, `prompts`: graphs of its steps that draft, and of those that read prompts before.

        `drawn`: where it keeps what it draws from, outside of graphs.
        """
        self._model = model
        self._rows = model.rows
        self._max_tokens = max_tokens
        self.drawn = drawn
        self._keys = DraftKeys(len(model.rows.requests), model.attention.caches[0].shape[1], model.block_size)
        self.drafts, self.prompts = drafts, prompts
        self._least = [0] * len(model.rows.requests)
        """The least position of each row's newest token, when drafts were last made for it."""

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        return self._model.attention.caches

    @property
    def graphs(self) -> Sequence[Captures]:
        return [graphs for graphs in (self.drafts, self.prompts) if graphs is not None]

    def prepare(self, output: SchedulerOutput) -> None:
        self._model.attention.copy_blocks(output.copies)
        self._keys.prepare(output)
        for request in output.joined:
            self._least[request.slot] = 0

    def draft(self, step: ComputedStep) -> None:
        if self.drawn is not None:
            self.drawn.clear()
        behind: list[tuple[int, int, int]] = []
        runs: list[tuple[int, int, int]] = []
        for item in step.scheduled:
            if not item.guesses:
                continue
            slot, most = item.slot, item.start + item.count
            if item.sampled <= 1:  # else it was guessed for behind the step before, and lacks the last two at most
                behind.append((slot, self._keys.reach(slot), most - item.sampled))
            certain = most - max(item.sampled - 1, 0)
            self._least[slot] = self._least[slot] + 1 if item.uncertain else certain
            self._keys.computed(slot, self._least[slot] + bool(item.sampled))
            if item.sampled:
                runs.append((item.guesses, slot, most))
        self._catch_up(behind)
        if self.drafts is not None:
            for first in range(0, len(runs), MOST_ROWS):
                part = runs[first : first + MOST_ROWS]
                self.drafts.draft([slot for _, slot, _ in part], [guesses for guesses, *_ in part])
            return
        if not runs:
            return
        runs.sort(reverse=True)
        slots = upload([slot for _, slot, _ in runs], torch.int64, self._rows.device)
        newest = self._rows.num_computed_tokens[slots]
        bounds = [most for *_, most in runs] if self._model.attention.reads_device_starts else newest.tolist()
        for ahead in range(runs[0][0]):
            going = sum(guesses > ahead for guesses, *_ in runs)
            first, count = (-1, 2) if ahead == 0 else (ahead, 1)
            scheduled = [
                ScheduledTokens(slot, bound + first, count, 1)
                for (_, slot, _), bound in zip(runs[:going], bounds, strict=False)
            ]
            self._decode(scheduled, newest[:going] + first)

    def _catch_up(self, behind: Sequence[tuple[int, int, int]]) -> None:
        """Compute what rows are behind with, of which nothing is wanted but the keys; as `parts_of`."""
        for part in parts_of(behind, self._max_tokens):
            if not self._replay(part):
                self._run(build_device_batch(self._rows, part, self._model.block_size))

    def _replay(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Returns whether a graph reads these tokens of prompts."""
        if self.prompts is None or not isinstance(self.prompts.kind, PromptKind):
            return False
        return self.prompts.run(PlannedStep(scheduled, self.prompts.kind.size(scheduled))) is not None

    def _decode(self, scheduled: Sequence[ScheduledTokens], starts: torch.Tensor) -> None:
        """Write what follows the last token of each entry, which begins at `starts` [R] int32 on the device."""
        batch = build_device_batch(self._rows, scheduled, self._model.block_size, starts)
        hidden = self._run(batch)
        slots, positions = batch.device_sample_slots, batch.sample_positions
        if self.drawn is not None:
            logits = self._model.decoder.logits(hidden)
            chosen = self.drawn.draw(logits, self._rows, batch.sample_slots, positions)
        else:
            _, chosen = sample_plain(self._model.decoder, hidden, slots, positions, self._rows)
        write_sampled(self._rows.tokens, slots, positions, chosen)

    def _run(self, batch: DeviceBatch) -> torch.Tensor:
        """The states [S, hidden] of the tokens that are sampled behind."""
        attend, wanted = self._model.attention.plan(batch), batch.logits_indices
        hidden: torch.Tensor = self._model.decoder(batch.token_ids, batch.positions, attend, wanted, NO_ADAPTERS, None)
        return hidden if len(hidden) == len(wanted) else hidden.index_select(0, wanted)
