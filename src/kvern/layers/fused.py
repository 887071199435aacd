"""A block of few launches: the same results as those of its parts, in fewer passes over memory.

A layer of a single token is bound by the bytes of its weights and by launches. There, norms, the activation and the
residual's addition are done by the products themselves: six launches a layer, if the weights' format can.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvern.device import marks
from kvern.kernels.linear import Around
from kvern.kernels.quantize_rows import RowCodes
from kvern.layers.attention import Attention
from kvern.layers.block import Places, Residual, SequentialLayer
from kvern.layers.build import Build
from kvern.layers.halves import Update, UpdateInHalves, halves, is_halved, joined, least_rows
from kvern.layers.linear_method import LinearMethod
from kvern.layers.mlp import GatedMLP
from kvern.layers.norm import Norm
from kvern.layers.step_context import NO_ADAPTERS, StepContext, rows_of
from kvern.layers.triton_heads import TritonHeads
from kvern.spec.model import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from kvern.ranks.shared_norms import SharedNorms


class FusedLayer(SequentialLayer):
    """Attention and MLP behind root-mean-square norms, each added to the residual, with few launches for one row."""

    attention_in: Norm
    mlp_in: Norm
    self_attn: Attention
    halved_rows = range(0)
    """The numbers of rows of a step, without adapters or `wanted`, that are computed in halves."""

    def __init__(self, places: Places, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__(places, model, layer, build)
        linears = [self.self_attn.qkv_proj, self.self_attn.o_proj]
        mlp = self.mlp if isinstance(self.mlp, GatedMLP) and self.mlp.is_fused else None
        if mlp is not None:
            linears += [mlp.gate_up_proj, mlp.down_proj]
        self._activation = None if mlp is None else mlp.kind
        products = [linear.row_product() for linear in linears]
        self._products = None if None in products else cast("list[Callable[..., Tensor]]", products)
        are_fused = self.attention_in.is_fused and self.mlp_in.is_fused
        self._fuses = are_fused and isinstance(self.self_attn.attended, TritonHeads)
        first = None if mlp is None else mlp.gate_up_proj.method
        self._readers = self.self_attn.qkv_proj.method, first
        self._late_sums, self._norms = build.late_sums, build.ranks.norms
        if self._norms is not None and build.late_sums and self._fuses and first is not None:
            weights = sum(linear.inputs * sum(linear.outputs.values()) for linear in linears)
            if (self._norms.width, self._norms.dtype) == (model.hidden_size, build.dtype):
                self.halved_rows = range(least_rows(weights), 2 * self._norms.rows + 1)

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        products = self._products
        if step.adapters is not NO_ADAPTERS or not self._fuses:
            return super().forward(hidden, update, step)
        if step.wanted is None and is_halved(self.halved_rows, hidden):
            return self.in_halves(hidden, update, step)
        hidden, update = joined(hidden, update)
        if hidden.shape[0] > 1 or products is None:
            return self._many_rows(hidden, update, step)
        step = step if step.wanted is None else step._replace(wanted=None)
        if self._late_sums:
            return self._share_of_row(products, hidden, update, step)
        qkv_product, output_product, *mlp_products = products
        norm = self.attention_in
        if update is None:
            qkv = qkv_product(hidden, around=Around(norm.weight, norm.epsilon))
        else:
            hidden, normal = norm.after(hidden, update)
            qkv = qkv_product(normal)
        attended = self.self_attn.attended(qkv, step)
        hidden = output_product(attended, around=Around(residual=hidden))
        marks.begin(marks.MLP)
        norm, activation = self.mlp_in, self._activation
        if activation is None:
            return hidden, self.mlp(norm(hidden))
        gate_up_product, down_product = mlp_products
        activated = gate_up_product(hidden, around=Around(norm.weight, norm.epsilon, activation=self._activation))
        return down_product(activated, around=Around(residual=hidden)), None

    def _share_of_row(
        self, products: "list[Callable[..., Tensor]]", hidden: Tensor, update: Tensor | None, step: StepContext
    ) -> Residual:
        """A rank's share of one row: norms sum over ranks, so that no product adds to the residual or takes a norm."""
        qkv_product, output_product, *mlp_products = products
        hidden, normal = self.attention_in.after(hidden, update)
        attended = self.self_attn.attended(qkv_product(normal), step)
        added = output_product(attended)
        marks.begin(marks.MLP)
        hidden, normal = self.mlp_in.after(hidden, added)
        if self._activation is None:
            return hidden, self.mlp(normal)
        gate_up_product, down_product = mlp_products
        return hidden, down_product(gate_up_product(normal, around=Around(activation=self._activation)))

    def _many_rows(self, hidden: Tensor, update: Tensor | None, step: StepContext) -> Residual:
        """The results of a step of many rows; norms round their results where products multiply codes."""
        qkv, gate_up = self._readers
        attention = self.self_attn
        hidden, normal = self.attention_in.before(qkv, hidden, update)
        attended = attention.o_proj(attention.attended(attention.qkv_proj(normal), step))
        marks.begin(marks.MLP)
        hidden, normal = self.mlp_in.before(gate_up, rows_of(hidden, step.wanted), attended)
        return hidden, self.mlp(normal)

    def in_halves(self, hidden: Tensor, update: Update, step: StepContext) -> tuple[Tensor, UpdateInHalves]:
        """The results for `halved_rows`; `hidden` has this rank's rows and no others until it is `joined`."""
        norms = cast("SharedNorms", self._norms)
        attention = self.self_attn
        mlp = cast("GatedMLP", self.mlp)
        rows = halves(hidden)
        norm = self.mlp_in
        method = self._readers[1]
        weight = norm.kernel_weight
        first, second = halves(attention.attended(self._qkv_of_halves(norms, hidden, update), step))
        norms.begin(0, attention.o_proj(first))
        summand = attention.o_proj(second)
        marks.begin(marks.MLP)
        norms.norm(0, rows[0], weight, norm.epsilon)
        norms.begin(1, summand)
        activated = mlp.activated(coded(norms.normal(0, len(rows[0])), method))
        norms.norm(1, rows[1], weight, norm.epsilon)
        norms.begin(0, mlp.down_proj(activated))
        activated = mlp.activated(coded(norms.normal(1, len(rows[1])), method))
        return hidden, UpdateInHalves(norms, lambda: mlp.down_proj(activated))

    def _qkv_of_halves(self, norms: "SharedNorms", hidden: Tensor, update: Update) -> Tensor:
        product = self.self_attn.qkv_proj
        norm = self.attention_in
        method = self._readers[0]
        if update is None:
            whole: Tensor = product(norm.before(method, hidden, None)[1])
            return whole
        if isinstance(update, Tensor):
            first, second = halves(update)
            norms.begin(0, first)
            update = UpdateInHalves(norms, lambda: second)
        rows, weight = halves(hidden), norm.kernel_weight
        norms.norm(0, rows[0], weight, norm.epsilon)
        update.begin_second()
        part = product(coded(norms.normal(0, len(rows[0])), method))
        norms.norm(1, rows[1], weight, norm.epsilon)
        return torch.cat((part, product(coded(norms.normal(1, len(rows[1])), method))))


def coded(normal: Tensor, method: LinearMethod | None) -> Tensor | RowCodes:
    """The codes that `method` multiplies in the place of `normal [T, width]`, or `normal` itself."""
    coding = None if method is None else method.coding(len(normal))
    return normal if coding is None else coding(normal)
