"""The blocks of Gemma 3n and 4: experts beside the MLP, an input of the layer's own, and several residual streams.

AltUp: https://arxiv.org/abs/2301.13310. LAuReL, a product of low rank beside attention:
https://arxiv.org/abs/2411.07501, section 2.2. All of it is small, and whole on each rank.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvern.device import marks
from kvern.layers.block import Places, Residual, SequentialLayer
from kvern.layers.build import Build
from kvern.layers.embedding import LookupTable, ShortTable
from kvern.layers.halves import Update
from kvern.layers.linear import column, row
from kvern.layers.loadable import Loadable, copy_rows
from kvern.layers.module import Module
from kvern.layers.moe import ExpertsBeside
from kvern.layers.norm import Norm
from kvern.layers.step_context import StepContext, rows_of
from kvern.spec.model import AltUpSpec, LayerSpec, ModelSpec, PerLayerSpec


class LayerScalar(Loadable):
    """The number that what a layer hands on is multiplied by; 1 until it is loaded."""

    factor = 1.0

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"layer_scalar": (1,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        self.factor = float(tensor)


class AugmentedLayer(SequentialLayer):
    """A sequential layer with those of these parts that the model has."""

    def __init__(self, places: Places, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__(places, model, layer, build)
        self.experts = None
        if layer.experts is not None:
            self.experts = ExpertsBeside(model.hidden_size, model.norm, layer.experts, build)
        self.per_layer_input_gate = None
        if (spec := model.additions.per_layer) is not None:
            whole = build.whole  # a sum of ranks would take longer
            self.per_layer_input_gate = column(whole, model.hidden_size, {"per_layer_input_gate": spec.width})
            self.per_layer_projection = row(whole, spec.width, "per_layer_projection", model.hidden_size)
            self.per_layer_out = Norm(model.norm, model.hidden_size, "post_per_layer_input_norm", build)
            self._gated, self._beside = build.ops.gated_activation(spec.activation), build.ops.beside
        self.scalar = LayerScalar(build.path) if model.additions.scalars else None

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.attention_out(self.mix(normal, step))
        marks.begin(marks.MLP)
        hidden, normal = self.mlp_in.after(rows_of(hidden, step.wanted), attended)
        fed: Tensor = self.mlp(normal, step.adapters.wanted)
        if self.experts is not None:
            fed = self.experts(hidden, fed)
        hidden = self._add(hidden, self.mlp_out(fed))
        if self.per_layer_input_gate is not None:
            hidden = self._add(hidden, self.of_layer_input(hidden, step))
        if self.scalar is not None:
            hidden = self._multiply(hidden, self.scalar.factor)
        return hidden, None

    def of_layer_input(self, hidden: Tensor, step: StepContext) -> Tensor:
        """The projection of the layer's own input, which is gated by the rows `hidden` of the wanted tokens."""
        assert self.per_layer_input_gate is not None and step.layer_input is not None
        gate = self.per_layer_input_gate(hidden, step.adapters.wanted)
        gated = self._gated(self._beside((gate, rows_of(step.layer_input, step.wanted))))
        added: Tensor = self.per_layer_out(self.per_layer_projection(gated, step.adapters.wanted))
        return added


LEAST_MEAN_SQUARE = 1e-5


class Streams(Module):
    """Makes streams of embeddings, before the first layer, and hidden states of streams, after the last."""

    def __init__(self, hidden_size: int, spec: AltUpSpec, build: Build) -> None:
        super().__init__()
        more, leaving = spec.streams - 1, build.at("altup_unembed_projections")
        parts = {str(index): hidden_size for index in range(more)}
        self.entering = column(build.at("altup_projections"), hidden_size, parts)
        self.leaving = nn.ModuleList(column(leaving, hidden_size, {part: hidden_size}) for part in parts)

    def enter(self, embedded: Tensor) -> Tensor:
        """`[T, hidden] -> [T, streams, hidden]`: the embeddings, and projections of them that are as long."""
        first = embedded.unsqueeze(1)
        projected = self.entering(embedded).reshape(len(embedded), -1, embedded.shape[-1])
        return torch.cat((first, as_long(projected, first)), 1)

    def leave(self, streams: Tensor) -> Tensor:
        """`[T, streams, hidden] -> [T, hidden]`: the mean of the first, and of projections that are as long."""
        first, *others = streams.unbind(1)
        projected = [project(stream) for project, stream in zip(self.leaving, others, strict=True)]
        return torch.stack((first, *(as_long(rows, first) for rows in projected))).mean(0)


def as_long(rows: Tensor, like: Tensor) -> Tensor:
    """Rows `[..., hidden]` with the root mean square of others."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return rows * wanted / rows.square().mean(-1, keepdim=True).clamp(min=LEAST_MEAN_SQUARE).sqrt()


class OutputScale(Loadable):
    """The factors `[hidden]` of the first stream, which gates a layer's own input."""

    def __init__(self, hidden_size: int, build: Build) -> None:
        super().__init__(build.path)
        self.weight = build.empty(hidden_size)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"correct_output_scale": tuple(self.weight.shape)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_rows(self.weight, tensor, first_row)


class AltUp(Module):
    """Predicts streams `[T, streams, hidden]` from those of the layer before, and corrects them, in float32."""

    def __init__(self, model: ModelSpec, spec: AltUpSpec, build: Build) -> None:
        super().__init__()
        count = spec.streams
        self.router = column(build, model.hidden_size, {"modality_router": count})
        self.router_norm = Norm(model.norm, model.hidden_size, "router_norm", build)
        self.prediction = column(build, count, {"prediction_coefs": count * count})
        self.correction = column(build, count, {"correction_coefs": count})
        self.output_scale = OutputScale(model.hidden_size, build)
        self._router_scale = 1 / model.hidden_size

    def predict(self, streams: Tensor, rows: Any) -> Tensor:
        """Each stream with weighted ones added to it; the layer computes from the first."""
        count, wide = streams.shape[1], streams.float()
        weights = self.prediction(self._modalities(streams[:, 0], rows), rows).float().view(-1, count, count)
        predicted = wide.clone()
        for place in range(count):  # the same operations on each element: a row's results do not depend on the batch
            predicted.addcmul_(weights[:, :, place, None], wide[:, place, None])
        return predicted.to(streams.dtype)

    def correct(self, predicted: Tensor, computed: Tensor, rows: Any) -> Tensor:
        """Each stream with its share of what the layer's result `[T, hidden]` is off the first."""
        weights = self.correction(self._modalities(computed, rows), rows).float() + 1
        innovation = (computed - predicted[:, 0]).float()
        corrected = torch.addcmul(predicted.float(), weights.unsqueeze(-1), innovation.unsqueeze(1))
        return corrected.to(predicted.dtype)

    def _modalities(self, x: Tensor, rows: Any) -> Tensor:
        routed: Tensor = self.router(self.router_norm(x), rows)
        return routed.float().mul_(self._router_scale).tanh_().to(x.dtype)


class Laurel(Module):
    """`x + norm(right(left(x)))`, of a low rank: `x [T, hidden]`."""

    def __init__(self, model: ModelSpec, spec: AltUpSpec, build: Build) -> None:
        super().__init__()
        self.left = column(build, model.hidden_size, {"linear_left": spec.laurel_rank})
        self.right = row(build, spec.laurel_rank, "linear_right", model.hidden_size)
        self.norm = Norm(model.norm, model.hidden_size, "post_laurel_norm", build)

    def forward(self, x: Tensor, rows: Any) -> Tensor:
        added: Tensor = self.norm(self.right(self.left(x, rows), rows))
        return x + added


class AltUpLayer(AugmentedLayer):
    """A layer over streams `[T, streams, hidden]`: `hidden` and what it hands on are these.

    Its own input is added to all streams but the first.
    """

    def __init__(self, places: Places, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__(places, model, layer, build)
        assert model.additions.altup is not None
        self.altup = AltUp(model, model.additions.altup, build.at("altup").whole)
        self.laurel = Laurel(model, model.additions.altup, build.at("laurel").whole)

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        adapters, wanted = step.adapters, step.wanted
        predicted = self.altup.predict(hidden, adapters.rows)
        normal: Tensor = self.attention_in(predicted[:, 0])
        attended: Tensor = self.attention_out(self.mix(normal, step))
        predicted, normal = rows_of(predicted, wanted), rows_of(normal, wanted)
        computed = (predicted[:, 0] + attended + self.laurel(normal, adapters.wanted)).mul_(0.5**0.5)
        marks.begin(marks.MLP)
        computed = computed + self.mlp_out(self.mlp(self.mlp_in(computed), adapters.wanted))
        corrected = self.altup.correct(predicted, computed, adapters.wanted)
        first = corrected[:, 0] * self.altup.output_scale.weight
        corrected[:, 1:].add_(self.of_layer_input(first, step).unsqueeze(1))
        return corrected, None


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
        self.table.padding = spec.padding
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
