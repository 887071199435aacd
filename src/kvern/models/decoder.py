"""The one decoder: modules chosen from a `ModelSpec`, run over a flat line of tokens from many requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor, nn

from kvern.device import marks
from kvern.errors import UnsupportedModel
from kvern.layers.block import Places, Residual, SequentialLayer, block_class, sums_late
from kvern.layers.build import Build
from kvern.layers.build_options import BuildOptions
from kvern.layers.embedding import EmbeddedTokens, SharedHead, make_embedding, make_head
from kvern.layers.halves import Update, joined
from kvern.layers.linear import Linear
from kvern.layers.norm import Norm
from kvern.layers.rope import positions_alone
from kvern.layers.step_context import (
    NO_ADAPTERS,
    Attend,
    PagedAttend,
    StepAdapters,
    StepContext,
    WantedAttend,
    rows_of,
)
from kvern.models.weighted import WeightedModel
from kvern.plugins import imported
from kvern.spec.mixers import AttentionSpec, RecurrentSpec
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.layers.moe import MoE
    from kvern.layers.stages import ReceivedRows


class LayerInputs:
    """The inputs of the layers with the indices `entries`, filled by a forward pass.

    The index after the last layer stands for the last layer's result. The forward pass of a pipeline stage fills the
    entries of its own layers and of earlier stages.
    """

    def __init__(self, entries: Sequence[int], build: BuildOptions) -> None:
        self.entries, self._ops = entries, build.ops
        self._inputs: dict[int, Tensor] = {}

    def note(self, place: int, hidden: Tensor, update: Tensor | None) -> None:
        """Keep a copy of the sum of both, which the layer in this place is given."""
        copied = self._ops.beside((hidden,))
        self._inputs[place] = copied if update is None else self._ops.add(copied, update)

    def take(self, earlier: Mapping[int, Tensor]) -> None:
        """Keeps the inputs of layers of earlier stages, by index."""
        self._inputs |= earlier

    def after(self, hidden: Tensor) -> Tensor:
        """The rows `hidden [T, hidden]` of the last pass, and after them, side by side, the inputs kept of it."""
        return self._ops.beside((hidden, *(self._inputs[place] for place in sorted(self._inputs))))

    def rows(self) -> Tensor:
        """The inputs kept of the last pass, side by side, `[T, len(entries) * hidden]`."""
        return self._ops.beside([self._inputs[entry] for entry in self.entries])


RECEIVED, HANDED = "kvern.layers.stages:ReceivedRows", "kvern.layers.stages:HandedRows"
PER_LAYER, STREAMS = "kvern.layers.augmented:PerLayerInputs", "kvern.layers.augmented:Streams"
"""Modules that are imported for models and pipeline stages that have them."""


class LanguageModel(Protocol):
    """The interface of a model for steps, whatever computes it."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
        states: Any = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """`Decoder.forward`."""

    def logits(self, hidden: Tensor, *, upcast: bool = True) -> Tensor:
        """`Decoder.logits`."""

    @property
    def sinks(self) -> Mapping[int, Tensor]:
        """`WeightedModel.sinks`."""


class DeviceLanguageModel(LanguageModel, Protocol):
    """The interface of a model for steps whose batch lives on a device, and for their graphs.

    captures  graphs can be captured of its steps: it never waits for the device
    """

    captures: bool

    def __call__(
        self,
        token_ids: Tensor | EmbeddedTokens,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
        states: Any = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """`Decoder.forward`."""

    @property
    def spec(self) -> ModelSpec:
        """The description of the model."""

    @property
    def build(self) -> Build:
        """`Decoder.build`."""

    @property
    def entry(self) -> Any:
        """The module or function that makes of token ids what `run` begins with."""

    @property
    def lm_head(self) -> Any:
        """The module that scores the vocabulary."""

    def looked_up(self, token_ids: Tensor) -> Tensor | None:
        """`Decoder.looked_up`."""

    def run(self, hidden: Tensor, step: StepContext, looked_up: Tensor | None = None) -> Tensor:
        """`Decoder.run`."""

    def own_logits(self, hidden: Tensor) -> Tensor:
        """`Decoder.own_logits`."""

    def whole_logits(self, own: Tensor) -> Tensor:
        """`Decoder.whole_logits`."""


class Decoder(WeightedModel):
    """A language model. Raises UnsupportedModel for the specification of an encoder."""

    captures = True

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        if spec.encoder is not None:
            raise UnsupportedModel(f"{spec.model_type} is an encoder: this works with models that generate text alone")
        super().__init__(spec, build)
        self._rope_index = self.make_ropes()
        stage = build.ranks.stage
        if stage.has_embeddings(tied=spec.tie_word_embeddings):
            self.embed_tokens = make_embedding(spec.vocab_size, spec.hidden_size, spec.scales.embedding, build)
        self.entry = self.embed_tokens if stage.is_first else imported(RECEIVED)(spec.hidden_size, build)
        self._handed = LayerInputs(stage.entries, build) if stage.entries and not stage.is_last else None
        per_layer, altup = spec.additions.per_layer, spec.additions.altup
        self.per_layer = None if per_layer is None else imported(PER_LAYER)(spec, per_layer, build)
        self.streams = None if altup is None else imported(STREAMS)(spec.hidden_size, altup, build.whole)
        self._last_storing = spec.last_storing_layer
        inner = replace(build, late_sums=sums_late(spec, build))
        self.layers = nn.ModuleList(self._make_layers(inner))
        self.norm = Norm(spec.norm, spec.hidden_size, "norm", inner) if stage.is_last else imported(HANDED)(inner)
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
        return make_head(spec.hidden_size, spec.vocab_size, build, bias=spec.biases.head, method=method)

    def forward(
        self,
        token_ids: Tensor | EmbeddedTokens,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
        states: Any = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """Compute the tokens of one step: `token_ids` and `positions`, both int64 `[T]` -> hidden states `[T, hidden]`.

        Tokens may come as rows of embeddings, too: then `token_ids` are `EmbeddedTokens`.
        The tokens may belong to any number of requests; `attend` alone knows which token belongs to which. With
        `wanted [S]`, indices of tokens, only their states `[S, hidden]` are returned: for the other tokens the last
        layer that stores something computes what it stores, and later layers compute nothing. `adapters` are those of
        the tokens and of the wanted ones. `states` are the recurrent states of their requests, a `StepStates` or
        `DeviceStates`. `inputs` is filled with the inputs of its layers, where `wanted` is None.

        In a pipeline the first stage reads `token_ids` and the others receive rows; each stage but the last sends its
        rows on, with the inputs of the layers that a draft head after the last stage begins with.
        """
        step = StepContext(positions_alone(positions), attend, states, wanted, adapters)
        stage = self.build.ranks.stage
        ids = token_ids if isinstance(token_ids, Tensor) else token_ids.token_ids
        hidden = self.entry(ids)
        embedded = None if isinstance(token_ids, Tensor) or not stage.is_first else token_ids
        if embedded is not None:
            hidden = embedded.over(hidden)
        hidden = self.run(hidden, step, self.looked_up(ids), inputs, embedded)
        if not stage.is_last:
            stage.send(hidden)
        return hidden

    def looked_up(self, token_ids: Tensor) -> Tensor | None:
        """The rows of the table of `PerLayerInputs` for `token_ids [T]`; None in a model without such a table."""
        return None if self.per_layer is None else self.per_layer.table(token_ids)

    def run(
        self,
        hidden: Tensor,
        step: StepContext,
        looked_up: Tensor | None = None,
        inputs: LayerInputs | None = None,
        embedded: EmbeddedTokens | None = None,
    ) -> Tensor:
        """Compute a step as `forward` does, from the tokens' embeddings, or from the rows that `entry` received.

        hidden     [T, hidden], may be overwritten
        step       its `rotation` is that of `positions_alone`; it has no layer input
        looked_up  as `looked_up` returns it for the tokens
        embedded   the tokens, if rows are added to the states of some after the first layers
        returns    as `forward`; the rows for the next stage, if this is not the last
        """
        first = self.build.ranks.stage.first_layer
        steps = self._layer_steps(step, self._layer_inputs(looked_up, hidden))
        taps = self._begin_inputs(inputs)
        update: Update = None
        if self.streams is not None:
            hidden = self.streams.enter(hidden)
        for place, (layer, layer_step) in enumerate(zip(self.layers, steps, strict=True), first):
            if taps is not None and place in taps.entries:
                hidden, update = self._note(taps, place, hidden, update)
            marks.begin_layer(place)
            hidden, update = layer(hidden, update, layer_step)
            if embedded is not None:
                hidden = embedded.deepened(place, hidden, layer_step.wanted)
        if self.streams is not None:
            hidden = self.streams.leave(hidden)
        return self._finish(hidden, update, taps)

    def _finish(self, hidden: Tensor, update: Update, taps: LayerInputs | None) -> Tensor:
        """The normalized states, or the rows for the next stage with the layer inputs that it needs."""
        stage = self.build.ranks.stage
        marks.begin(marks.HEAD if stage.is_last else marks.OTHER)
        last = stage.first_layer + len(self.layers)
        if taps is not None and stage.is_last and last in taps.entries:
            hidden, update = self._note(taps, last, hidden, update)
        _, normal = self.norm.after(hidden, update)
        return normal if taps is None or stage.is_last else taps.after(normal)

    def _layer_inputs(self, looked_up: Tensor | None, hidden: Tensor) -> Sequence[Tensor]:
        """Each layer's own input `[T, width]`; empty in a model whose layers have none."""
        return () if self.per_layer is None or looked_up is None else self.per_layer(looked_up, hidden)

    def _layer_steps(self, step: StepContext, layer_inputs: Sequence[Tensor]) -> Iterator[StepContext]:
        """The context of each layer.

        Layers compute all tokens until the last one that stores anything. That one stores all tokens and returns the
        wanted ones, which are all that later layers compute.
        """
        positions = step.rotation.sine
        wanted = step.wanted
        adapters = step.adapters
        last = self._last_storing
        own = adapters if adapters is NO_ADAPTERS else StepAdapters(adapters.rows, adapters.rows)
        steps = self._by_rope(step._replace(wanted=None, adapters=own), positions)
        for index, rope in enumerate(self._rope_index):
            layer_step = steps[rope]
            if wanted is not None and index == last:
                layer_step = layer_step._replace(wanted=wanted, adapters=adapters)
            yield layer_step._replace(layer_input=layer_inputs[index]) if layer_inputs else layer_step
            if wanted is not None and index == last and index + 1 < len(self.layers):
                attend = WantedAttend(cast("PagedAttend", step.attend), wanted, len(positions))
                own = adapters if adapters is NO_ADAPTERS else StepAdapters(adapters.wanted, adapters.wanted)
                later = StepContext(step.rotation, cast("Attend", attend), adapters=own)
                steps = self._by_rope(later, positions.index_select(0, wanted))
                layer_inputs = [rows_of(rows, wanted) for rows in layer_inputs]

    def _by_rope(self, step: StepContext, positions: Tensor) -> list[StepContext]:
        """The context of layers with each of the model's rotary embeddings."""
        return [step._replace(rotation=rotation) for rotation in self.rotations(positions)]

    def _begin_inputs(self, inputs: LayerInputs | None) -> LayerInputs | None:
        """The inputs that this stage fills: requested ones, or those that it sends on."""
        stage = self.build.ranks.stage
        inputs = inputs if stage.is_last else self._handed
        if inputs is not None and not stage.is_first:
            received = cast("ReceivedRows", self.entry)
            inputs.take(dict(zip(stage.earlier_entries, received.earlier, strict=True)))
        return inputs

    def _note(self, inputs: LayerInputs, place: int, hidden: Tensor, update: Update) -> Residual:
        """Keep the input of the layer in a place, the sum of `hidden` and all ranks' `update`; neither is changed."""
        hidden, update = joined(hidden, update)
        whole = self.build.ranks.sum(update.clone()) if self._late_sums and update is not None else update
        inputs.note(place, hidden, whole)
        return hidden, update

    def assist(self) -> None:
        """Computes the experts of this rank for rows of other ranks, in a step without rows of its own."""
        for mixture in self._mixtures:
            mixture.assist()

    @cached_property
    def _mixtures(self) -> "list[MoE]":
        from kvern.layers.moe import MoE

        return [part for part in self.layers.modules() if isinstance(part, MoE)]

    def logits(self, hidden: Tensor, *, upcast: bool = True) -> Tensor:
        """Score the vocabulary: `hidden [N, hidden]` -> float32 `[N, vocab]`.

        Without `upcast` they keep the model's dtype where nothing is computed with them.
        """
        if not upcast and self.spec.scales.logit == 1.0 and self.spec.scales.softcap is None:
            plain: Tensor = self.lm_head(hidden)
            return plain
        return self.scaled(self.lm_head.scores(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Logits without `upcast`; of several ranks, those of this rank's share of the vocabulary, with padding."""
        head = self.lm_head
        if not isinstance(head, SharedHead):
            return self.logits(hidden, upcast=False)
        if self.spec.scales.logit == 1.0 and self.spec.scales.softcap is None:
            return head.own(hidden)
        return self.scaled(head.own_scores(hidden))

    def whole_logits(self, own: Tensor) -> Tensor:
        """The logits, without `upcast`, joined from `own_logits` of all ranks."""
        return self.lm_head.whole(own) if isinstance(self.lm_head, SharedHead) else own

    def scaled(self, logits: Tensor) -> Tensor:
        """Applies the model's scale and softcap to scores `[N, vocab]` float32 in place."""
        if self.spec.scales.logit != 1.0:
            logits = logits.mul_(self.spec.scales.logit)
        if (cap := self.spec.scales.softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits
