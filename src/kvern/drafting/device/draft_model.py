"""Drafts by another model with the same vocabulary, which is smaller: it goes on behind each row, a token at a time.

    known tokens without keys, newest token --draft model--> draft --draft model--> draft ...

Its tokens are sampled with the random numbers of the model's, by seed and position: where both models think alike, they
draw alike. It has a cache of its own over the same blocks (`draft_keys.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvern.device.input_batch import InputBatch, build_input_batch
from kvern.device.rows import BatchRows
from kvern.drafting.device.draft_keys import DraftKeys
from kvern.drafting.device.drafter import ComputedStep
from kvern.layers.step_context import NO_ADAPTERS
from kvern.models.decoder import Decoder
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.cached_model import CachedModel
from kvern.runner.captured_decodes import CapturedDecodes
from kvern.runner.needs import SamplingNeeds
from kvern.runner.sampling import Sampling

if TYPE_CHECKING:
    from kvern.drafting.rejection import Drawn

HostDraftModel = CachedModel[Decoder, InputBatch, BatchRows, Any]


class DraftModel:
    """A `Drafter` whose steps run through PyTorch, or as captured decodes on a CPU.

    `max_tokens`: of a step that catches up with a prompt. `drawn`: where it keeps what it draws from; decodes are not
    captured then.
    """

    reads_hidden, inputs = False, None
    graphs = ()

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        return self._model.attention.caches

    def __init__(
        self,
        model: HostDraftModel,
        max_tokens: int,
        sampling: Sampling,
        captured: CapturedDecodes | None = None,
        drawn: "Drawn | None" = None,
    ) -> None:
        self._model = model
        self._rows = model.rows
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._captured = captured if drawn is None else None
        self.drawn = drawn
        self._keys = DraftKeys(len(model.rows.requests), model.attention.caches[0].shape[1], model.block_size)

    def prepare(self, output: SchedulerOutput) -> None:
        self._model.attention.copy_blocks(output.copies)
        self._keys.prepare(output)

    def draft(self, step: ComputedStep) -> None:
        if self.drawn is not None:
            self.drawn.clear()
        computed = self._rows.num_computed_tokens.tolist()
        kept = [0] * len(step.scheduled) if step.kept is None else step.kept.tolist()
        runs = []
        for item, tokens in zip(step.scheduled, kept, strict=True):
            if not item.guesses:
                continue
            slot, newest = item.slot, computed[item.slot]
            first = min(newest, self._keys.accepted(slot, max(tokens - 1, 0)))
            if not item.sampled or newest - first > 1:
                self._catch_up(slot, first, newest)
                first = newest
            if item.sampled:
                runs.append((item.guesses, slot, first, newest))
            self._keys.computed(slot, newest + bool(item.sampled), item.guesses - 1)
        if not runs:
            return
        ahead = 0
        if any(first < newest for *_, first, newest in runs):
            self._decode([ScheduledTokens(slot, first, newest + 1 - first, 1) for _, slot, first, newest in runs])
            ahead = 1
        for most in sorted({guesses for guesses, *_ in runs}):
            if most > ahead:
                going = [(slot, newest + ahead) for guesses, slot, _, newest in runs if guesses >= most]
                self._go_on(going, most - ahead)
                ahead = most

    def _go_on(self, rows: Sequence[tuple[int, int]], count: int) -> None:
        """Let rows, whose newest tokens have these positions, go on by so many tokens."""
        if self._captured is not None and self._captured.repeat(rows, count):
            return
        for ahead in range(count):
            self._decode([ScheduledTokens(slot, position + ahead, 1, 1) for slot, position in rows])

    def _catch_up(self, slot: int, first: int, end: int) -> None:
        """Compute a row's tokens from `first` to before `end`, of which nothing is wanted but their keys."""
        for start in range(first, end, self._max_tokens):
            self._compute([ScheduledTokens(slot, start, min(self._max_tokens, end - start), 1)])

    def _decode(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """Write what follows the last token of each entry, of one or two; the other one is known."""
        if self._captured is None or not self._run_captured(self._captured, scheduled):
            batch, hidden = self._compute(scheduled)
            logits = self._model.decoder.logits(hidden).contiguous()
            slots, index = batch.sample_slots, torch.tensor(batch.sample_slots, device=hidden.device)
            if self.drawn is not None:
                chosen = self.drawn.draw(logits, self._rows, slots, batch.sample_positions)
            else:
                chosen = self._sampling.sample(logits, slots, index, batch.sample_positions, SamplingNeeds.NOTHING)
            self._sampling.write(index, batch.sample_positions, chosen)

    def _run_captured(self, captured: CapturedDecodes, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Returns whether it was: what it writes behind tokens that are not the last of an entry is known."""
        tokens = self._rows.tokens.numpy()
        known = [(item.slot, item.start + 1, tokens[item.slot, item.start + 1]) for item in scheduled if item.count > 1]
        each = [ScheduledTokens(item.slot, item.start, item.count, item.count) for item in scheduled]
        ran = captured.decode(each) is not None
        if not ran and captured.score(each) is not None:
            captured.choose(sum(item.count for item in scheduled))
            ran = True
        for slot, position, token in known:
            tokens[slot, position] = token
        return ran

    def _compute(self, scheduled: Sequence[ScheduledTokens]) -> tuple[InputBatch, torch.Tensor]:
        """A step through PyTorch, and the states [S, hidden] of the tokens that are sampled behind."""
        batch = build_input_batch(self._rows, scheduled, self._model.block_size)
        attend, wanted = self._model.attention.plan(batch), batch.logits_indices
        hidden: torch.Tensor = self._model.decoder(batch.token_ids, batch.positions, attend, wanted, NO_ADAPTERS, None)
        return batch, hidden if len(hidden) == len(wanted) else hidden[wanted]
