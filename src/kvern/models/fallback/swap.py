"""Parts of a model of transformers are replaced by kvern's, where these compute the same."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvern.layers.build import Build
from kvern.layers.linear_format import INT8_HEAD, LinearFormat, LinearMethods, linear_methods
from kvern.layers.linear_method import LinearMethod
from kvern.layers.unquantized import Unquantized
from kvern.models.fallback.likeness import has_hooks, like_embedding, like_mlp, like_norm
from kvern.models.fallback.parts import Piece, SwappedEmbedding, SwappedLinear, SwappedMlp, SwappedNorm, Switch
from kvern.plugins import imported

logger = logging.getLogger("kvern")

NARROW = 8
"""A matrix with so many times more inputs than outputs is not quantized: it may choose experts."""
LINEAR = "linear layers"
EMBEDDING = "embeddings"


class Swaps:
    """The parts of a model that kvern computes, by kind: each kind can be switched off alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        build: Build,
        unquantized: LinearFormat | None,
        quantization: str | None,
        int8_head: bool = False,
    ) -> None:
        """Replaces parts of `model`, whose weights are loaded; what is replaced gives its memory back.

        `unquantized`, `quantization` and `int8_head`: as in `LoadOptions`. Raises ConfigError.
        """
        unquantized = unquantized or Unquantized()
        self._model = model
        methods = linear_methods({}, unquantized, quantization)
        if int8_head:  # embeddings are replaced only where they are the head
            methods = imported(INT8_HEAD)(methods, unquantized, tied=True)
        self._build = replace(build, linear=methods)
        self._plain = LinearMethods(unquantized)
        self.is_quantized = quantization is not None or int8_head
        self._switches: dict[str, Switch] = {}
        self._head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        self._shared = {found for found, count in counts.items() if count > 1}
        with torch.no_grad():
            self._table = self._swap_embedding()
            self._swap_children(model, "")
        if int8_head and not isinstance(model.get_output_embeddings(), SwappedLinear):  # type: ignore[no-untyped-call]
            logger.warning("the output layer of %s stays plain: transformers computes it", model.config.model_type)

    @property
    def kinds(self) -> list[str]:
        """The kinds that kvern computes."""
        return [switch.kind for switch in self._switches.values() if switch.on]

    @property
    def needed(self) -> list[str]:
        """The kinds that stay kvern's: products with quantized weights, which would be made plain each time."""
        return [LINEAR] if self.is_quantized else []

    @property
    def multiplying(self) -> list[str]:
        """The kinds with products: where weights are quantized, rows may be rounded in them."""
        mlps = [module.switch.kind for module in self._model.modules() if isinstance(module, SwappedMlp)]
        return list(dict.fromkeys([LINEAR, *mlps]))

    @contextmanager
    def only(self, kinds: list[str]) -> Iterator[None]:
        """Switches off all other kinds for a while."""
        before = self.kinds
        self._switch_on(kinds)
        try:
            yield
        finally:
            self._switch_on(before)

    def settle(self, kinds: list[str]) -> None:
        """Leaves these kinds to kvern, and gives all others back to transformers."""
        self._switch_on(kinds)
        for module in list(self._model.modules()):
            for name, child in list(module.named_children()):
                if (
                    isinstance(child, SwappedLinear | SwappedNorm | SwappedMlp | SwappedEmbedding)
                    and not child.switch.on
                ):
                    setattr(module, name, self._restored(child))

    def _switch_on(self, kinds: list[str]) -> None:
        for switch in self._switches.values():
            switch.on = switch.kind in kinds

    def _restored(self, part: SwappedLinear | SwappedNorm | SwappedMlp | SwappedEmbedding) -> nn.Module:
        if isinstance(part, SwappedLinear):
            return _plain_linear(part.weight, part.bias)
        if isinstance(part, SwappedEmbedding):
            part.original.weight = nn.Parameter(part.weight, requires_grad=False)
        if isinstance(part, SwappedMlp):
            for name, piece in list(part.original.named_children()):
                if isinstance(piece, Piece):
                    setattr(part.original, name, _plain_linear(piece.weight, piece.bias))
        return part.original

    def _switch(self, kind: str) -> Switch:
        return self._switches.setdefault(kind, Switch(kind))

    def _swap_embedding(self) -> LinearMethod | None:
        """Lets a table and a head that share a weight share kvern's, which is returned."""
        head, table = self._head, self._model.get_input_embeddings()
        if not isinstance(table, nn.Embedding) or type(head) is not nn.Linear or head.weight is not table.weight:
            return None
        factor = like_embedding(table)
        if factor is None or table.weight.dtype != self._build.dtype or has_hooks(table) or has_hooks(head):
            return None
        swapped = SwappedEmbedding(table, factor, self._build, self._switch(EMBEDDING))
        self._model.set_input_embeddings(swapped)
        return swapped.table.method

    def _swap_children(self, module: nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            if isinstance(child, SwappedEmbedding | Piece):
                continue
            found = self._swapped(child, name, replace(self._build, path=path))
            if found is not None:
                setattr(module, name, found)
            if found is None:
                self._swap_children(child, f"{path}.{name}" if path else name)

    def _swapped(self, module: nn.Module, name: str, build: Build) -> nn.Module | None:
        """kvern's module in the place of this one; None: it stays, and its parts are looked at."""
        own = list(module.parameters())
        if has_hooks(module):
            return None
        if module is not self._head and any(id(parameter) in self._shared for parameter in own):
            return None
        if type(module) is nn.Linear:
            return self._linear(module.weight, module, name, build)
        if type(module) is Conv1D:
            return self._linear(module.weight.t(), module, name, build)
        if {parameter.dtype for parameter in own} != {build.dtype}:
            return None
        if (norm := like_norm(module)) is not None:
            return SwappedNorm(module, norm, build, self._switch(type(module).__name__))
        if (mlp := like_mlp(module)) is not None:
            build = replace(build, path=build.name(name))
            return SwappedMlp(module, mlp, build, self._switch(type(module).__name__), self._switch(LINEAR))
        return None

    def _linear(self, weight: Tensor, module: nn.Module, name: str, build: Build) -> nn.Module | None:
        """A linear layer in the place of one with this `weight [outputs, inputs]`, which is freed."""
        method = None
        if module is self._head:
            method = self._table
            if method is None and id(module.weight) in self._shared:
                return None
            name, build = "lm_head", replace(build, path="")
        elif NARROW * weight.shape[0] < weight.shape[1]:
            build = replace(build, linear=self._plain)
        bias = module.get_parameter("bias") if module.bias is not None else None
        found = SwappedLinear(weight, bias, name, build, self._switch(LINEAR), method)
        module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return found


def _plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
