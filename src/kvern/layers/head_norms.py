"""Norms over queries and keys: of each head, or of all heads together, on one rank or several."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers import norm
from kvern.layers.build_options import BuildOptions
from kvern.layers.loadable import copy_shares
from kvern.layers.module import Module
from kvern.layers.norm import Norm, NormWeights, divide_by_length
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import QueryKeyNormSpec


class HeadNorm(NormWeights):
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
        divides = spec.norm.kind == "rms" and norm.is_on_cpu(build) and not build.kernels
        self.gain = math.sqrt(attention.head_dim) if divides else 1.0
        self.normalize = self._divide if divides else self._rms if spec.norm.kind == "rms" else self._layer

    def _divide(self, x: Tensor) -> Tensor:
        return divide_by_length(x, self.floor)

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


class SharedRowNorm(NormWeights):
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
    """The norm of a specification; a row of which ranks have parts has one of its own."""
    if spec.scope != "row":
        return HeadNorm(spec, attention, build)
    return (RowNorm if build.ranks.size == 1 else SharedRowNorm)(spec, attention, build)
