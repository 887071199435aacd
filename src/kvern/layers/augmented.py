"""The block of Gemma 4: experts beside the MLP, an input of the layer's own, and a number that all is multiplied by."""

from torch import Tensor

from kvern.layers.block import Places, Residual, SequentialLayer
from kvern.layers.build import Build
from kvern.layers.halves import Update
from kvern.layers.linear import column, row
from kvern.layers.loadable import Loadable
from kvern.layers.moe import ExpertsBeside
from kvern.layers.norm import Norm
from kvern.layers.step_context import StepContext, rows_of
from kvern.spec.model import LayerSpec, ModelSpec


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
