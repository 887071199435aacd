"""The one encoder: modules chosen from a `ModelSpec`, run over a flat line of tokens from many texts."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.device.text_batch import TextBatch
from kvern.layers.block import Places, PostNormLayer, SequentialLayer
from kvern.layers.build import Build
from kvern.layers.embedding import Embedding, Table
from kvern.layers.linear import column, row
from kvern.layers.linear_format import LinearMethods
from kvern.layers.module import Identity, Module
from kvern.layers.norm import Norm
from kvern.layers.step_context import Attend, StepContext
from kvern.layers.unquantized import Unquantized
from kvern.models.weighted import WeightedModel
from kvern.spec.model import EncoderSpec, HeadSpec, LayerSpec, ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}


class Embeddings(Module):
    """The sum of the embeddings of tokens, positions and token types, normalized or not: `[T] -> [T, hidden]`."""

    def __init__(self, spec: ModelSpec, encoder: EncoderSpec, build: Build) -> None:
        super().__init__()
        width = spec.hidden_size
        self.embed_tokens = Embedding(spec.vocab_size, width, spec.scales.embedding, build)
        self.embed_positions = Table("embed_positions", encoder.positions, width, build) if encoder.positions else None
        self.embed_types = Table("embed_types", encoder.types, width, build) if encoder.types else None
        self.embed_norm = Norm(spec.norm, width, "embed_norm", build) if encoder.first_norm else Identity()
        self.first_position, self._add = encoder.first_position, build.ops.add

    def forward(self, token_ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        hidden = self.embed_tokens(token_ids)
        if self.embed_positions is not None:
            hidden = self._add(hidden, self.embed_positions(positions + self.first_position))
        if self.embed_types is not None:
            hidden = self._add(hidden, self.embed_types(types))
        normal: Tensor = self.embed_norm(hidden)
        return normal


class Head(Module):
    """The head that scores the states of texts: `[S, hidden]` to `[S, labels]`; its weights are never quantized."""

    def __init__(self, spec: HeadSpec, width: int, build: Build) -> None:
        super().__init__()
        build = replace(build, path="head", linear=LinearMethods(Unquantized()))
        self.dense = column(build, width, {"dense": width}, bias=spec.dense_bias)
        self.norm = Identity() if spec.norm is None else Norm(spec.norm, width, "norm", build)
        self.out = row(build, width, "out", spec.labels, bias=True)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(self.activation(self.dense(states))))
        return logits


def _head(encoder: EncoderSpec, width: int, build: Build) -> Module | None:
    """A head that makes scores or embeddings of the states of texts."""
    if encoder.head is not None:
        return Head(encoder.head, width, build)
    if (made := encoder.projection) is None:
        return None
    build = replace(build, linear=LinearMethods(Unquantized()))
    return column(build, width, {"projection": made.width}, bias=made.bias)


class Encoder(WeightedModel):
    """A model that reads texts as a whole."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__(spec, build)
        assert spec.encoder is not None, "the specification of a decoder"
        self.encoder = spec.encoder
        post_norm = spec.encoder.post_norm
        self._rope_index = self.make_ropes()
        self.embeddings = Embeddings(spec, spec.encoder, build)
        make = PostNormLayer if post_norm else _pre_norm_layer
        self.layers = nn.ModuleList(
            make(Places(index, 0), spec, layer, build.at(f"layers.{index}")) for index, layer in enumerate(spec.layers)
        )
        self.norm = Identity() if post_norm else Norm(spec.norm, spec.hidden_size, "norm", build)
        self.head = _head(spec.encoder, spec.hidden_size, build)

    def forward(
        self, token_ids: Tensor, positions: Tensor, types: Tensor, attend: Attend, wanted: Tensor | None = None
    ) -> Tensor:
        """Computes hidden states `[T, hidden]` of tokens of texts: ids, positions and token types, int64 `[T]`.

        With `wanted` [S], indices of tokens, only their states `[S, hidden]` are returned.
        """
        hidden, update = self.embeddings(token_ids, positions, types), None
        rotations = self.rotations(positions)
        for index, layer in enumerate(self.layers):
            last = index + 1 == len(self.layers)
            step = StepContext(rotations[self._rope_index[index]], attend, None, wanted if last else None)
            hidden, update = layer(hidden, update, step)
        _, states = self.norm.after(hidden, update)
        return states

    def read(self, batch: TextBatch, attend: Attend) -> Tensor:
        """Embeddings of the texts of a batch, float32 `[S, hidden]`, or scores `[S, labels]` of the head."""
        wanted = None if self.encoder.pooling == "mean" else batch.pooled.long()
        states = self(batch.token_ids, batch.positions, batch.types, attend, wanted)
        if wanted is None:
            states = self._means(states, batch).to(states.dtype if self.head is not None else torch.float32)
        found: Tensor = states if self.head is None else self.head(states)
        return found.float()

    def _means(self, states: Tensor, batch: TextBatch) -> Tensor:
        """The mean state of each text, float32 `[S, hidden]`."""
        if "texts" in self.build.kernels:
            from kvern.kernels.text_means import text_means

            return text_means(states, batch.starts, batch.counts)
        return torch.stack([part.mean(0, dtype=torch.float32) for part in torch.split(states, list(batch.lengths))])


def _pre_norm_layer(places: Places, model: ModelSpec, layer: LayerSpec, build: Build) -> SequentialLayer:
    """A layer with norms; the first attention has none if a norm of the embeddings precedes it."""
    assert model.encoder is not None
    is_normal = places.attention == 0 and model.encoder.first_norm
    names = {place: name for place, name in model.block.norms.items() if not (is_normal and place == "attention_in")}
    return SequentialLayer(places, replace(model, block=replace(model.block, norms=names)), layer, build)
