"""Parts of a model made of Triton kernels: the same results as those of PyTorch, in fewer passes over memory.

A layer of a single token is bound by the bytes of its weights and by launches. There, norms, the activation and the
residual's addition are done by the products themselves: six launches a layer, if the weights' format can.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from kvern.kernels.activation import coded_gated_activation, gated_activation
from kvern.kernels.linear import Around
from kvern.kernels.norm import add_rms_norm, coded_rms_norm, rms_norm
from kvern.kernels.quantize_rows import RowCodes
from kvern.kernels.rotary import rotate_and_store, rotate_queries
from kvern.layers.attention import NO_ADAPTERS, Attend, Attention, PagedAttend, StepAdapters, rows_of
from kvern.layers.block import Memory, Places, Residual, SequentialLayer
from kvern.layers.build import Build
from kvern.layers.halves import UpdateInHalves, halves, least_rows
from kvern.layers.linear_method import LinearMethod
from kvern.layers.mlp import GatedMLP
from kvern.layers.norm import HeadNorm, Norm
from kvern.layers.rope import Rotation, rows_of_table
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, NormSpec, QueryKeyNormSpec

if TYPE_CHECKING:
    from kvern.ranks.shared_norms import SharedNorms


class FusedRMSNorm(Norm):
    """A root-mean-square norm in one kernel, with the residual's addition before it."""

    weight: nn.Parameter

    def __init__(self, spec: NormSpec, width: int, name: str, build: Build) -> None:
        super().__init__(spec, width, name, build, dtype=torch.float32 if spec.offset else None)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)

    def after(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        if update is None:
            return hidden, rms_norm(hidden, self.weight, self.epsilon)
        return hidden, add_rms_norm(hidden, update, self.weight, self.epsilon)

    def before(
        self, method: LinearMethod | None, hidden: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | RowCodes]:
        """As `after`, if `method` alone multiplies the norm: as the codes that it would make of it, if any."""
        coding = None if method is None else method.coding(hidden.shape[0])
        if coding is None:
            return self.after(hidden, update)
        return hidden, coded_rms_norm(hidden, update, self.weight, self.epsilon, coding)


class SummingRMSNorm(FusedRMSNorm):
    """One that is handed a rank's summand of the update: for few rows all ranks' are added up in the same kernel."""

    def __init__(self, spec: NormSpec, width: int, name: str, build: Build) -> None:
        super().__init__(spec, width, name, build)
        self._ranks = build.ranks

    def after(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        peers = self._ranks.peers
        if update is None or peers is None or not peers.takes(update):
            return super().after(hidden, None if update is None else self._ranks.sum(update))
        return hidden, peers.sum_norm(update, hidden, self.weight, self.epsilon)

    def before(
        self, method: LinearMethod | None, hidden: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | RowCodes]:
        coding = None if method is None else method.coding(hidden.shape[0])
        if coding is None:
            return self.after(hidden, update)
        peers = self._ranks.peers
        if update is None or peers is None or not peers.takes(update):
            update = None if update is None else self._ranks.sum(update)
            return hidden, coded_rms_norm(hidden, update, self.weight, self.epsilon, coding)
        return hidden, peers.sum_codes(update, hidden, self.weight, self.epsilon, coding)


class FusedAttention(Attention):
    """Attention whose norm, rotation and cache write are one kernel."""

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__(index, model, layer, build)
        self.rotates = layer.rope is not None
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        norm = self.head_norm = cast("HeadNorm", self.norm_before) if model.query_key_norm is not None else None
        self.epsilon = 0.0 if norm is None else norm.spec.epsilon
        self.normalizes_values = model.query_key_norm is not None and model.query_key_norm.values
        self.keys_are_values = layer.attention.keys_are_values

    def attended(self, qkv: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        paged = cast("PagedAttend", attend)
        query = self._rotated(qkv, rotation, paged)
        if rotation.query_scale is not None:
            query.mul_(rotation.query_scale)
        return paged.over_cache(self.index, query, wanted).flatten(1)

    def _rotated(self, qkv: Tensor, rotation: Rotation, paged: PagedAttend) -> Tensor:
        """The queries `[T, heads, head_dim]`; keys and values are stored."""
        table, positions, _ = rotation
        return rotate_and_store(
            qkv,
            positions,
            paged.slot_mapping(self.index),
            table if self.rotates else None,
            paged.cache(self.index),
            scales=paged.scales(self.index),
            query_heads=self.heads,
            interleaved=self.interleaved,
            norm_weight=None if self.head_norm is None else self.head_norm.weight,
            epsilon=self.epsilon,
            norm_values=self.normalizes_values,
            keys_are_values=self.keys_are_values,
        )


class BorrowingFusedAttention(FusedAttention):
    """Attention to the keys and values of an earlier layer, whose cache `index` is."""

    def _rotated(self, qkv: Tensor, rotation: Rotation, paged: PagedAttend) -> Tensor:
        table, positions, _ = rotation
        return rotate_queries(
            qkv,
            positions,
            table if self.rotates else None,
            heads=self.heads,
            interleaved=self.interleaved,
            norm_weight=None if self.head_norm is None else self.head_norm.weight,
            epsilon=self.epsilon,
        )


class TableAttention(Attention):
    """Attention with a norm that the kernel does not know: PyTorch rotates, and the backend stores."""

    def forward(
        self,
        hidden: Tensor | RowCodes,
        rotation: Rotation,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Tensor:
        return super().forward(hidden, rows_of_table(rotation), attend, wanted, adapters)


class FusedGatedMLP(GatedMLP):
    """A gated MLP whose activation is one kernel, or the end of the product before it."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.kind = spec.activation
        self._methods = self.gate_up_proj.method, self.down_proj.method

    @property
    def first_method(self) -> LinearMethod:
        """What multiplies the rows that come, and nothing else does."""
        return self._methods[0]

    def forward(self, x: Tensor | RowCodes, rows: Any = None) -> Tensor:
        out: Tensor = self.down_proj(self.activated(x, rows), rows)
        return out

    def activated(self, x: Tensor | RowCodes, rows: Any = None) -> Tensor | RowCodes:
        """What the last product multiplies."""
        if self.gated is not None and rows is None and isinstance(x, Tensor):  # adapters add to what is activated
            return self.gated(x, self.bias)
        gate_up = self.gate_up_proj(x, rows)
        coding = self._methods[1].coding(gate_up.shape[0]) if rows is None else None
        if coding is None:
            return gated_activation(gate_up, self.kind)
        return coded_gated_activation(gate_up, self.kind, coding)


class FusedLayer(SequentialLayer):
    """Attention and MLP behind root-mean-square norms, each added to the residual, with few launches for one row."""

    attention_in: FusedRMSNorm
    mlp_in: FusedRMSNorm
    self_attn: FusedAttention

    def __init__(self, places: Places, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__(places, model, layer, build)
        linears = [self.self_attn.qkv_proj, self.self_attn.o_proj]
        if isinstance(self.mlp, FusedGatedMLP):
            linears += [self.mlp.gate_up_proj, self.mlp.down_proj]
        products = [linear.row_product() for linear in linears]
        self._products = None if None in products else cast("list[Callable[..., Tensor]]", products)
        norms = self.attention_in, self.mlp_in
        self._fuses = all(isinstance(norm, FusedRMSNorm) for norm in norms) and isinstance(
            self.self_attn, FusedAttention
        )
        first = self.mlp.first_method if isinstance(self.mlp, FusedGatedMLP) else None
        self._readers = self.self_attn.qkv_proj.method, first
        self._late_sums, self._norms = build.late_sums, build.ranks.norms
        if self._norms is not None and build.late_sums and self._fuses and first is not None:
            weights = sum(linear.inputs * sum(linear.outputs.values()) for linear in linears)
            if (self._norms.width, self._norms.dtype) == (model.hidden_size, build.dtype):
                self.halved_rows = range(least_rows(weights), 2 * self._norms.rows + 1)

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        memory: Memory,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Residual:
        products = self._products
        if adapters is not NO_ADAPTERS or not self._fuses:
            return super().forward(hidden, update, rotation, memory, wanted, adapters)
        if hidden.shape[0] > 1 or products is None:
            return self._many_rows(hidden, update, rotation, memory, wanted)
        if self._late_sums:
            return self._share_of_row(products, hidden, update, rotation, memory)
        qkv_product, output_product, *mlp_products = products
        attention, norm = self.self_attn, self.attention_in
        if update is None:
            qkv = qkv_product(hidden, around=Around(norm.weight, norm.epsilon))
        else:
            hidden, normal = norm.after(hidden, update)
            qkv = qkv_product(normal)
        attended = attention.attended(qkv, rotation, memory)
        hidden = output_product(attended, around=Around(residual=hidden))
        mlp, norm = self.mlp, self.mlp_in
        if not isinstance(mlp, FusedGatedMLP):
            return hidden, mlp(norm(hidden))
        gate_up_product, down_product = mlp_products
        activated = gate_up_product(hidden, around=Around(norm.weight, norm.epsilon, activation=mlp.kind))
        return down_product(activated, around=Around(residual=hidden)), None

    def _share_of_row(
        self,
        products: "list[Callable[..., Tensor]]",
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        attend: Attend,
    ) -> Residual:
        """A rank's share of one row: norms sum over ranks, so that no product adds to the residual or takes a norm."""
        qkv_product, output_product, *mlp_products = products
        hidden, normal = self.attention_in.after(hidden, update)
        attended = self.self_attn.attended(qkv_product(normal), rotation, attend)
        hidden, normal = self.mlp_in.after(hidden, output_product(attended))
        mlp = self.mlp
        if not isinstance(mlp, FusedGatedMLP):
            return hidden, mlp(normal)
        gate_up_product, down_product = mlp_products
        return hidden, down_product(gate_up_product(normal, around=Around(activation=mlp.kind)))

    def _many_rows(
        self, hidden: Tensor, update: Tensor | None, rotation: Rotation, attend: Attend, wanted: Tensor | None
    ) -> Residual:
        """Norms round what they make where products multiply codes."""
        qkv, gate_up = self._readers
        hidden, normal = self.attention_in.before(qkv, hidden, update)
        attended = self.self_attn(normal, rotation, attend, wanted)
        hidden, normal = self.mlp_in.before(gate_up, rows_of(hidden, wanted), attended)
        return hidden, self.mlp(normal)

    def in_halves(
        self, hidden: Tensor, update: Tensor | UpdateInHalves | None, rotation: Rotation, attend: Attend
    ) -> tuple[Tensor, UpdateInHalves]:
        """As `forward` without more, for `halved_rows`: `hidden` has this rank's rows alone until `joined`."""
        norms, attention, mlp = cast("SharedNorms", self._norms), self.self_attn, cast("FusedGatedMLP", self.mlp)
        rows, norm, method = halves(hidden), self.mlp_in, self._readers[1]
        first, second = halves(attention.attended(self._qkv_of_halves(norms, hidden, update), rotation, attend))
        norms.begin(0, attention.o_proj(first))
        summand = attention.o_proj(second)
        norms.norm(0, rows[0], norm.weight, norm.epsilon)
        norms.begin(1, summand)
        activated = mlp.activated(coded(norms.normal(0, len(rows[0])), method))
        norms.norm(1, rows[1], norm.weight, norm.epsilon)
        norms.begin(0, mlp.down_proj(activated))
        activated = mlp.activated(coded(norms.normal(1, len(rows[1])), method))
        return hidden, UpdateInHalves(norms, lambda: mlp.down_proj(activated))

    def _qkv_of_halves(self, norms: "SharedNorms", hidden: Tensor, update: Tensor | UpdateInHalves | None) -> Tensor:
        product, norm, method = self.self_attn.qkv_proj, self.attention_in, self._readers[0]
        if update is None:
            whole: Tensor = product(norm.before(method, hidden, None)[1])
            return whole
        if isinstance(update, Tensor):
            first, second = halves(update)
            norms.begin(0, first)
            update = UpdateInHalves(norms, lambda: second)
        rows = halves(hidden)
        norms.norm(0, rows[0], norm.weight, norm.epsilon)
        update.begin_second()
        part = product(coded(norms.normal(0, len(rows[0])), method))
        norms.norm(1, rows[1], norm.weight, norm.epsilon)
        return torch.cat((part, product(coded(norms.normal(1, len(rows[1])), method))))


def coded(normal: Tensor, method: LinearMethod | None) -> Tensor | RowCodes:
    """What `method` multiplies in the place of `normal [T, width]`."""
    coding = None if method is None else method.coding(len(normal))
    return normal if coding is None else coding(normal)


def can_fuse(model: ModelSpec, layer: LayerSpec) -> bool:
    """Whether a layer of a model is what `FusedLayer` joins."""
    query_key_norm = model.query_key_norm
    return (
        isinstance(layer.mixer, AttentionSpec)
        and not layer.mixer.gated
        and model.norm.kind == "rms"
        and model.norm.weight
        and set(model.block_norms) == {"attention_in", "mlp_in"}
        and model.residual_scale == 1.0
        and (query_key_norm is None or fuses_norm(query_key_norm))
    )


def fuses_norm(spec: QueryKeyNormSpec) -> bool:
    """Whether the rotation's kernel knows this norm of queries and keys."""
    return spec.norm.kind == "rms" and spec.scope != "row" and not spec.after_rope
