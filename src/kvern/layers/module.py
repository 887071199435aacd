"""The base of kvern's modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvern.layers.halves import Update, joined


class Module(nn.Module):
    """A module whose call is its `forward`, without hooks, and whose parts are ordinary attributes besides.

    Hooks and PyTorch's own search for parts and parameters cost a step of a small model some 5 % of its time.
    """

    def __init_subclass__(cls, **fields: Any) -> None:
        super().__init_subclass__(**fields)
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self._parameters or name in self._buffers or name in self._modules:
            del self.__dict__[name]
        super().__delattr__(name)


class Identity(Module):
    """The module in the place of a norm that a model does not have."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self._add = add

    def forward(self, x: Tensor) -> Tensor:
        return x

    def after(self, hidden: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """The residual with `update` added, twice: there is no norm."""
        hidden, update = joined(hidden, update)
        if update is not None:
            hidden = self._add(hidden, update)
        return hidden, hidden
