"""Norms and MLPs of kvern that compute what a module of transformers computes, found by trying them on random rows.

A module is tried in float32, with random weights in the place of its own, and the matrices of an MLP are small there:
what a module computes does not depend on their sizes.
"""

import copy
from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers.ops import ACTIVATIONS
from kvern.spec.model import Activation, MlpSpec, NormSpec

AGREEMENT = 1e-6
"""The largest difference of results in float32, as a share of the largest of them."""
ROWS = 5
HIDDEN = 12
WIDTH = 20
SPREADS = (1.0, 1e-3, 30.0, 1e3)
"""Rows of the smallest spread show a norm's epsilon, those of the largest ones show limits."""
LARGEST_EPSILON = 1e-2


def has_hooks(module: nn.Module) -> bool:
    """Returns whether anything is called before or after a module or one of its parts."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


class MlpLikeness(NamedTuple):
    """An MLP like `spec`, and the names of its matrices; `halves`: a single matrix has both, the gate first or last."""

    spec: MlpSpec
    gate: str
    up: str
    down: str
    halves: tuple[str, str] | None = None


def like_norm(module: nn.Module) -> NormSpec | None:
    """The norm that computes what `module` does over rows as wide as its weight; None: none of kvern's does."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or weight.dim() != 1 or own.keys() - {"weight", "bias"} or list(module.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    tried = copy.copy(module)
    tried._parameters = {
        name: nn.Parameter(torch.randn(weight.shape, generator=generator), requires_grad=False) for name in own
    }
    tried._parameters |= {name: None for name, value in module._parameters.items() if value is None}
    rows = torch.cat([torch.randn(ROWS, len(weight), generator=generator) * spread for spread in SPREADS])
    found = _result(tried, rows)
    if found is None:
        return None
    given = tried._parameters["weight"], tried._parameters.get("bias")
    return next((spec for spec in _norms(module) if agrees(found, _norm(spec, rows, *given))), None)


def _norms(module: nn.Module) -> Iterator[NormSpec]:
    """The norms with an epsilon that is among the module's settings."""
    numbers = [value for value in vars(module).values() if isinstance(value, float) and 0 < value <= LARGEST_EPSILON]
    bias = module._parameters.get("bias") is not None
    for epsilon in dict.fromkeys(numbers):
        for kind in ("rms", "layer"):
            for offset in (0.0, 1.0):
                yield NormSpec("rms" if kind == "rms" else "layer", epsilon, offset, bias=bias)


def _norm(spec: NormSpec, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    if spec.kind == "layer":
        return F.layer_norm(rows, weight.shape, weight + spec.offset, bias, spec.epsilon)
    normal = F.rms_norm(rows, weight.shape, weight + spec.offset, spec.epsilon)
    return normal if bias is None else normal + bias


def like_mlp(module: nn.Module) -> MlpLikeness | None:
    """The MLP that computes what `module` does, whose parts with weights are linear layers; None: none of kvern's."""
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    own = sum(parameter.numel() for parameter in module.parameters())
    if len(linears) not in (2, 3) or own != sum(p.numel() for child in linears.values() for p in child.parameters()):
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.randn(1, ROWS, HIDDEN, generator=generator) * spread for spread in SPREADS], 1)
    for likeness in _mlps(linears):
        tried = copy.copy(module)
        tried._modules = dict(module._modules)
        for name, shape in _shapes(likeness).items():
            tried._modules[name] = _small(shape, linears[name].bias is not None, generator)
        found = _result(tried, rows)
        if found is None:
            continue
        for activation in get_args(Activation):
            if activation in ACTIVATIONS and agrees(found, _mlp(tried, likeness, activation, rows)):
                width = linears[likeness.down].in_features
                spec = MlpSpec(width, activation, likeness.spec.gated, linears[likeness.down].bias is not None)
                return likeness._replace(spec=spec)
    return None


def _mlps(linears: dict[str, nn.Linear]) -> Iterator[MlpLikeness]:
    """The ways in which the matrices can be those of an MLP, by their shapes; activations are yet to be found."""
    biases = {linear.bias is not None for linear in linears.values()}
    if len(biases) > 1:
        return
    shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    for up, down, *others in permutations(linears):
        width, hidden = shapes[up]
        if others and shapes[down] == (hidden, width) and shapes[others[0]] == (width, hidden):
            yield MlpLikeness(MlpSpec(width), others[0], up, down)
        if not others and shapes[down] == (hidden, width):
            yield MlpLikeness(MlpSpec(width, gated=False), "", up, down)
        if not others and shapes[down] == (hidden, width // 2) and width % 2 == 0:
            for halves in (("gate", "up"), ("up", "gate")):
                yield MlpLikeness(MlpSpec(width // 2), up, up, down, halves)


def _shapes(likeness: MlpLikeness) -> dict[str, tuple[int, int]]:
    """Small matrices, by name."""
    first = 2 * WIDTH if likeness.halves else WIDTH
    shapes = {likeness.up: (first, HIDDEN), likeness.down: (HIDDEN, WIDTH)}
    return shapes | ({likeness.gate: (first, HIDDEN)} if likeness.spec.gated else {})


def _small(shape: tuple[int, int], bias: bool, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(shape[1], shape[0], bias=bias, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / shape[1] ** 0.5)
    return linear


def _mlp(module: nn.Module, likeness: MlpLikeness, activation: Activation, rows: Tensor) -> Tensor:
    with torch.no_grad():
        down, up = module._modules[likeness.down], module._modules[likeness.up]
        assert down is not None and up is not None
        activate, first = ACTIVATIONS[activation], up(rows)
        if not likeness.spec.gated:
            return _called(down, activate(first))
        if likeness.halves is not None:
            parts = dict(zip(likeness.halves, first.chunk(2, -1), strict=True))
            return _called(down, activate(parts["gate"]) * parts["up"])
        gate = module._modules[likeness.gate]
        assert gate is not None
        return _called(down, activate(gate(rows)) * first)


def like_embedding(module: nn.Embedding) -> float | None:
    """The factor by which `module` multiplies the rows of its table; None: it does something else."""
    tried = copy.copy(module)
    table = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0))
    tried._parameters = {**module._parameters, "weight": nn.Parameter(table, requires_grad=False)}
    found = _result(tried, torch.arange(ROWS))
    if found is None or found.shape != table.shape:
        return None
    factor = float((found / table).median())
    return factor if agrees(found, table * factor) else None


def _called(module: nn.Module, *given: Tensor) -> Tensor:
    result: Tensor = module(*given)
    return result


def _result(module: nn.Module, given: Tensor) -> Tensor | None:
    """Returns what a module returns; None: it raises something, or returns no tensor."""
    try:
        with torch.no_grad():
            found = module(given)
    except Exception:  # whatever a module raises that is not called so
        return None
    return found if isinstance(found, Tensor) else None


def agrees(found: Tensor, other: Tensor) -> bool:
    """Returns whether results are equal but for rounding, row by row: small rows count as large ones do."""
    if found.shape != other.shape:
        return False
    off = (found - other).abs().amax(-1) / other.abs().amax(-1).clamp_min(1e-30)
    return bool((off <= AGREEMENT).all())
