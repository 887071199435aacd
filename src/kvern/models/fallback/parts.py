"""Parts of a model of transformers that kvern computes: linear layers, norms, MLPs and embeddings.

Each part stands in the place of a module of transformers and keeps it. While its `Switch` is off it computes what that
module does, with the weights as they are stored here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from kvern.layers.build import Build
from kvern.layers.embedding import Embedding
from kvern.layers.linear import Linear
from kvern.layers.linear_method import LinearMethod
from kvern.layers.mlp import make_mlp
from kvern.layers.norm import Norm
from kvern.models.fallback.likeness import MlpLikeness
from kvern.spec.model import NormSpec


@dataclass
class Switch:
    """Parts of one kind, as "LlamaRMSNorm", which kvern computes while it is `on`."""

    kind: str
    on: bool = True


class SwappedLinear(nn.Module):
    """A linear layer `x [..., inputs] -> [..., outputs]`; `method`: it shares the weight of another part.

    `weight` and `bias` are copied. `name`: the layer's in the path of `build`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        name: str,
        build: Build,
        switch: Switch,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.switch = switch
        dtype = None if weight.dtype == build.dtype else weight.dtype
        shape = self.in_features, {name: self.out_features}
        self.linear = Linear(*shape, build, bias=bias is not None, method=method, dtype=dtype)
        fill(self.linear, {name: (weight, bias)})

    @property
    def weight(self) -> Tensor:
        """The plain weight, which some modules ask for: `[outputs, inputs]`."""
        return self.linear.method.dequantize()

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if not self.switch.on:
            return F.linear(x, self.weight, self.linear.bias)
        out: Tensor = self.linear(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)


class Piece(nn.Module):
    """A linear layer whose weight is a part of a larger matrix; it is called where that is not multiplied whole.

    `parts`: its outputs, in their order, among those of `whole`. `switch`: that of linear layers.
    """

    def __init__(self, whole: Linear, parts: list[range], switch: Switch) -> None:
        super().__init__()
        self._whole = [whole]  # in a list, or it would be this module's part as well
        self._parts = parts
        self._switch = switch

    @property
    def weight(self) -> Tensor:
        """The plain weight `[outputs, inputs]`."""
        return self._taken(self._whole[0].method.dequantize(), 0)

    @property
    def bias(self) -> Tensor | None:
        bias = self._whole[0].bias
        return None if bias is None else self._taken(bias, 0)

    def _taken(self, whole: Tensor, along: int) -> Tensor:
        return torch.cat([whole.narrow(along, part.start, len(part)) for part in self._parts], along)

    def forward(self, x: Tensor) -> Tensor:
        if not self._switch.on:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = self._whole[0](x.reshape(-1, x.shape[-1]))
        return self._taken(out, 1).view(*x.shape[:-1], -1)


class SwappedNorm(nn.Module):
    """A norm over the last dimension."""

    def __init__(self, original: nn.Module, spec: NormSpec, build: Build, switch: Switch) -> None:
        super().__init__()
        self.original, self.switch = original, switch
        own = {name: value for name, value in original.named_parameters(recurse=False) if value is not None}
        self.width = len(own["weight"])
        self.norm = Norm(spec, self.width, "norm", build)
        for name, value in own.items():
            self.norm.load(f"norm.{name}", value.detach())

    @property
    def weight(self) -> Tensor:
        """The weight as the module that was here has it."""
        weight: Tensor = self.original.get_parameter("weight")
        return weight

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        if others or named or not self.switch.on:
            found: Tensor = self.original(x, *others, **named)
            return found
        out: Tensor = self.norm(x.reshape(-1, self.width))
        return out.view(x.shape)


class SwappedMlp(nn.Module):
    """An MLP whose gate and up are one product; `original` has the pieces of it."""

    def __init__(
        self, original: nn.Module, likeness: MlpLikeness, build: Build, switch: Switch, linears: Switch
    ) -> None:
        super().__init__()
        self.original = original
        self.switch = switch
        self.linears = linears
        spec = likeness.spec
        width = spec.width
        first = original.get_submodule(likeness.up)
        last = _stored(original.get_submodule(likeness.down))
        self.hidden = len(last[0])
        self.mlp = make_mlp(self.hidden, spec, build)
        down = self.mlp.get_submodule("down_proj")
        whole = self.mlp.get_submodule("gate_up_proj" if spec.gated else "up_proj")
        assert isinstance(down, Linear) and isinstance(whole, Linear)
        gate, up = range(width), range(width, 2 * width)
        if not spec.gated:
            given = {"up_proj": _stored(first)}
            pieces = {likeness.up: [gate]}
        elif likeness.halves is None:
            given = {"gate_proj": _stored(original.get_submodule(likeness.gate)), "up_proj": _stored(first)}
            pieces = {likeness.gate: [gate], likeness.up: [up]}
        else:
            given = {f"{name}_proj": half for name, half in zip(likeness.halves, _halves(first), strict=True)}
            pieces = {likeness.up: [gate, up] if likeness.halves[0] == "gate" else [up, gate]}
        fill(whole, given)
        fill(down, {"down_proj": last})
        for name, parts in pieces.items():
            setattr(original, name, Piece(whole, parts, linears))
        setattr(original, likeness.down, Piece(down, [range(self.hidden)], linears))

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        if others or named or not self.switch.on:
            found: Tensor = self.original(x, *others, **named)
            return found
        out: Tensor = self.mlp(x.reshape(-1, self.hidden))
        return out.view(x.shape)


Stored = tuple[Tensor, Tensor | None]
"""The weight and the bias of a linear layer."""


def _stored(linear: nn.Module) -> Stored:
    assert isinstance(linear, nn.Linear)
    return linear.weight, linear.bias


def _halves(linear: nn.Module) -> list[Stored]:
    weight, bias = _stored(linear)
    biases = (None, None) if bias is None else bias.chunk(2)
    return list(zip(weight.chunk(2), biases, strict=True))


class SwappedEmbedding(nn.Module):
    """A table whose rows are looked up, and which a head multiplies by; `factor`: of what is looked up.

    `original` keeps no weight of its own.
    """

    def __init__(self, original: nn.Embedding, factor: float, build: Build, switch: Switch) -> None:
        super().__init__()
        self.original, self.switch = original, switch
        self.num_embeddings, self.embedding_dim = original.weight.shape
        self.padding_idx = original.padding_idx
        self.table = Embedding(self.num_embeddings, self.embedding_dim, factor, build)
        self.table.load("embed_tokens.weight", original.weight.detach())
        self.table.finish()
        original.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The plain table `[tokens, width]`."""
        return self.table.method.dequantize()

    def forward(self, ids: Tensor) -> Tensor:
        if not self.switch.on:
            found: Tensor = functional_call(self.original, {"weight": self.weight}, (ids,))
            return found
        rows: Tensor = self.table(ids.flatten())
        return rows.view(*ids.shape, -1)


def fill(linear: Linear, parts: Mapping[str, Stored]) -> None:
    """Loads weights and biases by name, and stores them as products want them; a shared weight is there already."""
    names = linear.parts()
    for name, (weight, bias) in parts.items():
        if f"{name}.weight" in names:
            linear.load(f"{name}.weight", weight.detach())
        if bias is not None:
            linear.load(f"{name}.bias", bias.detach())
    linear.finish()
