"""The experts of a mixture: many MLPs, gated or not, of which each token takes a few."""

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers.activation import activation_of, gated_activation_of
from kvern.layers.linear_method import LinearMethod, LinearShape, Part, TensorLayout
from kvern.layers.loadable import Loadable, copy_rows
from kvern.layers.parted import PartedMethod
from kvern.model_spec import MoeSpec

if TYPE_CHECKING:
    from kvern.layers.build import Build
    from kvern.layers.linear_format import LinearFormat

_EXPERT_PART = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.([\w.]+)")
_STACKED_PART = re.compile(r"experts\.(gate_up|gate|up|down)_proj(?:_([\w.]+))?")
NAMES = ("gate", "up", "down")


def names_of(spec: MoeSpec) -> tuple[str, ...]:
    """What an expert's matrices are called."""
    return NAMES if spec.gated else NAMES[1:]


class Experts(Loadable):
    """Every expert's gate and up in one matrix `[2 * width, hidden]`, and its down `[hidden, width]`.

    Of experts that are not gated the first is up alone, `[width, hidden]`, whatever its name.

    `expert_counts [experts]` int64, on the device, holds how many tokens each expert has had since the model was built,
    those that pad a batch included. Routers made of kernels keep it; beside PyTorch's it stays zero. `waits`: the host
    may wait for the device to learn which rows are whose, as it may not among kernels.
    """

    expert_counts: Tensor

    def __init__(self, hidden_size: int, spec: MoeSpec, build: "Build") -> None:
        super().__init__(build.path)
        self.spec, self.hidden_size, self.dtype = spec, hidden_size, build.dtype
        self.activation = (gated_activation_of if spec.gated else activation_of)(spec.activation, build)
        counts = torch.zeros(spec.experts, dtype=torch.int64, device=build.device)
        self.register_buffer("expert_counts", counts, persistent=False)
        self.waits = build.device.type == "cpu" or not build.kernels
        self.biases = ExpertBiases(hidden_size, spec, build) if spec.bias else None

    @abstractmethod
    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        """`x [T, hidden] -> [T, first_width]`."""

    @abstractmethod
    def down(self, expert: int, x: Tensor) -> Tensor:
        """`x [T, width] -> [T, hidden]`."""

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        """Sum `x [T, hidden]` through the experts `topk_ids [T, top_k]`, times `weights [T, top_k]`.

        `add [T, hidden]`, if given, is added to the sum.
        """
        out = (self._chosen if self.waits else self._all)(x, weights.to(x.dtype), topk_ids)
        return out if add is None else out + add

    @property
    def bias_pair(self) -> tuple[Tensor, Tensor] | None:
        """`[experts, 2 * width]` of gate and up and `[experts, hidden]` of down, if there are any."""
        return None if self.biases is None else (self.biases.gate_up, self.biases.down)

    @property
    def name(self) -> str:
        """Of what `candidates` multiply, in the keys of measurements."""
        return "unquantized"

    def candidates(self) -> Mapping[int, Mapping[Hashable, Callable[..., Tensor]]]:
        """What is to be timed: by the most tokens that they are for, ways to do what `forward` does."""
        return {}

    def choose(self, tokens: int, candidate: Hashable) -> None:
        """Use one of the `candidates` for up to so many tokens."""

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
        if self.biases is None:
            return self.down(expert, self.activation(self.gate_up(expert, x)))
        activated = self.activation(self.gate_up(expert, x) + self.biases.gate_up[expert])
        return self.down(expert, activated) + self.biases.down[expert]


class ExpertBiases(Loadable):
    """What is added to the products of all experts: `gate_up [experts, 2 * width]` and `down [experts, hidden]`."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: "Build") -> None:
        super().__init__(build.path)
        self.gate_up = build.empty(spec.experts, 2 * spec.width)
        self.down = build.empty(spec.experts, hidden_size)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {_stack(name, "bias"): tuple(bias.shape) for name, bias in self.named_parameters()}

    def stacked_parts(self) -> dict[str, tuple[int, ...]]:
        halves = dict.fromkeys(("gate", "up"), (self.gate_up.shape[0], self.gate_up.shape[1] // 2))
        return {_stack(name, "bias"): shape for name, shape in halves.items()} | {
            _stack("down", "bias"): tuple(self.down.shape)
        }

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        target = self.down if part == _stack("down", "bias") else self.gate_up
        first = self.gate_up.shape[1] // 2 if part == _stack("up", "bias") else 0
        copy_rows(target.narrow(1, first, tensor.shape[1]), tensor, first_row)


class StackedExperts(Experts):
    """Plain weights: `gate_up_proj [experts, first_width, hidden]`, `down_proj [experts, hidden, width]`."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: "Build") -> None:
        super().__init__(hidden_size, spec, build)
        self.gate_up_proj = build.empty(spec.experts, spec.first_width, hidden_size)
        self.down_proj = build.empty(spec.experts, hidden_size, spec.width)

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.gate_up_proj[expert])

    def down(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.down_proj[expert])

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {
            f"experts.{expert}.{name}_proj.weight": shape
            for expert in range(self.spec.experts)
            for name, shape in self._shapes().items()
        }

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        if not self.spec.gated:
            return {}
        weights = {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        return {f"experts.{name}": tuple(weight.shape) for name, weight in weights.items()}

    def stacked_parts(self) -> dict[str, tuple[int, ...]]:
        return {f"experts.{name}_proj": (self.spec.experts, *shape) for name, shape in self._shapes().items()}

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Of an expert's matrices, by their names."""
        width, hidden = self.spec.width, self.hidden_size
        return {name: (hidden, width) if name == "down" else (width, hidden) for name in names_of(self.spec)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if match := _EXPERT_PART.fullmatch(part):
            target, row = self._rows(match[2])
            copy_rows(target[int(match[1])], tensor, row + first_row)
        elif match := _STACKED_PART.fullmatch(part):
            target, row = self._rows(match[1])
            copy_rows(target.narrow(1, row, tensor.shape[1]), tensor, first_row)

    def _rows(self, name: str) -> tuple[Tensor, int]:
        """Of which matrices what a checkpoint calls so are rows, and the first of them."""
        target = self.down_proj if name == "down" else self.gate_up_proj
        return target, self.spec.width if name == "up" and self.spec.gated else 0


class MethodExperts(Experts):
    """Experts whose weights are held by `LinearMethod`s, of any format: how a checkpoint's tensors reach them."""

    @abstractmethod
    def matrix(self, name: str, expert: int) -> tuple[LinearMethod, Part]:
        """What holds a checkpoint's "gate", "up", "gate_up" or "down" of an expert, and its place there."""

    @abstractmethod
    def methods(self) -> Iterable[LinearMethod]:
        """All that hold weights."""

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {
            f"experts.{expert}.{name}_proj.{kind}": layout.shape(len(part.outputs), len(part.inputs))
            for expert in range(self.spec.experts)
            for name in names_of(self.spec)
            for kind, layout, part in self._layouts(name, expert)
        }

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        return self._stacks(("gate_up", "down")) if self.spec.gated else {}

    def stacked_parts(self) -> dict[str, tuple[int, ...]]:
        return self._stacks(names_of(self.spec))

    def optional_parts(self) -> Collection[str]:
        return {name for name, layout in self._all_layouts() if not layout.needed}

    def part_dtypes(self) -> dict[str, torch.dtype]:
        return {name: layout.dtype for name, layout in self._all_layouts()}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if match := _EXPERT_PART.fullmatch(part):
            method, place = self.matrix(match[2], int(match[1]))
            method.load(match[3], tensor, place, first_row)
        elif match := _STACKED_PART.fullmatch(part):
            for expert, item in enumerate(tensor, first_row):
                method, place = self.matrix(match[1], expert)
                method.load(match[2] or "weight", item, place)

    def fill_random(self, generator: torch.Generator) -> None:
        for method in self.methods():
            method.fill_random(generator)

    def finish(self) -> None:
        for method in self.methods():
            method.finish()

    def _layouts(self, name: str, expert: int) -> list[tuple[str, TensorLayout, Part]]:
        method, part = self.matrix(name, expert)
        if name == "gate_up" and isinstance(method, PartedMethod):  # nobody stores them as one
            return []
        return [(kind, layout, part) for kind, layout in method.part_layouts(part.first).items()]

    def _all_layouts(self) -> Iterator[tuple[str, TensorLayout]]:
        """Of all tensors that a checkpoint may have, by name."""
        names = names_of(self.spec)
        for name in (*names, "gate_up") if self.spec.gated else names:
            for kind, layout, _ in self._layouts(name, 0):
                yield _stack(name, kind), layout
        for expert in range(self.spec.experts):
            for name in names:
                for kind, layout, _ in self._layouts(name, expert):
                    yield f"experts.{expert}.{name}_proj.{kind}", layout

    def _stacks(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        layouts = {name: self._layouts(name, 0) for name in names}
        if not all(layouts.values()):
            return {}
        return {
            _stack(name, kind): (self.spec.experts, *layout.shape(len(part.outputs), len(part.inputs)))
            for name, found in layouts.items()
            for kind, layout, part in found
        }

    def _part(self, name: str, first: int) -> Part:
        """The place of what a checkpoint calls so behind the output `first`."""
        width, hidden = self.spec.width, self.hidden_size
        if name == "down":
            return Part(first, range(hidden), range(width))
        rows = 2 * width if name == "gate_up" else width
        return Part(first + (width if name == "up" and self.spec.gated else 0), range(rows), range(hidden))


def _stack(name: str, kind: str) -> str:
    """What a checkpoint calls the tensors of all experts in one."""
    return f"experts.{name}_proj" + ("" if kind == "weight" else f"_{kind}")


class SeparateExperts(MethodExperts):
    """Two `LinearMethod`s for each expert, multiplied one after another.

    `formats` are those of gate, up and down. Gate and up are one matrix where their format joins parts, and where its
    blocks do not reach from one into the other.
    """

    def __init__(self, hidden_size: int, spec: MoeSpec, build: "Build", formats: Mapping[str, "LinearFormat"]) -> None:
        super().__init__(hidden_size, spec, build)

        def method(name: str, outputs: int, inputs: int) -> LinearMethod:
            return formats[name].linear(LinearShape(outputs, inputs, build.dtype, build.device), build)

        def gate_up() -> LinearMethod:
            if not spec.gated:
                return method("up", spec.width, hidden_size)
            if formats["gate"] is formats["up"] and formats["gate"].joins:
                joined = method("gate", 2 * spec.width, hidden_size)
                if spec.width % joined.cuts()[0] == 0:
                    return joined
            parts = [method(name, spec.width, hidden_size) for name in ("gate", "up")]
            return PartedMethod(
                LinearShape(2 * spec.width, hidden_size, build.dtype, build.device), parts, build.on_rows.beside
            )

        self._methods = {
            "gate_up": [gate_up() for _ in range(spec.experts)],
            "down": [method("down", hidden_size, spec.width) for _ in range(spec.experts)],
        }
        self.gate_up_proj, self.down_proj = map(nn.ModuleList, self._methods.values())
        for one in self.methods():
            for part in one.methods():
                part.use_kernels(build)

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        return self._methods["gate_up"][expert].multiply(x, None)

    def down(self, expert: int, x: Tensor) -> Tensor:
        return self._methods["down"][expert].multiply(x, None)

    def matrix(self, name: str, expert: int) -> tuple[LinearMethod, Part]:
        return self._methods["down" if name == "down" else "gate_up"][expert], self._part(name, 0)

    def methods(self) -> Iterable[LinearMethod]:
        return chain(*self._methods.values())
