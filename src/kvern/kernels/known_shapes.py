"""Results of PyTorch's functions on tensors without memory: their shapes and dtypes, which is all that they have.

PyTorch computes them too, through modules that take seconds to import and milliseconds a call. The functions here are
those that layers call most; all others are left to PyTorch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _alike(*given: Any, out: Tensor | None = None, **_: Any) -> Tensor:
    """A result of all given tensors, entry by entry."""
    if out is not None:
        return out
    first, *others = (item for item in given if isinstance(item, Tensor))
    shape, dtype = list(first.shape), first.dtype
    for other in others:
        sizes = list(other.shape)
        longer = max(len(shape), len(sizes))
        pairs = zip([1] * (longer - len(shape)) + shape, [1] * (longer - len(sizes)) + sizes, strict=True)
        shape, dtype = [max(pair) if 0 not in pair else 0 for pair in pairs], torch.promote_types(dtype, other.dtype)
    return torch.empty(shape, dtype=dtype, device=first.device)


def _in_place(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)


def _product_of_codes(x: Tensor, other: Tensor, *_: Any, out_dtype: torch.dtype = torch.int32, **__: Any) -> Tensor:
    return torch.empty(x.shape[0], other.shape[1], dtype=out_dtype, device=x.device)


def _bmm(x: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    shape = *x.shape[:2], other.shape[2]
    return torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out


def _embedding(ids: Tensor, table: Tensor, **_: Any) -> Tensor:
    return torch.empty(*ids.shape, table.shape[1], dtype=table.dtype, device=table.device)


def _index_select(x: Tensor, dimension: int, index: Tensor) -> Tensor:
    shape = list(x.shape)
    shape[dimension] = index.numel()
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _arange(*limits: int, dtype: torch.dtype = torch.int64, device: torch.device) -> Tensor:
    return torch.empty(len(range(*limits)), dtype=dtype, device=device)


def _random(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)


def _topk(x: Tensor, count: int, dim: int = -1, **_: Any) -> Any:
    shape = *x.shape[:-1], count
    best, places = (torch.empty(shape, dtype=kind, device=x.device) for kind in (x.dtype, torch.int64))
    return torch.return_types.topk((best, places))


SHAPES: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        [
            *(getattr(Tensor, name) for name in ("add", "sub", "mul", "div", "cos", "sin", "neg", "sigmoid", "square")),
            *(getattr(Tensor, name) for name in ("__eq__", "masked_fill", "floor", "log1p", "exp", "clamp", "tanh")),
            *(torch.add, torch.mul, torch.minimum, torch.empty_like, F.relu, F.gelu, F.silu, F.softplus, F.layer_norm),
        ],
        _alike,
    ),
    **dict.fromkeys(
        [getattr(Tensor, name) for name in ("mul_", "div_", "tanh_", "add_", "index_copy_", "fill_", "zero_")],
        _in_place,
    ),
    F.linear: _linear,
    torch.bmm: _bmm,
    torch._scaled_mm: _product_of_codes,
    torch._int_mm: _product_of_codes,
    F.embedding: _embedding,
    Tensor.index_select: _index_select,
    torch.arange: _arange,
    torch.rand: _random,
    torch.randn: _random,
    torch.cat: _cat,
    torch.stack: _stack,
    Tensor.topk: _topk,
}


class KnownShapes(TorchFunctionMode):
    """A mode in which functions return tensors without memory, with known shapes."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        make, options = SHAPES.get(function), options or {}
        if make is None:
            return function(*arguments, **options)
        first = arguments[0]
        if isinstance(first, list | tuple):
            first = first[0]
        device = first.device if isinstance(first, Tensor) else options.get("device")
        known = device is not None and device.type == "meta"
        return make(*arguments, **options) if known else function(*arguments, **options)
