"""The tensors of an object: those that are found from it, through what it is made of."""

import gc
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def parts_of(value: Any) -> Mapping[Any, Any]:
    """The parts of a value, if it may hold tensors of a model."""
    match value:
        case dict():
            return value
        case list() | tuple():
            return dict(enumerate(value))
        case partial():
            return {"func": value.func, "args": value.args, "keywords": value.keywords}
        case MethodType():
            return {"self": value.__self__}
        case FunctionType():
            return {index: cell.cell_contents for index, cell in enumerate(value.__closure__ or ()) if _is_set(cell)}
    is_ours = type(value).__module__.startswith("kvern.") or isinstance(value, nn.Module)
    return vars(value) if is_ours and hasattr(value, "__dict__") and not isinstance(value, type) else {}


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a value, some of them perhaps several times."""
    known: dict[int, Any] = {}  # also holds them: parts may be made in passing
    found = [value]
    while found:
        value = found.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in known:
            known[id(value)] = value
            found += parts_of(value).values()


def all_tensors() -> list[Tensor]:
    """Returns the tensors of this process that the garbage collector looks at."""
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
