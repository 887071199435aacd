"""Draft heads: one layer beside a model that guesses tokens from the states that the model computes anyway.

    a model's states of tokens 0 .. t    ->  enter  ->  states of the head's own size
    tokens 1 .. t + 1, and those states  ->  forward ->  states, of which the last one's logits draft token t + 2
    a draft, and the state it came from  ->  forward ->  the state whose logits draft the next one, and so on

A head attends to what it has read, through a cache of its own with a place for each place of the model's. Which parts
it has, and what a checkpoint calls them, its `DraftHeadSpec` says; `drafting/models/formats.py` reads those.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvern.layers.block import Places, block_class, make_attention
from kvern.layers.build import Build
from kvern.layers.embedding import make_embedding, make_head
from kvern.layers.linear import Linear
from kvern.layers.loadable import Loadable, copy_rows
from kvern.layers.mlp import make_mlp
from kvern.layers.module import Identity, Module
from kvern.layers.norm import Norm
from kvern.layers.rope import RopeTable, Rotation, positions_alone
from kvern.layers.step_context import Attend, StepContext
from kvern.models.decoder import Decoder, LayerInputs
from kvern.models.weighted import WeightedModel
from kvern.spec.model import HeadLayerSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


@dataclass(frozen=True)
class Eagle3Spec:
    """Properties of EAGLE-3's heads (Li et al. 2025, https://arxiv.org/abs/2503.01840, section 3.1).

    `entries`: the layers of the model whose inputs are joined as the head's input; the number of layers stands for the
    output of the last. `norm_before_joined`: these are normalized. `normal_residual`: the residual is normalized, too.
    """

    entries: tuple[int, ...]
    norm_before_joined: bool = False
    normal_residual: bool = False


@dataclass(frozen=True)
class DraftHeadSpec:
    """A draft head for one model: `model` describes its only layer and its checkpoint.

    `state_size`: numbers of each state that the model hands it. `drafted`: so many tokens it may draft, which its
    checkpoint lists; None: all of the vocabulary. Without a table of embeddings of its own (`own_embedding`) it reads
    the model's, and without an output layer (`own_output`) it asks the model's. `eagle3`: None: embeddings and states
    are joined before its layer, else within.
    """

    model: ModelSpec
    parts: HeadLayerSpec
    state_size: int
    drafted: int | None = None
    joined_bias: bool = False
    own_embedding: bool = False
    own_output: bool = False
    eagle3: Eagle3Spec | None = None


class DraftHead(WeightedModel):
    """A head whose layer reads embeddings and states through one projection: EAGLE's, and multi-token prediction's.

    It computes what tokens of many requests lead to, as a `Decoder` does.
    """

    def __init__(self, head: DraftHeadSpec, target: Decoder, model: ModelSpec, build: Build) -> None:
        """`model`: that of `head`, or one without positions, whose shapes alone are wanted."""
        super().__init__(model, build)
        self.head = head
        size = model.hidden_size
        top = replace(build, path="")
        parts = head.parts
        [layer] = model.layers
        self.rope_table = None if layer.rope is None else RopeTable(layer.rope, build)
        self._embed: Callable[[Tensor], Tensor] = target.embed_tokens.forward
        if head.own_embedding:
            self.embed_tokens = make_embedding(model.vocab_size, size, 1.0, build)
            self._embed = self.embed_tokens.forward
        self._score: Callable[[Tensor], Tensor] = target.logits
        if head.own_output:
            self.lm_head = make_head(size, head.drafted or model.vocab_size, top)
            self._score = self.lm_head.scores
        self.drafted = None if head.drafted is None else DraftedTokens(head.drafted, model.vocab_size, top)
        path, name = _split(parts.joined)
        self.joined = Linear(self._joins(), {name: size}, replace(top, path=path), bias=head.joined_bias)
        norm = _norm(model.norm, size, parts.norm, top)
        self.norm_state: Norm | Identity = norm if parts.normal else Identity(build.ops.add)
        self.norm_output: Norm | Identity = Identity() if parts.normal else norm
        self._make_layer(layer, replace(top, path=parts.layer))

    def _joins(self) -> int:
        return self.spec.hidden_size + self.head.state_size

    def _make_layer(self, layer: LayerSpec, build: Build) -> None:
        model = self.spec
        parts = self.head.parts
        top = replace(build, path="")
        self.embedding_norm = _norm(model.norm, model.hidden_size, parts.embedding_norm, top)
        self.hidden_norm = _norm(model.norm, self.head.state_size, parts.hidden_norm, top)
        self.layer = block_class(model, layer, build)(Places(0, 0), model, layer, build)

    def layer_inputs(self) -> LayerInputs | None:
        """Returns the collector of the model's states; None if they are the last ones."""
        return None if self.head.eagle3 is None else LayerInputs(self.head.eagle3.entries, self.build)

    def enter(self, states: Tensor) -> Tensor:
        """The model's states `[T, state_size]` -> states as the head hands them on itself, `[T, hidden]`."""
        return states

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The states `[T, hidden]` that lead to the tokens behind `token_ids`.

        token_ids  [T] int64, each behind the token that the state in its place is of
        states     [T, hidden], of `enter` or of an earlier call
        positions  [T] int64, of the states' tokens: their places in the head's cache
        """
        hidden = self._join(self._embed(token_ids), states)
        hidden, update = self.layer(hidden, None, StepContext(self._rotation(positions), attend))
        _, state = self.norm_state.after(hidden, update)
        return state

    def _join(self, embedded: Tensor, states: Tensor) -> Tensor:
        both = self.embedding_norm(embedded), self.hidden_norm(states)
        joined: Tensor = self.joined(self.build.ops.beside(both))
        return joined

    def _rotation(self, positions: Tensor) -> Rotation:
        return positions_alone(positions) if self.rope_table is None else self.rope_table(positions)

    def scores(self, states: Tensor) -> Tensor:
        """Score the tokens that it drafts: `[N, hidden]` -> float32 `[N, drafted]`."""
        return self._score(self.norm_output(states))

    def logits(self, states: Tensor) -> Tensor:
        """Score the model's vocabulary: `[N, hidden]` -> float32 `[N, vocab]`; -inf: what the head never drafts."""
        scores = self.scores(states)
        return scores if self.drafted is None else self.drafted(scores)


class Eagle3Head(DraftHead):
    """A head whose attention reads embeddings and states side by side, and which begins with several layers' states."""

    def _joins(self) -> int:
        return self.head.state_size

    def _make_layer(self, layer: LayerSpec, build: Build) -> None:
        eagle3 = self.head.eagle3
        norm = self.spec.norm
        top = replace(build, path="")
        assert eagle3 is not None
        self.midlayer = Eagle3Layer(self.spec, layer, build, normal_residual=eagle3.normal_residual)
        self.norm_before = _norm(norm, self.head.state_size, "input_norm" if eagle3.norm_before_joined else "", top)

    def enter(self, states: Tensor) -> Tensor:
        joined: Tensor = self.joined(self.norm_before(states))
        return joined

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden, update = self.midlayer(self._embed(token_ids), states, StepContext(self._rotation(positions), attend))
        _, state = self.norm_state.after(hidden, update)
        return state


class Eagle3Layer(Module):
    """A block that reads embeddings and states, each through a norm, and adds to the states."""

    def __init__(self, model: ModelSpec, layer: LayerSpec, build: Build, *, normal_residual: bool) -> None:
        super().__init__()
        assert isinstance(layer.mlp, MlpSpec)
        self.normal_residual, self._beside = normal_residual, build.ops.beside
        self.embedding_in = Norm(model.norm, model.hidden_size, "input_layernorm", build)
        self.state_in = Norm(model.norm, model.hidden_size, "hidden_norm", build)
        self.mlp_in = Norm(model.norm, model.hidden_size, "post_attention_layernorm", build)
        self.self_attn = make_attention(0, model, layer, build.at("self_attn"))
        self.mlp = make_mlp(model.hidden_size, layer.mlp, build.at("mlp"))

    def forward(self, embedded: Tensor, states: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Both `[T, hidden]` -> the residual, and what is still to be added to it."""
        normal = self.state_in(states)
        both = self._beside((self.embedding_in(embedded), normal))
        attended: Tensor = self.self_attn(both, step)
        hidden, fed = self.mlp_in.after(normal if self.normal_residual else states, attended)
        return hidden, self.mlp(fed)


class DraftedTokens(Loadable):
    """The `count` tokens of a `vocabulary` that an output layer scores: their differences to 0, 1, 2, ..., "d2t"."""

    def __init__(self, count: int, vocabulary: int, build: Build) -> None:
        super().__init__(build.path)
        self.vocabulary = vocabulary
        self.token_ids = build.empty(count, dtype=torch.int64)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"d2t": tuple(self.token_ids.shape)}

    def part_dtypes(self) -> Mapping[str, torch.dtype]:
        return {"d2t": torch.int64}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        places = torch.arange(first_row, first_row + len(tensor))
        copy_rows(self.token_ids, tensor.cpu() + places, first_row)

    def fill_random(self, generator: torch.Generator) -> None:
        self.load("d2t", torch.zeros(self.token_ids.shape, dtype=torch.int64))

    def finish(self) -> None:
        if bool(((self.token_ids < 0) | (self.token_ids >= self.vocabulary)).any()):
            raise ValueError(f"names tokens outside of the vocabulary, which has {self.vocabulary}")

    def forward(self, scores: Tensor) -> Tensor:
        """`[N, count]` -> `[N, vocabulary]`, -inf elsewhere."""
        all_scores = scores.new_full((scores.shape[0], self.vocabulary), float("-inf"))
        return all_scores.index_copy_(1, self.token_ids, scores)


def make_draft_head(head: DraftHeadSpec, target: Decoder, model: ModelSpec, build: Build) -> DraftHead:
    """The module of a head beside `target`; `model` as in `DraftHead`."""
    return (DraftHead if head.eagle3 is None else Eagle3Head)(head, target, model, build)


def _norm(spec: NormSpec, width: int, name: str, build: Build) -> Norm | Identity:
    path, part = _split(name)
    return Norm(spec, width, part, replace(build, path=path)) if name else Identity(build.ops.add)


def _split(name: str) -> tuple[str, str]:
    """The path of a part's parent, and what the part is called there."""
    path, _, part = name.rpartition(".")
    return path, part
