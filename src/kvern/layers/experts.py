"""The experts of a mixture: many gated MLPs, of which each token takes a few."""

import re
from abc import abstractmethod
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers.activation import ACTIVATIONS
from kvern.layers.linear_method import LinearMethod, LinearShape, Part
from kvern.layers.loadable import Loadable, copy_rows
from kvern.model_spec import MoeSpec

if TYPE_CHECKING:
    from kvern.layers.build import Build
    from kvern.layers.linear_format import LinearFormat

_EXPERT_PART = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.(\w+)")
_STACKED_PART = re.compile(r"experts\.(gate_up|down)_proj(?:_(\w+))?")


class Experts(Loadable):
    """Every expert's gate and up in one matrix `[2 * width, hidden]`, and its down `[hidden, width]`.

    `expert_counts [experts]` int64, on the device, holds how many tokens each expert has had since the model was built,
    those that pad a batch included. Routers made of kernels keep it; beside PyTorch's it stays zero. `waits`: the host
    may wait for the device to learn which rows are whose, as it may not among kernels.
    """

    expert_counts: Tensor

    def __init__(self, hidden_size: int, spec: MoeSpec, build: "Build") -> None:
        super().__init__(build.path)
        self.spec, self.hidden_size = spec, hidden_size
        self.activation = ACTIVATIONS[spec.activation]
        counts = torch.zeros(spec.experts, dtype=torch.int64, device=build.device)
        self.register_buffer("expert_counts", counts, persistent=False)
        self.waits = build.device.type == "cpu" or not build.kernels

    @abstractmethod
    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        """`x [T, hidden] -> [T, 2 * width]`."""

    @abstractmethod
    def down(self, expert: int, x: Tensor) -> Tensor:
        """`x [T, width] -> [T, hidden]`."""

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        """Sum `x [T, hidden]` through the experts `topk_ids [T, top_k]`, times `weights [T, top_k]`.

        `add [T, hidden]`, if given, is added to the sum.
        """
        out = (self._chosen if self.waits else self._all)(x, weights.to(x.dtype), topk_ids)
        return out if add is None else out + add

    def _chosen(self, x: Tensor, weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Each expert with its own rows, whose number the host waits for."""
        out = torch.zeros_like(x)
        order = topk_ids.flatten().argsort(stable=True)
        counts = torch.bincount(topk_ids.flatten(), minlength=self.spec.experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                picked = order[start : start + count]
                start += count
                tokens = picked // self.spec.top_k
                part = self._through(expert, x[tokens])
                out.index_add_(0, tokens, part * weights.view(-1, 1)[picked])
        return out

    def _all(self, x: Tensor, weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Each expert with all rows: more to compute, but the host, or a CUDA graph, needs not know whose they are."""
        out = torch.zeros_like(x)
        for expert in range(self.spec.experts):
            share = (weights * (topk_ids == expert)).sum(-1, keepdim=True)
            out += self._through(expert, x) * share
        return out

    def _through(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up(expert, x).chunk(2, -1)
        return self.down(expert, self.activation(gate).mul_(up))


class StackedExperts(Experts):
    """Plain weights: `gate_up_proj [experts, 2 * width, hidden]`, `down_proj [experts, hidden, width]`."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: "Build") -> None:
        super().__init__(hidden_size, spec, build)
        self.gate_up_proj = build.empty(spec.experts, 2 * spec.width, hidden_size)
        self.down_proj = build.empty(spec.experts, hidden_size, spec.width)

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.gate_up_proj[expert])

    def down(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.down_proj[expert])

    def parts(self) -> dict[str, tuple[int, ...]]:
        width, hidden = self.spec.width, self.hidden_size
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return {
            f"experts.{expert}.{kind}_proj.weight": shape
            for expert in range(self.spec.experts)
            for kind, shape in shapes.items()
        }

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        return {f"experts.{name}": tuple(weight.shape) for name, weight in self.named_parameters()}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        match = _EXPERT_PART.fullmatch(part)
        if match is None:
            copy_rows(self.get_parameter(part.removeprefix("experts.")), tensor, first_row)
            return
        expert, kind = int(match[1]), match[2]
        target = self.down_proj[expert] if kind == "down" else self.gate_up_proj[expert]
        copy_rows(target, tensor, first_row + (self.spec.width if kind == "up" else 0))


class SeparateExperts(Experts):
    """Experts of any format, two `LinearMethod`s each, multiplied one after another."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: "Build", linear_format: "LinearFormat") -> None:
        super().__init__(hidden_size, spec, build)

        def methods(outputs: int, inputs: int) -> list[LinearMethod]:
            shape = LinearShape(outputs, inputs, build.dtype, build.device)
            return [linear_format.linear(shape, build) for _ in range(spec.experts)]

        self._methods = {
            "gate_up": methods(2 * spec.width, hidden_size),
            "down": methods(hidden_size, spec.width),
        }
        self.gate_up_proj, self.down_proj = map(nn.ModuleList, self._methods.values())

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        return self._methods["gate_up"][expert].multiply(x, None)

    def down(self, expert: int, x: Tensor) -> Tensor:
        return self._methods["down"][expert].multiply(x, None)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {
            f"experts.{expert}.{name}_proj.{kind}": layout.shape(len(part.outputs), len(part.inputs))
            for expert in range(self.spec.experts)
            for name in ("gate", "up", "down")
            for matrix, part in (self._place(name),)
            for kind, layout in self._methods[matrix][expert].layouts().items()
        }

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for matrix, (method, *_) in self._methods.items():
            for kind, layout in method.layouts().items():
                shape = layout.shape(method.shape.outputs, method.shape.inputs)
                ending = "" if kind == "weight" else f"_{kind}"
                shapes[f"experts.{matrix}_proj{ending}"] = (self.spec.experts, *shape)
        return shapes

    def part_dtypes(self) -> dict[str, torch.dtype]:
        return {
            part: layout.dtype
            for part in (*self.parts(), *self.fused_parts())
            for kind, layout in self._methods["down"][0].layouts().items()
            if part.endswith(kind) or (kind == "weight" and part.endswith("_proj"))
        }

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if match := _EXPERT_PART.fullmatch(part):
            matrix, place = self._place(match[2])
            self._methods[matrix][int(match[1])].load(match[3], tensor, place, first_row)
        elif match := _STACKED_PART.fullmatch(part):
            matrix, place = self._place(match[1])
            for expert, item in enumerate(tensor, first_row):
                self._methods[matrix][expert].load(match[2] or "weight", item, place)

    def fill_random(self, generator: torch.Generator) -> None:
        for method in chain(*self._methods.values()):
            method.fill_random(generator)

    def finish(self) -> None:
        for method in chain(*self._methods.values()):
            method.finish()

    def _place(self, name: str) -> tuple[str, Part]:
        """The matrix that a checkpoint's "gate", "up", "gate_up" or "down" belongs to, and its place there."""
        width, hidden = self.spec.width, self.hidden_size
        if name == "down":
            return "down", Part(0, range(hidden), range(width))
        first, rows = (width if name == "up" else 0), (2 * width if name == "gate_up" else width)
        return "gate_up", Part(first, range(rows), range(hidden))
