"""Norms over the last dimension, and over queries and keys."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.cpu.norm import KINDS, add_norm
from kvern.layers.build import Build
from kvern.layers.loadable import Loadable, copy_shares
from kvern.layers.module import Module
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import NormSpec, QueryKeyNormSpec


class _NormWeights(Loadable):
    def fill_random(self, generator: torch.Generator) -> None:
        """Ones: rows keep their spread from layer to layer."""
        for name, shape in self.parts().items():
            self.load(name, torch.ones(shape))


class Norm(_NormWeights):
    """A norm of `width` entries whose weights the checkpoint calls `name`."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        spec: NormSpec,
        width: int,
        name: str,
        build: Build,
        *,
        dtype: torch.dtype | None = None,
        gain: float = 1.0,
    ) -> None:
        super().__init__(build.path)
        self.name, self.shape, self.epsilon, self.offset, self.gain = name, (width,), spec.epsilon, spec.offset, gain
        self.weight = build.empty(width, dtype=dtype) if spec.weight else None
        self.bias = build.empty(width, dtype=dtype) if spec.bias else None

    def after(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add `update` to the residual: the new residual and its norm, both `[T, width]`. The old one may be gone."""
        if update is not None:
            hidden = hidden + update
        normal: Tensor = self(hidden)
        return hidden, normal

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.{kind}": self.shape for kind, _ in self.named_parameters()}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        kind = part.rpartition(".")[2]
        target = self.get_parameter(kind).narrow(0, first_row, tensor.shape[0])
        tensor = tensor.to(target)
        target.copy_((tensor + self.offset) * self.gain if kind == "weight" else tensor)


class LayerNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.epsilon)


class OffsetRMSNorm(Norm):
    """Weights of 1 + w need more digits than bfloat16 has, so this norm multiplies in float32, as Gemma does."""

    def __init__(self, spec: NormSpec, width: int, name: str, build: Build) -> None:
        super().__init__(spec, width, name, build, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.shape, self.weight, self.epsilon).to(x.dtype)


def _is_on_cpu(build: Build) -> bool:
    return build.device.type == "cpu"


def _divide_by_length(x: Tensor, floor: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + floor^2)` along the last dimension, in float32.

    With `floor = sqrt(width * epsilon)` this is a root-mean-square norm over sqrt(width), in half as many operations as
    `F.rms_norm` takes on a CPU.
    """
    length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    return torch.div(x, length.hypot_(floor))


class CpuRMSNorm(Norm):
    """Any root-mean-square norm on a CPU; its float32 weights hold the factor sqrt(width)."""

    def __init__(self, spec: NormSpec, width: int, name: str, build: Build) -> None:
        super().__init__(spec, width, name, build, dtype=torch.float32, gain=math.sqrt(width))
        self.floor = torch.tensor(math.sqrt(width * spec.epsilon))

    def forward(self, x: Tensor) -> Tensor:
        return _divide_by_length(x, self.floor).mul_(self.weight).to(x.dtype)  # type: ignore[arg-type]


class CompiledNorm(Norm):
    """A norm by a kernel for CPUs, which also adds to the residual; weights and biases are float32."""

    def __init__(self, spec: NormSpec, width: int, name: str, build: Build) -> None:
        super().__init__(spec, width, name, build, dtype=torch.float32)
        self.kind = KINDS[spec.kind]

    def forward(self, x: Tensor) -> Tensor:
        return add_norm(x.contiguous(), None, self.weight, self.bias, self.epsilon, self.kind)

    def after(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        return hidden, add_norm(hidden, update, self.weight, self.bias, self.epsilon, self.kind)


def make_norm(spec: NormSpec, width: int, name: str, build: Build) -> Norm:
    if "cpu_layers" in build.kernels:
        return CompiledNorm(spec, width, name, build)
    if spec.kind == "layer":
        return LayerNorm(spec, width, name, build)
    if spec.weight and "norm" in build.kernels:
        from kvern.layers.fused import FusedRMSNorm, SummingRMSNorm

        return (SummingRMSNorm if build.late_sums else FusedRMSNorm)(spec, width, name, build)
    if spec.weight and _is_on_cpu(build):
        return CpuRMSNorm(spec, width, name, build)
    return (OffsetRMSNorm if spec.offset else RMSNorm)(spec, width, name, build)


class HeadNorm(_NormWeights):
    """Normalises each head of queries and keys, `[T, heads + kv_heads, head_dim]`, in one pass and in float32."""

    def __init__(self, spec: QueryKeyNormSpec, attention: AttentionSpec, build: Build) -> None:
        super().__init__(build.path)
        self.spec, self.attention = spec.norm, attention
        self.shape = (attention.head_dim,)
        self.per_head = spec.scope == "each_head"
        own = attention.own_kv_heads
        self.shares = {"q_norm": build.ranks.share(attention.heads), "k_norm": build.ranks.share(own, attention.copies)}
        self.weight = build.empty(attention.heads + own, attention.head_dim, dtype=torch.float32)
        self.bias = build.empty(*self.weight.shape, dtype=torch.float32) if spec.norm.bias else None
        self.floor = torch.tensor(math.sqrt(attention.head_dim * spec.norm.epsilon))
        divides = spec.norm.kind == "rms" and _is_on_cpu(build) and not build.kernels
        self.gain = math.sqrt(attention.head_dim) if divides else 1.0
        self.normalize = self._divide if divides else self._rms if spec.norm.kind == "rms" else self._layer

    def _divide(self, x: Tensor) -> Tensor:
        return _divide_by_length(x, self.floor)

    def _rms(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.shape, None, self.spec.epsilon)

    def _layer(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, None, None, self.spec.epsilon)

    def forward(self, query_key: Tensor) -> Tensor:
        normal = self.normalize(query_key).mul_(self.weight)
        return (normal if self.bias is None else normal.add_(self.bias)).to(query_key.dtype)

    def of_query_and_key(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Weights of queries and of keys, each `[heads, head_dim]` float32, and biases."""
        sizes = [self.attention.heads, self.attention.own_kv_heads]
        biases = (None, None) if self.bias is None else torch.split(self.bias, sizes)
        return torch.split(self.weight, sizes), biases

    def parts(self) -> dict[str, tuple[int, ...]]:
        kinds = [kind for kind, _ in self.named_parameters()]
        heads = {name: share.whole for name, share in self.shares.items() if share.whole}
        shapes = {name: (count, *self.shape) if self.per_head else self.shape for name, count in heads.items()}
        return {f"{name}.{kind}": shape for name, shape in shapes.items() for kind in kinds}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        name, _, kind = part.rpartition(".")
        heads = self.attention.heads
        target = self.get_parameter(kind)
        rows = target[:heads] if name == "q_norm" else target[heads:]
        tensor = tensor.to(rows)
        tensor = (tensor + self.spec.offset) * self.gain if kind == "weight" else tensor
        if self.per_head:
            copy_shares(rows, tensor, first_row, [self.shares[name]])
        else:
            rows.narrow(1, first_row, tensor.shape[0]).copy_(tensor)


class RowNorm(Module):
    """Normalises all heads of the queries together, and all heads of the keys."""

    def __init__(self, spec: QueryKeyNormSpec, attention: AttentionSpec, build: Build) -> None:
        super().__init__()
        self.heads = attention.heads
        self.q_norm = make_norm(spec.norm, attention.heads * attention.head_dim, "q_norm", build)
        self.k_norm = make_norm(spec.norm, attention.kv_heads * attention.head_dim, "k_norm", build)

    def forward(self, query_key: Tensor) -> Tensor:
        query, key = query_key[:, : self.heads], query_key[:, self.heads :]
        rows = torch.cat((self.q_norm(query.flatten(1)), self.k_norm(key.flatten(1))), -1)
        return rows.view(query_key.shape)

    def of_query_and_key(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Weights of queries and of keys, each `[heads * head_dim]`, and biases."""
        return (self.q_norm.weight, self.k_norm.weight), (self.q_norm.bias, self.k_norm.bias)


class SharedRowNorm(_NormWeights):
    """As `RowNorm`, root-mean-square, of a rank's heads: the ranks tell each other how long their parts of rows are."""

    def __init__(self, spec: QueryKeyNormSpec, attention: AttentionSpec, build: Build) -> None:
        super().__init__(build.path)
        self.spec, self._copies, self._ranks = spec.norm, attention.copies, build.ranks
        self._heads = [attention.heads, attention.kv_heads]
        sizes = [heads * attention.head_dim for heads in self._heads]
        self.shares = {"q_norm": build.ranks.share(sizes[0]), "k_norm": build.ranks.share(sizes[1], attention.copies)}
        self.weight = build.empty(sum(sizes), dtype=torch.float32)

    def forward(self, query_key: Tensor) -> Tensor:
        x = query_key.float()
        squares = [part.square().mean((1, 2)) for part in torch.split(x, self._heads, 1)]
        found = self._ranks.beside(torch.stack(squares, 1))  # queries and keys of one rank, then of the next
        means = found[:, ::2].mean(1, keepdim=True), found[:, 1 :: 2 * self._copies].mean(1, keepdim=True)
        scales = [
            (mean + self.spec.epsilon).rsqrt().expand(-1, heads) for mean, heads in zip(means, self._heads, strict=True)
        ]
        return (x * torch.cat(scales, 1)[..., None] * self.weight.view(x.shape[1:])).to(query_key.dtype)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (share.whole,) for name, share in self.shares.items()}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        name = part.partition(".")[0]
        queries = len(self.shares["q_norm"].held)
        rows = self.weight[:queries] if name == "q_norm" else self.weight[queries:]
        copy_shares(rows, tensor.to(rows) + self.spec.offset, first_row, [self.shares[name]])


def make_query_key_norm(spec: QueryKeyNormSpec, attention: AttentionSpec, build: Build) -> nn.Module:
    if spec.scope != "row":
        return HeadNorm(spec, attention, build)
    return (RowNorm if build.ranks.size == 1 else SharedRowNorm)(spec, attention, build)
