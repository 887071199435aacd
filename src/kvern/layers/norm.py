"""Norms over the last dimension, and over queries and keys."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers.build_options import BuildOptions
from kvern.layers.halves import Update, joined
from kvern.layers.linear_method import LinearMethod
from kvern.layers.loadable import Loadable, copy_shares
from kvern.layers.module import Module
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import NormSpec, QueryKeyNormSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes


class _NormWeights(Loadable):
    def fill_random(self, generator: torch.Generator) -> None:
        """Ones: rows keep their spread from layer to layer."""
        for name, shape in self.parts().items():
            self.load(name, torch.ones(shape))


class Norm(_NormWeights):
    """A norm of `width` entries whose weights the checkpoint calls `name`.

    With `late_sums` it is given a rank's summand of an update, and adds up those of all ranks; for few rows that is
    done within the norm's kernel.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, spec: NormSpec, width: int, name: str, build: BuildOptions, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`, if there is one, is that of the weights, and PyTorch computes the norm."""
        super().__init__(build.path)
        self.spec = spec
        self.name = name
        self.shape = (width,)
        self.epsilon = spec.epsilon
        self.gain = 1.0
        self._ops = build.ops
        self._coded: Callable[..., RowCodes] | None = None
        self._compute: Callable[..., tuple[Tensor, Tensor]] = self._by_torch
        is_rms = spec.kind == "rms"
        if dtype is None:
            dtype = torch.float32 if is_rms and spec.offset else None
            if build.ops.any_norm is not None:
                self._compute, dtype = self._by_any_norm, torch.float32
            elif is_rms and spec.weight and build.ops.norm is not None:
                self._compute, self._coded = self._by_kernel, build.ops.coded_norm
            elif is_rms and spec.weight and _is_on_cpu(build):
                self._compute, dtype = self._by_length, torch.float32
                self.gain = math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * spec.epsilon))
        self.weight = build.empty(width, dtype=dtype) if spec.weight else None
        self.bias = build.empty(width, dtype=dtype) if spec.bias else None
        self._ranks = build.ranks if build.late_sums and self._coded is not None else None

    def _by_torch(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of both, which may be written to `hidden`, and its norm; so do the others.

        Weights of 1 + w need more digits than bfloat16 has, so a norm with an offset multiplies in float32, as Gemma's.
        """
        if update is not None:
            hidden = hidden + update
        if self.spec.kind != "rms":
            return hidden, F.layer_norm(hidden, self.shape, self.weight, self.bias, self.epsilon)
        if self.spec.offset:
            return hidden, F.rms_norm(hidden.float(), self.shape, self.weight, self.epsilon).to(hidden.dtype)
        return hidden, F.rms_norm(hidden, self.shape, self.weight, self.epsilon)

    def _by_any_norm(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        any_norm = cast("Callable[..., Tensor]", self._ops.any_norm)
        return hidden, any_norm(hidden, update, self.weight, self.bias, self.epsilon, self.spec.kind)

    def _by_kernel(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        norm = cast("Callable[..., Tensor]", self._ops.norm)
        return hidden, norm(hidden, update, self.weight, self.epsilon)

    def _by_length(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """A root-mean-square norm on a CPU; its float32 weights hold the factor sqrt(width)."""
        if update is not None:
            hidden = hidden + update
        return hidden, _divide_by_length(hidden, self._floor).mul_(self.kernel_weight).to(hidden.dtype)

    @property
    def kernel_weight(self) -> Tensor:
        """The weight, as kernels take it, which compute norms with weights and no others."""
        assert self.weight is not None
        return self.weight

    @property
    def is_fused(self) -> bool:
        """The norm is computed by a kernel that can also make codes of it."""
        return self._coded is not None

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x, None)[1]

    def after(self, hidden: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """Add `update` to the residual: the new residual and its norm, both `[T, width]`. The old one may be gone."""
        if self._ranks is not None:
            hidden, update = joined(hidden, update)
            peers = self._ranks.peers
            if update is not None and peers is not None and peers.takes(update):
                return hidden, peers.sum_norm(update, hidden, self.kernel_weight, self.epsilon)
            update = None if update is None else self._ranks.sum(update)
        return self._compute(hidden, update)

    def before(
        self, method: LinearMethod | None, hidden: Tensor, update: Tensor | None
    ) -> "tuple[Tensor, Tensor | RowCodes]":
        """Do the same as `after`; if `method` multiplies codes and nothing else reads the norm, return codes of it."""
        coding = None if method is None or self._coded is None else method.coding(hidden.shape[0])
        if coding is None or self._coded is None:
            return self.after(hidden, update)
        if self._ranks is not None and update is not None:
            peers = self._ranks.peers
            if peers is not None and peers.takes(update):
                return hidden, peers.sum_codes(update, hidden, self.kernel_weight, self.epsilon, coding)
            update = self._ranks.sum(update)
        return hidden, self._coded(hidden, update, self.weight, self.epsilon, coding)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.{kind}": self.shape for kind, _ in self.named_parameters()}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        kind = part.rpartition(".")[2]
        target = self.get_parameter(kind).narrow(0, first_row, tensor.shape[0])
        tensor = tensor.to(target)
        target.copy_((tensor + self.spec.offset) * self.gain if kind == "weight" else tensor)


def _is_on_cpu(build: BuildOptions) -> bool:
    return build.device.type == "cpu"


def _divide_by_length(x: Tensor, floor: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + floor^2)` along the last dimension, in float32.

    With `floor = sqrt(width * epsilon)` this is a root-mean-square norm over sqrt(width), in half as many operations as
    `F.rms_norm` takes on a CPU.
    """
    length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    return torch.div(x, length.hypot_(floor))


class HeadNorm(_NormWeights):
    """Normalises each head of queries and keys, `[T, heads + kv_heads, head_dim]`, in one pass and in float32."""

    def __init__(self, spec: QueryKeyNormSpec, attention: AttentionSpec, build: BuildOptions) -> None:
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

    def __init__(self, spec: QueryKeyNormSpec, attention: AttentionSpec, build: BuildOptions) -> None:
        super().__init__()
        self.heads = attention.heads
        self.q_norm = Norm(spec.norm, attention.heads * attention.head_dim, "q_norm", build)
        self.k_norm = Norm(spec.norm, attention.kv_heads * attention.head_dim, "k_norm", build)

    def forward(self, query_key: Tensor) -> Tensor:
        query, key = query_key[:, : self.heads], query_key[:, self.heads :]
        rows = torch.cat((self.q_norm(query.flatten(1)), self.k_norm(key.flatten(1))), -1)
        return rows.view(query_key.shape)

    def of_query_and_key(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Weights of queries and of keys, each `[heads * head_dim]`, and biases."""
        return (self.q_norm.weight, self.k_norm.weight), (self.q_norm.bias, self.k_norm.bias)


class SharedRowNorm(_NormWeights):
    """The norm of whole rows of which a rank has some heads: ranks exchange the lengths of their parts."""

    def __init__(self, spec: QueryKeyNormSpec, attention: AttentionSpec, build: BuildOptions) -> None:
        super().__init__(build.path)
        self.spec = spec.norm
        self._copies = attention.copies
        self._ranks = build.ranks
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


def make_query_key_norm(spec: QueryKeyNormSpec, attention: AttentionSpec, build: BuildOptions) -> nn.Module:
    if spec.scope != "row":
        return HeadNorm(spec, attention, build)
    return (RowNorm if build.ranks.size == 1 else SharedRowNorm)(spec, attention, build)
