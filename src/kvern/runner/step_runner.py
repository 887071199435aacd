"""The base of the runners of steps: the rows that a step changes, and a step that is computed layer by layer.

changes of the scheduler --> rows, cache, states, adapters
tokens --> a graph, or captured decodes, if there is one that fits; else kernel by kernel --> hidden states
hidden states --> sampled tokens --> rows, the result, and a drafter
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from kvern.cache.messages import WindowMessage
from kvern.device.input_batch import InputBatch
from kvern.device.rows import BatchRows
from kvern.device.transfer import upload
from kvern.drafting.device.drafter import Drafter, GuardedDrafter
from kvern.layers.embedding import EmbeddedTokens
from kvern.layers.step_context import NO_ADAPTERS
from kvern.models.decoder import Decoder, LanguageModel
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.cached_model import CachedModel, RowStates, StepEmbeddings
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.needs import RowNeeds, SamplingNeeds
from kvern.runner.result import PromptLogprobs, prompt_logprobs, prompt_runs, tokens_wanted

if TYPE_CHECKING:
    from kvern.sample.logprobs import DeviceLogprobs

Network = TypeVar("Network", bound=LanguageModel)
Batch = TypeVar("Batch", bound=InputBatch)
Rows = TypeVar("Rows", bound=BatchRows)
States = TypeVar("States", bound=RowStates)

CHOSEN_BY_FIRST = SamplingNeeds.GRAMMAR | SamplingNeeds.PROCESSORS
"""The demands for which the first rank chooses for all: grammars, as what they allow depends on the time it takes, and
logits processors, whose code may do anything."""


class Computed(NamedTuple):
    """A step of T tokens that was computed, before anything is sampled.

    hidden   [N, hidden]  the last hidden states of all T tokens, or of those that are sampled from
    prompts               log-probabilities of prompt tokens; None: nobody asked
    told     [T, ...]     hidden states for a drafter that reads them; None: not those of all tokens
    """

    hidden: Tensor
    prompts: PromptLogprobs | None
    told: Tensor | None


class StepRunner(Generic[Network, Batch, Rows, States]):
    """Holds a model, the rows of its batch and what is asked for in them."""

    def __init__(
        self, model: CachedModel[Network, Batch, Rows, States], loaded: LoadedModel, drafter: Drafter | None
    ) -> None:
        self.model = model
        self._decoder = model.decoder
        self._rows = model.rows
        self.caches, self.pools = model.attention.caches, model.attention.pools
        self.embeddings = model.embeddings
        self.states = model.states
        self._ranks = loaded.ranks
        self._processors = loaded.processors
        self._make_grammars = loaded.grammars
        # No stage is told of a grammar before the step that begins with it: all that is needed is imported now.
        self._grammars = loaded.grammars() if loaded.ranks.stage.count > 1 else None
        self._adapters = loaded.adapter_store
        self._needs = RowNeeds(len(model.rows.requests))
        self._drafter = GuardedDrafter(drafter, ranks=loaded.ranks)
        self.draft_caches = self._drafter.caches

    @property
    def graph_tokens(self) -> int:
        """See `Runner`."""
        return 0

    def _change_rows(self, output: SchedulerOutput) -> None:
        """Let rows, cache, states and adapters be as the step wants them."""
        model, rows = self.model, self._rows
        if model.adapters is not None:
            assert self._adapters is not None
            for adapter_index, key in output.adapters:
                model.adapters.load(adapter_index, self._adapters[key])
        model.attention.copy_blocks(output.copies)
        if model.states is not None:
            model.states.prepare(output)
        rows.fork(output.forked)
        rows.join(output.joined)
        if model.embeddings is not None:
            model.embeddings.fork(output.forked)
            model.embeddings.join(output.joined)
        self._change_choices(output)
        if self._ranks.stage.is_first:
            rows.draft(output.known)
        rows.grow(output.grown)
        windows = output.message(WindowMessage)
        rows.grow_windows([] if windows is None else windows.grown)
        rows.draft(output.drafts)
        self._drafter.prepare(output)

    def _change_choices(self, output: SchedulerOutput) -> None:
        """Tell what chooses tokens here of the rows that a step let fork and join."""
        if not self._ranks.stage.is_last or not (output.forked or output.joined):
            return
        self._needs.fork(output.forked)
        self._needs.join(output.joined)
        joined = output.joined if self._ranks.rank == 0 else []
        if self._grammars is None and any(request.spec.grammar is not None for request in joined):
            self._grammars = self._make_grammars()
        if self._grammars is not None:
            self._grammars.fork(output.forked)
            self._grammars.join(joined)
        if self._processors is not None:
            self._processors.fork(output.forked, self._rows)
            self._processors.join(output.joined)

    def _chosen_by_first(self, chosen: Tensor, unknown: list[int]) -> tuple[Tensor, list[int]]:
        """The first rank's tokens `chosen` [S] int64, and its `unknown` rows; several ranks wait for the device."""
        if self._ranks.size == 1:
            return chosen, unknown
        marked = chosen.clone()
        if unknown:
            rows = upload(unknown, torch.int64, chosen.device)
            marked[rows] = ~marked[rows]
        marked = self._ranks.first(marked)
        below = marked < 0
        return torch.where(below, ~marked, marked), below.nonzero()[:, 0].tolist()

    def _compute_layers(
        self,
        batch: Batch,
        states: Any,
        logprobs: "Callable[[Tensor, Tensor, int], DeviceLogprobs]",
        embeddings: StepEmbeddings | None,
    ) -> Computed | None:
        """Run the model over a batch; None: this is a pipeline stage before the last, which has handed on its rows.

        states    what was planned for the step by the memory of states, if there is one
        logprobs  what computes log-probabilities, as `token_logprobs`
        """
        model = self.model
        drafter = self._drafter
        is_last = self._ranks.stage.is_last
        runs = prompt_runs(self._rows, batch) if is_last else []
        wanted = None if drafter.reads_hidden or not self._ranks.drops_rows else tokens_wanted(batch, runs)
        adapters = NO_ADAPTERS
        if model.adapters is not None:
            sampled = None if wanted is None else self._rows.adapter_indices(batch.sample_slots)
            adapters = model.adapters.select(self._rows.adapter_indices(batch.slots), batch.counts, sampled)
        attend, inputs = model.attention.plan(batch), drafter.inputs
        tokens: Any = batch.token_ids
        positions = batch.positions
        if embeddings is not None and embeddings.rows is not None:
            source = upload(embeddings.source, torch.int64, tokens.device)
            tokens = EmbeddedTokens(tokens, source, embeddings.rows)
        if embeddings is not None and embeddings.positions is not None:
            positions = upload(embeddings.positions.flatten().tolist(), torch.int64, positions.device).view(-1, 3)
        hidden = self._decoder(tokens, positions, attend, wanted, adapters, states, inputs)
        if not is_last:
            if model.states is not None:
                model.states.defer()
            return None
        prompts = prompt_logprobs(self._decoder, batch, runs, hidden, logprobs)
        told = hidden if inputs is None else inputs.rows()
        return Computed(hidden, prompts, told if wanted is None else None)

    def _embeddings(self, scheduled: Sequence[ScheduledTokens]) -> StepEmbeddings | None:
        """Rows of embeddings for tokens of a step."""
        return None if self.model.embeddings is None else self.model.embeddings.rows(scheduled)

    def _needed(self, slots: Sequence[int]) -> int:
        """The demands of these rows on sampling, all together."""
        asked = 0
        for slot in slots:
            asked |= self._needs[slot]
        return asked

    @torch.inference_mode()
    def assist(self) -> None:
        cast("Decoder", self._decoder).assist()

    def size(self, output: SchedulerOutput) -> tuple[int, int, bool] | None:
        """There are no steps that all ranks capture."""
        return None

    def idle(self) -> bool:
        """There is nothing to capture."""
        return False

    def forget_blocks(self, blocks: range) -> None:
        table = self._rows.block_table
        table.masked_fill_((table >= blocks.start) & (table < blocks.stop), 0)

    def abandon(self) -> None:
        if self.model.embeddings is not None:
            self.model.embeddings.abandon()
        if self._grammars is not None:
            self._grammars.abandon()
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)
