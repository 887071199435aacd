"""The one decoder: modules chosen from a `ModelSpec`, run over a flat line of tokens from many requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor, nn

from kvern.errors import UnsupportedModel
from kvern.layers.altup import Streams
from kvern.layers.attention import NO_ADAPTERS, Attend, StepAdapters, WantedAttend, rows_of
from kvern.layers.block import Memory, Places, SequentialLayer, block_class, sums_late
from kvern.layers.build import Build
from kvern.layers.embedding import SharedHead, make_embedding, make_head
from kvern.layers.halves import UpdateInHalves, is_halved, joined
from kvern.layers.linear import Linear
from kvern.layers.moe import MoE
from kvern.layers.norm import make_norm
from kvern.layers.per_layer import PerLayerInputs
from kvern.layers.rope import RopeTable, Rotation
from kvern.layers.stages import HandedRows, ReceivedRows
from kvern.layers.states import StepStates
from kvern.models.weighted import WeightedModel
from kvern.spec.mixers import AttentionSpec, RecurrentSpec
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.layers.attention import PagedAttend
    from kvern.layers.fused import FusedLayer


class LayerInputs:
    """What goes into some layers of a model, whose places are `entries`: for draft heads that begin with it.

    As many as there are layers: what comes out of the last one. A forward pass fills it, that of a stage as far as it
    and those before it have such layers.
    """

    def __init__(self, entries: Sequence[int], build: Build) -> None:
        self.entries, self._on_rows = entries, build.on_rows
        self._inputs: dict[int, Tensor] = {}

    def note(self, place: int, hidden: Tensor, update: Tensor | None) -> None:
        """A layer is given the sum of both, which the pass may overwrite afterwards."""
        copied = self._on_rows.beside((hidden,))
        self._inputs[place] = copied if update is None else self._on_rows.add(copied, update)

    def take(self, earlier: Mapping[int, Tensor]) -> None:
        """What layers of stages before were given, by their places."""
        self._inputs |= earlier

    def behind(self, hidden: Tensor) -> Tensor:
        """The rows `hidden` [T, hidden] of the last pass, and what is there of theirs behind them, in order."""
        return self._on_rows.beside((hidden, *(self._inputs[place] for place in sorted(self._inputs))))

    def rows(self) -> Tensor:
        """Those of the last pass side by side, `[T, len(entries) * hidden]`."""
        return self._on_rows.beside([self._inputs[entry] for entry in self.entries])


class LanguageModel(Protocol):
    """What steps need of a model, whoever computes it."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
        states: StepStates | None = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """`Decoder.forward`."""

    def logits(self, hidden: Tensor, *, upcast: bool = True) -> Tensor:
        """`Decoder.logits`."""

    @property
    def sinks(self) -> Mapping[int, Tensor]:
        """`WeightedModel.sinks`."""


class Decoder(WeightedModel):
    """A language model. Raises UnsupportedModel for the specification of an encoder."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        if spec.encoder is not None:
            raise UnsupportedModel(f"{spec.model_type} is an encoder: this works with models that generate text alone")
        super().__init__(spec, build)
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers if layer.rope is not None))
        self.rope_tables = nn.ModuleList(RopeTable(rope, build) for rope in ropes)
        self._rope_index = tuple(0 if layer.rope is None else ropes.index(layer.rope) for layer in spec.layers)
        stage = build.ranks.stage
        if stage.has_embeddings(tied=spec.tie_word_embeddings):
            self.embed_tokens = make_embedding(spec.vocab_size, spec.hidden_size, spec.embedding_scale, build)
        self.entry = self.embed_tokens if stage.is_first else ReceivedRows(spec.hidden_size, build)
        self._handed = LayerInputs(stage.entries, build) if stage.entries and not stage.is_last else None
        self.per_layer = None if spec.per_layer is None else PerLayerInputs(spec, spec.per_layer, build)
        self.streams = None if spec.altup is None else Streams(spec.hidden_size, spec.altup, build.whole)
        kinds = [{isinstance(mixer, RecurrentSpec) for mixer in layer.mixers} for layer in spec.layers]
        self._memory_index = tuple(sum(kind) + (len(kind) == 2) for kind in kinds)
        self._last_storing = spec.last_storing_layer
        inner = replace(build, late_sums=sums_late(spec, build))
        self.layers = nn.ModuleList(self._make_layers(inner))
        self.norm = make_norm(spec.norm, spec.hidden_size, "norm", inner) if stage.is_last else HandedRows(inner)
        self._late_sums = inner.late_sums
        if stage.is_last:
            self.lm_head = self._make_head()

    def _make_layers(self, build: Build) -> Iterator[SequentialLayer]:
        caching, states = self.spec.caching_layers, 0
        first = build.ranks.stage.first_layer
        for index, layer in enumerate(self.spec.layers):
            borrowed = [mixer.cache_of for mixer in layer.mixers if isinstance(mixer, AttentionSpec)]
            owner = index if borrowed in ([], [None]) else borrowed[0]
            places = Places(caching.index(owner) if owner in caching else 0, states)
            make = block_class(self.spec, layer, build)
            yield make(places, self.spec, layer, build.at(f"layers.{first + index}"))
            states += sum(isinstance(mixer, RecurrentSpec) for mixer in layer.mixers)

    def _make_head(self) -> Linear:
        """The output projection; a tied one multiplies by the weight of the embeddings."""
        spec, build = self.spec, replace(self.build, path="")
        method = self.embed_tokens.method if spec.tie_word_embeddings else None
        return make_head(spec.hidden_size, spec.vocab_size, build, bias=spec.lm_head_bias, method=method)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
        states: StepStates | None = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """Run the tokens of one step: `token_ids` and `positions`, both int64 `[T]` -> hidden states `[T, hidden]`.

        The tokens may belong to any number of requests: all that ties a token to its request is what `attend` does.
        With `wanted` [S], indices of tokens, only their states [S, hidden] are returned: for the others the last layer
        that stores something computes no more than that, and layers behind it nothing. `adapters`: those of the tokens,
        and of the wanted ones. `states`: of their requests, where its layers have any. `inputs` takes what layers are
        given, without `wanted`.
        Of several stages, the first reads `token_ids`, others receive rows, and those before the last hand theirs on,
        with the inputs of layers that a draft head behind the last begins with.
        """
        looked_up, stage = self.looked_up(token_ids), self.build.ranks.stage
        hidden = self.run(self.entry(token_ids), positions, attend, wanted, adapters, states, looked_up, inputs)
        if not stage.is_last:
            stage.send(hidden)
        return hidden

    def looked_up(self, token_ids: Tensor) -> Tensor | None:
        """Rows of the table of `PerLayerInputs` for `token_ids` [T], where the model has such."""
        return None if self.per_layer is None else self.per_layer.table(token_ids)

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
        states: StepStates | None = None,
        looked_up: Tensor | None = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """As `forward`, from the tokens' embeddings `hidden` [T, hidden], which may be gone afterwards.

        Or from what the stage before handed on, which `entry` took; what the next one goes on with is returned alone.
        `looked_up`: of the tokens.
        """
        rotations, stage = self._rotations(positions), self.build.ranks.stage
        inputs = inputs if stage.is_last else self._handed
        if inputs is not None and isinstance(self.entry, ReceivedRows):
            inputs.take(dict(zip(stage.earlier_entries, self.entry.earlier, strict=True)))
        update: Tensor | UpdateInHalves | None = None
        inner = adapters if adapters is NO_ADAPTERS else StepAdapters(adapters.rows, adapters.rows)
        memories: tuple[Memory, ...] = attend, states, (attend, states)  # by `_memory_index`
        own: list[tuple[Tensor, ...]] = [()] * len(self.layers)
        if self.per_layer is not None and looked_up is not None:
            own = [(part,) for part in self.per_layer(looked_up, hidden)]
        if self.streams is not None:
            hidden = self.streams.enter(hidden)
        for index, layer in enumerate(self.layers):
            if inputs is not None and stage.first_layer + index in inputs.entries:
                hidden, update = joined(hidden, update)
                inputs.note(stage.first_layer + index, hidden, self._summed(update))
            rotation, memory = rotations[self._rope_index[index]], memories[self._memory_index[index]]
            kept, used = (wanted, adapters) if index == self._last_storing else (None, inner)
            if kept is None and used is NO_ADAPTERS and is_halved(cast("SequentialLayer", layer), hidden):
                hidden, update = cast("FusedLayer", layer).in_halves(hidden, update, rotation, memory)
                continue
            hidden, update = joined(hidden, update)
            hidden, update = layer(hidden, update, rotation, memory, kept, used, *own[index])
            if kept is not None and index + 1 < len(self.layers):
                memories = (WantedAttend(cast("PagedAttend", attend), kept, len(positions)),)
                rotations = self._rotations(positions.index_select(0, kept))
                inner = adapters if adapters is NO_ADAPTERS else StepAdapters(adapters.wanted, adapters.wanted)
                own = [tuple(rows_of(part, wanted) for part in parts) for parts in own]
        hidden, update = joined(hidden, update)
        if self.streams is not None:
            hidden = self.streams.leave(hidden)
        last = stage.first_layer + len(self.layers)
        if inputs is not None and stage.is_last and last in inputs.entries:
            inputs.note(last, hidden, self._summed(update))
        _, normal = self.norm.after(hidden, update)
        return normal if inputs is None or stage.is_last else inputs.behind(normal)

    def _summed(self, update: Tensor | None) -> Tensor | None:
        """What all ranks together add to the residual; `update` stays as it is."""
        return self.build.ranks.sum(update.clone()) if self._late_sums and update is not None else update

    def _rotations(self, positions: Tensor) -> list[Rotation]:
        return [table(positions) for table in self.rope_tables] or [Rotation(positions, positions)]

    def assist(self) -> None:
        """Compute what other ranks' rows choose of this one's experts, in a step in which it has none itself."""
        for mixture in self._mixtures:
            mixture.assist()

    @cached_property
    def _mixtures(self) -> list[MoE]:
        return [part for part in self.layers.modules() if isinstance(part, MoE)]

    def logits(self, hidden: Tensor, *, upcast: bool = True) -> Tensor:
        """Score the vocabulary: `hidden [N, hidden]` -> float32 `[N, vocab]`.

        Without `upcast` they keep the model's dtype where nothing is computed with them.
        """
        if not upcast and self.spec.logit_scale == 1.0 and self.spec.logit_softcap is None:
            plain: Tensor = self.lm_head(hidden)
            return plain
        return self.scaled(self.lm_head.scores(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """As `logits` without `upcast`; of several ranks those of a rank's share of the vocabulary, and padding."""
        head = self.lm_head
        if not isinstance(head, SharedHead):
            return self.logits(hidden, upcast=False)
        if self.spec.logit_scale == 1.0 and self.spec.logit_softcap is None:
            return head.own(hidden)
        return self.scaled(head.own_scores(hidden))

    def whole_logits(self, own: Tensor) -> Tensor:
        """What `logits` gives without `upcast`, of what all ranks have of `own_logits`."""
        return self.lm_head.whole(own) if isinstance(self.lm_head, SharedHead) else own

    def scaled(self, logits: Tensor) -> Tensor:
        """What a model makes of its head's scores, `[N, vocab]` float32, in place."""
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        if (cap := self.spec.logit_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits
