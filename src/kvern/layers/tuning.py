"""Choosing how each linear layer multiplies, by timing what its method offers over the model's own weights."""

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from kvern.layers.embedding import Embedding
from kvern.layers.linear import Weighted
from kvern.layers.linear_method import CodesProduct, LinearMethod, Product

logger = logging.getLogger("kvern")

Time = Callable[[list[Callable[[], object]]], float]

TIMED_LAYERS = 8
"""Of those alike: enough that no weight stays in the L2 cache."""
TIMED_ROWS = 1024
"""Of all timed layers together, but for one: arithmetic on many rows takes longer than a cache could save."""


def tune(model: nn.Module, time: Time, known: Mapping[str, object]) -> dict[str, object]:
    """Choose for every kind of linear layer of the model. Returns what was timed because it was not `known`.

    `time` runs the calls it is given, of one product over the weights of different layers, and tells how long. Keys and
    values of what is known are plain, to be kept in a file. A candidate that does not run is left out, with a warning;
    if none of a choice does, the first one's error is raised. What has no alternative is not timed.
    """
    timed: dict[str, object] = {}
    broken: dict[str, Exception] = {}
    for key, alike in _alike(model).items():
        method = alike[0][0]
        shape = method.shape
        offers = [(method.candidates(), bias) for method, bias in islice(alike, TIMED_LAYERS)]
        for rows, candidates in offers[0][0].items():
            alone = len(candidates) == 1
            choice = next(iter(candidates)) if alone else _plain(known.get(f"{key}, {rows} rows", ()))
            if choice not in candidates:
                x = torch.randn(rows, shape.inputs, dtype=shape.dtype, device=shape.device)
                timed_layers = offers[: max(1, TIMED_ROWS // rows)]
                products = {
                    candidate: [(offer[rows][candidate], bias) for offer, bias in timed_layers]
                    for candidate in candidates
                }
                choice, errors = _fastest(products, x, time)
                broken = {f"{method.name}, {rows} rows: {name}": error for name, error in errors.items()} | broken
                timed[f"{key}, {rows} rows"] = choice
            for method, _ in alike:
                method.choose(rows, choice)
    for name, error in broken.items():
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("a way to multiply does not work here and is left out (%s): %s", name, reason)
    return timed


def _fastest(
    candidates: Mapping[Hashable, list[tuple[Product, Tensor | None]]], x: Tensor, time: Time
) -> tuple[Hashable, dict[Hashable, Exception]]:
    """The candidate whose products, with their biases, take least, and why others do not run.

    What fits depends on device, shape and dtype.
    """
    durations: dict[Hashable, float] = {}
    errors: dict[Hashable, Exception] = {}
    for candidate, products in candidates.items():
        try:
            durations[candidate] = time([_call(product, x, bias) for product, bias in products])
        except Exception as error:  # of a compiler, its launcher or the device: there is no common type
            errors[candidate] = error
    if not durations:
        raise next(iter(errors.values()))
    return min(durations, key=lambda candidate: durations[candidate]), errors


def _call(product: Product, x: Tensor, bias: Tensor | None) -> Callable[[], object]:
    """Of rows that are codes already, if it multiplies such: norms and activations make most of them."""
    if isinstance(product, CodesProduct):
        return partial(product.multiply_codes, product.coding(x), bias)
    return partial(product, x, bias)


def _plain(stored: object) -> Hashable:
    """A candidate as it was before it was kept in a file; anything else is none."""
    if isinstance(stored, list):
        return tuple(item for item in stored if isinstance(item, Hashable))
    return stored if isinstance(stored, Hashable) else ()


def _alike(model: nn.Module) -> dict[str, list[tuple[LinearMethod, Tensor | None]]]:
    """Weights that are multiplied by, are stored alike and have one shape, each with its bias."""
    kinds: dict[str, list[tuple[LinearMethod, Tensor | None]]] = {}
    for layer in model.modules():
        if not isinstance(layer, Weighted) or isinstance(layer, Embedding):
            continue
        for method in layer.method.methods():
            shape = method.shape
            key = f"{method.name}, {shape.outputs} x {shape.inputs}, {shape.dtype}"
            kinds.setdefault(key, []).append((method, None if method is not layer.method else layer.bias))
    return kinds
