"""Steps of decodes on a CPU, captured once for each number of tokens: then one call does all that the model does."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.attention.compiled import CompiledAttention
from kvern.cpu.attention import Step
from kvern.cpu.capture import Memory, Program, capture
from kvern.cpu.library import is_recorded, mark
from kvern.cpu.sampling import RowSampler, read_decodes
from kvern.device import marks
from kvern.device.rows import BatchRows
from kvern.layers.embedding import LookupTable
from kvern.layers.rope import positions_alone
from kvern.layers.step_context import StepContext
from kvern.models.decoder import Decoder, LayerInputs
from kvern.request.step import ScheduledTokens

ALIKE_FROM, ALIKE = 8, 4
"""Steps of more tokens that verify drafts, of which there are all sizes, are captured in multiples of so many."""
SELDOM = 32
"""Steps of a size until it is captured for itself: what is computed beside it then costs more than to capture once."""
MOST_TOKENS = 64
"""The most tokens of a captured step: a capture holds results of all layers at once, and larger ones gain little."""


@dataclass(frozen=True)
class Scored:
    """Scores of S tokens that are about to be sampled.

    slots      [S] their rows in the batch; `index` int64: the same
    positions  [S] int64 their positions
    hidden     [S, hidden] the states that they follow
    logits     [S, vocabulary] float32
    told       [T, ...] what a `ComputedStep` says of the states of all tokens; None: nobody reads them
    """

    slots: list[int]
    index: Tensor
    positions: Tensor
    hidden: Tensor
    logits: Tensor
    told: Tensor | None


class CapturedDecodes:
    """Captured decodes of a model whose layers, cache and sampling are kernels; PyTorch computes nothing between them.

    The next step overwrites what is `Scored`. `inputs`: those of a `Drafter`. `steps` names them in a warning.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: CompiledAttention,
        rows: BatchRows,
        block_size: int,
        inputs: LayerInputs | None = None,
        steps: str = "decodes",
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._block_size = block_size
        self._layer_inputs, self._steps = inputs, steps
        self._sampler = RowSampler(rows)
        self._memory = Memory()
        self._sizes: dict[int, _Decodes] = {}
        self._visits: Counter[int] = Counter()
        """The number of steps of each size that is not captured for itself."""
        self._captures, self._embeds = True, decoder.embed_tokens.method.looks_up
        self._table = None if decoder.per_layer is None else decoder.per_layer.table
        self._looks_up = not self._embeds or self._table is not None
        """True if PyTorch looks something up between the first two stages."""
        self._is_whole = not self._looks_up and decoder.spec.scales.logit == 1.0 and decoder.spec.scales.softcap is None

    def decode(self, scheduled: Sequence[ScheduledTokens]) -> list[int] | None:
        """Compute a step in which each token is sampled behind, sample what follows, and let the rows go on.

        Returns what was sampled behind each token. None: it is another step, is not captured, or PyTorch has a part in
        it. Drafts are decodes of the same row that begin one behind the other: each attends to what those before it
        have written.
        """
        decodes = self._decodes(scheduled, may_pad=True) if self._is_whole else None
        if decodes is None:
            return None
        sampled: list[int] = decodes.run(_READ, _CHOOSE)[0].tolist()
        return sampled[: sum(item.count for item in scheduled)]

    def repeat(self, rows: Sequence[tuple[int, int]], times: int) -> bool:
        """Let rows (slot, position) go on by so many tokens, each sampled behind the one before, in one call.

        Returns whether it did: as `decode`.
        """
        scheduled = [ScheduledTokens(slot, position, 1, 1) for slot, position in rows]
        decodes = self._decodes(scheduled) if self._is_whole else None
        if decodes is None or decodes.program is None:
            return False
        decodes.program.repeat(times, decodes.requests[1])
        return True

    def score(self, scheduled: Sequence[ScheduledTokens]) -> Scored | None:
        """Compute a step as `decode` does, up to the scores; PyTorch may have a part in it."""
        decodes = self._decodes(scheduled)
        if decodes is None:
            return None
        if self._looks_up:
            inputs = _Inputs(*decodes.run(_READ, _READ)[: len(_Inputs._fields)])
            if not self._embeds:
                inputs.hidden.copy_(self._decoder.embed_tokens(inputs.token_ids))
            if self._table is not None and decodes.looked_up is not None:
                decodes.looked_up.copy_(self._table(inputs.token_ids))
        hidden, logits, following, *told = decodes.run(_SCORE if self._looks_up else _READ, _SCORE)
        slots: list[int] = decodes.slots.tolist()
        return Scored(slots, decodes.index, following, hidden, self._decoder.scaled(logits), *(told or [hidden]))

    def choose(self, count: int) -> list[int]:
        """Sample for the step that was scored, of so many tokens, and let the rows go on: what follows each."""
        (chosen,) = self._sizes[count].run(_CHOOSE, _CHOOSE)
        token_ids: list[int] = chosen.tolist()
        return token_ids

    def _decodes(self, scheduled: Sequence[ScheduledTokens], may_pad: bool = False) -> "_Decodes | None":
        """Ready to run for a step; None: it is another, or is not captured.

        If it `may_pad`, its last token may come several times, which computes and writes the same again.
        """
        if not self._captures or is_recorded():
            return None
        slots, starts = [item.slot for item in scheduled], [item.start for item in scheduled]
        if any(item.count != 1 or item.sampled != 1 for item in scheduled):
            if any(item.count != item.sampled for item in scheduled):
                return None
            slots = [item.slot for item in scheduled for _ in range(item.count)]
            starts = [item.start + place for item in scheduled for place in range(item.count)]
            missing = self._padded(len(slots)) - len(slots) if may_pad else 0
            slots += slots[-1:] * missing
            starts += starts[-1:] * missing
        if not 0 < len(slots) <= MOST_TOKENS:
            return None
        decodes = self._sizes.get(len(slots))
        if decodes is None:
            decodes = _Decodes(len(slots), self._table)
        decodes.slots[:], decodes.starts[:] = slots, starts
        if decodes.program is None:
            marks.is_unusual()
            following = torch.tensor(slots), torch.tensor(starts) + 1
            drafts = self._rows.tokens[following]  # what is captured is computed, too, and written in their place
            try:
                decodes.program = capture(self._steps, lambda: self._capture(decodes.requests, decodes.looked_up))
            finally:
                self._rows.tokens[following] = drafts
            if decodes.program is None:
                self._captures = False
                self._sizes.clear()
                return None
            self._sizes[len(slots)] = decodes
        return decodes

    def _padded(self, count: int) -> int:
        """The size of the program that computes a step of so many tokens."""
        if count <= ALIKE_FROM or count in self._sizes or self._visits[count] >= SELDOM:
            return count
        self._visits[count] += 1
        return min(MOST_TOKENS, -(-count // ALIKE) * ALIKE) if count < MOST_TOKENS else count

    def _capture(self, requests: Tensor, looked_up: Tensor | None) -> Program:
        """The stages of a step, which they compute at once, but for what no kernel looks up."""
        decoder = self._decoder
        rows = self._rows
        sampler = self._sampler
        told = self._layer_inputs
        tables = rows.block_table, *rows.window_tables
        steps, shape = [Step(table, requests) for table in tables], (requests.shape[1], decoder.spec.hidden_size)

        def read() -> tuple[Tensor, ...]:
            inputs, *windows = (
                read_decodes(requests, rows.tokens, table, rows.turns, self._block_size) for table in tables
            )
            ids = inputs.token_ids
            hidden = decoder.embed_tokens(ids) if self._embeds else torch.empty(shape, dtype=decoder.build.dtype)
            return *_Inputs(hidden, *inputs), *(window.slot_mapping for window in windows)

        def score(*inputs: Tensor) -> tuple[Tensor, ...]:
            hidden, _, positions, slot_mapping, following, *windows = inputs
            attend = self._attention.attend(*zip(steps, [slot_mapping, *windows], strict=True))
            states = decoder.run(hidden, StepContext(positions_alone(positions), attend), looked_up, told)
            scores = decoder.lm_head.scores(states)
            return states, scores, following, *(() if told is None else (told.rows(),))

        def choose(hidden: Tensor, logits: Tensor, following: Tensor, *told: Tensor) -> tuple[Tensor, ...]:
            marks.begin(marks.SAMPLING)
            chosen = sampler.sample(logits, requests[0], following)
            sampler.write(requests[0], following, chosen)
            marks.begin(marks.OTHER)
            return (chosen,)

        with marks.listened(marks.Marks(mark)):
            return Program(self._memory, (steps, requests, looked_up), read, score, choose)


_READ, _SCORE, _CHOOSE = range(3)
"""The stages of a program."""


class _Inputs(NamedTuple):
    """The inputs of a model: embeddings [R, hidden], and `DecodeInputs`."""

    hidden: Tensor
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    following: Tensor


class _Decodes:
    """The captured steps of `count` requests; `slots`, `starts` and `looked_up` (rows of the table) are the next step's
    inputs."""

    def __init__(self, count: int, table: LookupTable | None) -> None:
        self.looked_up = None if table is None else torch.zeros(count, table.inputs, dtype=table.dtype)
        self.requests = torch.ones(3, count, dtype=torch.int64)
        self.index = self.requests[0]
        self.slots, self.starts, _ = self.requests.numpy()
        self.program: Program | None = None

    def run(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Run the stages from `first` to `last`; returns the results of the last one."""
        assert self.program is not None
        heard = marks.listener()
        if not isinstance(heard, marks.TimedMarks):
            return self.program.run(first, last)
        results, codes, times = self.program.run_timed(first, last)
        heard.add(codes, times)
        return results
