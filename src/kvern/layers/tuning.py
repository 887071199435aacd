"""Choosing how linear layers and experts multiply, by timing what its method offers over the model's own weights."""

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvern.errors import ConfigError, in_a_line
from kvern.layers.embedding import Embedding
from kvern.layers.experts import Experts
from kvern.layers.latent_attention import LatentExpansion
from kvern.layers.linear import Weighted
from kvern.layers.linear_method import CodesProduct, LinearMethod, Product

logger = logging.getLogger("kvern")

Time = Callable[[list[Callable[[], object]]], float]

TIMED_LAYERS = 8
"""Bytes of weights of layers alike that are timed together, so that no weight stays in the L2 cache."""
TIMED_ROWS = 1024
"""The most bytes of weights that are timed together, unless one layer has more; for many rows caches save little."""

MOST_OFF = 0.1
"""The share of their size by which results may differ from PyTorch's: with rows as codes they are off by 3 to 4 %."""

Prepare = Callable[..., Callable[[], object]]
"""Makes what is timed of the inputs."""


class TimedLayer(NamedTuple):
    """One of those alike, with what `inputs` makes for so many rows of any of them."""

    name: str
    inputs: Callable[[int], tuple[Tensor, ...]]
    candidates: Callable[[], Mapping[int, Mapping[Hashable, Prepare]]]
    choose: Callable[[int, Hashable], None]
    plain: Callable[..., Tensor]
    """PyTorch's way to compute what candidates do; candidate None, if there is one, is PyTorch's too."""
    work: Callable[[int], tuple[float, float]]
    """The bytes that so many rows move at least, and their floating-point operations."""
    outputs: int
    """Numbers in a row of the result."""
    product: Callable[[Tensor], Tensor] | None = None
    """The product in the way that was chosen; None: experts, whose kernels are all the project's own."""


def tune(model: nn.Module, time: Time, known: Mapping[str, object], *, compare: bool = False) -> dict[str, object]:
    """Choose for every kind of linear layer, and of experts. Returns what was timed because it was not `known`.

    `time` runs the calls it is given, of one product over the weights of different layers, and tells how long. Keys and
    values of what is known are plain, to be kept in a file. A candidate that does not run is left out, with a warning
    that is repeated whenever the choice is known; if none of a choice runs, the first one's error is raised. What has
    no alternative is not timed. `compare`: also left out is what computes other numbers than PyTorch. Raises
    ConfigError if all do.
    """
    timed: dict[str, object] = {}
    broken: dict[str, str] = {}
    for key, alike in timed_layers(model).items():
        offers = [layer.candidates() for layer in islice(alike, TIMED_LAYERS)]
        for rows, candidates in offers[0].items():
            choice, reasons = _plain(known.get(f"{key}, {rows} rows", ()))
            if len(candidates) == 1:
                choice, reasons = next(iter(candidates)), {}
            if choice not in candidates:
                inputs = alike[0].inputs(rows)
                sampled = offers[: max(1, TIMED_ROWS // rows)]
                ways = {candidate: [offer[rows][candidate] for offer in sampled] for candidate in candidates}
                expected = _expected(alike[0], candidates, inputs) if compare else None
                choice, reasons = _fastest(ways, inputs, time, expected, f"{alike[0].name}, {rows} rows")
                timed[f"{key}, {rows} rows"] = {"choice": choice, "left out": reasons} if reasons else choice
            broken = {f"{alike[0].name}, {rows} rows: {name}": reason for name, reason in reasons.items()} | broken
            for layer in alike:
                layer.choose(rows, choice)
    for name, reason in broken.items():
        logger.warning("a way to multiply does not work here and is left out (%s): %s", name, reason)
    return timed


def _expected(layer: TimedLayer, candidates: Mapping[Hashable, Prepare], inputs: tuple[Tensor, ...]) -> Tensor | None:
    """PyTorch's result, with which those of candidates are compared; None, with a warning: there is none."""
    try:
        found = candidates[None](*inputs)() if None in candidates else layer.plain(*inputs)
        assert isinstance(found, Tensor)
        if not found.isfinite().all():
            raise ArithmeticError("they are not finite")
    except Exception as error:  # no memory, or something that it cannot compute on this card
        logger.warning("numbers of %s are not compared with PyTorch's: %s", layer.name, in_a_line(error))
        return None
    return found


def _fastest(
    candidates: Mapping[Hashable, list[Prepare]],
    inputs: tuple[Tensor, ...],
    time: Time,
    expected: Tensor | None,
    name: str,
) -> tuple[Hashable, dict[str, str]]:
    """The candidate whose calls take least, and why others do not run: what fits depends on device, shape and dtype."""
    durations: dict[Hashable, float] = {}
    errors: dict[Hashable, Exception] = {}
    for candidate, ways in candidates.items():
        try:
            if expected is not None and candidate is not None:
                _check(ways[0](*inputs)(), expected)
            durations[candidate] = time([prepare(*inputs) for prepare in ways])
        except Exception as error:  # of a compiler, its launcher or the device: there is no common type
            errors[candidate] = error
    if not durations:
        first = next(iter(errors.values()))
        if expected is None:
            raise first
        reason = f"no way to multiply works here ({name}: {in_a_line(first)})"
        raise ConfigError(f"{reason}: set triton_kernels to False") from first
    reasons = {str(way): (str(error) or type(error).__name__).splitlines()[0] for way, error in errors.items()}
    return min(durations, key=lambda candidate: durations[candidate]), reasons


def _check(found: object, expected: Tensor) -> None:
    """Raises ArithmeticError for results that are not PyTorch's."""
    assert isinstance(found, Tensor)
    if torch.equal(found, expected):  # all may be 0
        return
    size = torch.linalg.vector_norm(expected, dtype=torch.float32)
    off = float(torch.linalg.vector_norm(found - expected, dtype=torch.float32) / size)
    if not off <= MOST_OFF:  # nor for NaN
        raise ArithmeticError(f"its numbers are off by {off:.2g} of the size of PyTorch's")


def _plain(stored: object) -> tuple[Hashable, dict[str, str]]:
    """A candidate as it was before it was kept in a file, and why others were left out; anything else is none."""
    reasons: dict[str, str] = {}
    if isinstance(stored, dict):
        if isinstance(left_out := stored.get("left out"), dict):
            reasons = {str(name): str(reason) for name, reason in left_out.items()}
        stored = stored.get("choice", ())
    if isinstance(stored, list):
        stored = tuple(item for item in stored if isinstance(item, Hashable))
    return stored if isinstance(stored, Hashable) else (), reasons


def timed_layers(model: nn.Module) -> dict[str, list[TimedLayer]]:
    """The layers and experts that may multiply in several ways, by the form, shape and dtype of their weights."""
    kinds: dict[str, list[TimedLayer]] = {}
    for layer in model.modules():
        if isinstance(layer, Weighted) and not isinstance(layer, Embedding | LatentExpansion):
            for method in layer.method.methods():
                shape = method.shape
                timed = _timed_method(method, None if method is not layer.method else layer.bias)
                kinds.setdefault(f"{method.name}, {shape.outputs} x {shape.inputs}, {shape.dtype}", []).append(timed)
        elif isinstance(layer, Experts):
            spec = layer.spec
            key = f"experts, {layer.name}, {spec.top_k} of {spec.experts}, {spec.width} x {layer.hidden_size}"
            kinds.setdefault(f"{key}, {layer.dtype}", []).append(_timed_experts(layer))
    return kinds


def _timed_method(method: LinearMethod, bias: Tensor | None) -> TimedLayer:
    def inputs(rows: int) -> tuple[Tensor, ...]:
        """Rows whose results are the same by products that round them and by those that do not."""
        shape = method.shape
        return (method.rounded(torch.randn(rows, shape.inputs, dtype=shape.dtype, device=shape.device)),)

    def candidates() -> Mapping[int, Mapping[Hashable, Prepare]]:
        return {
            rows: {candidate: partial(_multiplied, product, bias) for candidate, product in products.items()}
            for rows, products in method.candidates().items()
        }

    def work(rows: int) -> tuple[float, float]:
        shape = method.shape
        moved = rows * (shape.inputs + shape.outputs) * shape.dtype.itemsize
        return bytes_of(method) + moved, 2 * rows * shape.inputs * shape.outputs

    def plain(x: Tensor) -> Tensor:
        return method.multiply_plain(x, bias)

    def product(x: Tensor) -> Tensor:
        return method.multiply(x, bias)

    return TimedLayer(method.name, inputs, candidates, method.choose, plain, work, method.shape.outputs, product)


def _multiplied(product: Product, bias: Tensor | None, x: Tensor) -> Callable[[], object]:
    """The product of rows that are codes already, if it multiplies codes: norms and activations make most of them."""
    if isinstance(product, CodesProduct):
        return partial(product.multiply_codes, product.coding(x), bias)
    return partial(product, x, bias)


def _timed_experts(experts: Experts) -> TimedLayer:
    def candidates() -> Mapping[int, Mapping[Hashable, Prepare]]:
        return {
            tokens: {candidate: partial(partial, way) for candidate, way in ways.items()}
            for tokens, ways in experts.candidates().items()
        }

    def work(tokens: int) -> tuple[float, float]:
        spec, size = experts.spec, experts.hidden_size
        read = 1 - (1 - spec.top_k / spec.experts) ** tokens  # the share of experts that have tokens, on average
        multiplied = tokens * spec.top_k * spec.width * size * (3 if spec.gated else 2)
        return bytes_of(experts) * read + 2 * tokens * size * experts.dtype.itemsize, 2 * multiplied

    name, inputs = f"experts, {experts.name}", partial(_routed, experts)
    return TimedLayer(name, inputs, candidates, experts.choose, experts.one_by_one, work, experts.hidden_size)


def bytes_of(module: nn.Module) -> int:
    """The bytes of a module's weights."""
    return sum(parameter.nbytes for parameter in module.parameters())


def _routed(experts: Experts, tokens: int) -> tuple[Tensor, ...]:
    """Tokens, each with experts of its own, as a router spreads them: rows, weights, `topk_ids`."""
    spec, device = experts.spec, experts.expert_counts.device
    x = torch.randn(tokens, experts.hidden_size, dtype=experts.dtype, device=device)
    weights, topk_ids = torch.rand(tokens, spec.experts, device=device).topk(spec.top_k)
    return x, weights, experts.share.here(topk_ids.int())
