"""Inputs of each layer's own: rows of a large table, and a projection of the tokens' embeddings (Gemma 3n and 4)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.embedding import LookupTable, ShortTable
from kvern.layers.linear import column
from kvern.layers.module import Module
from kvern.layers.norm import Norm
from kvern.spec.model import ModelSpec, PerLayerSpec


class PerLayerInputs(Module):
    """Each layer's own input, `[T, width]`. Each rank has some columns of the table, which is large."""

    def __init__(self, model: ModelSpec, spec: PerLayerSpec, build: Build) -> None:
        super().__init__()
        outputs = len(model.layers) * spec.width
        scale = math.sqrt(spec.width)
        table = LookupTable if spec.vocab_size >= model.vocab_size else ShortTable
        self._ranks, held = build.ranks, outputs // build.ranks.size
        columns = self._ranks.share(held)
        self.table = table(spec.vocab_size, columns, scale, build, name="embed_tokens_per_layer")
        self.projection = column(build.whole, model.hidden_size, {"per_layer_model_projection": outputs})
        self.norm = Norm(model.norm, spec.width, "per_layer_projection_norm", build)
        self.width, self._ops = spec.width, build.ops
        self._projection_scale = model.hidden_size**-0.5

    def forward(self, looked_up: Tensor, embedded: Tensor) -> Sequence[Tensor]:
        """From this rank's part of the table's rows `[T, layers * width]`, and the tokens' embeddings `[T, hidden]`."""
        if self._ranks.size > 1:
            looked_up = self._ranks.beside(looked_up)
        projected = self._ops.scale(self.projection(embedded).contiguous(), self._projection_scale)
        normal = self.norm(projected.view(-1, self.width)).view(looked_up.shape)
        return torch.split(self._ops.scale(self._ops.add(normal, looked_up), 0.5**0.5), self.width, -1)
