"""The experts of a mixture: many MLPs, gated or not, of which each token takes a few."""

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build_options import BuildOptions
from kvern.layers.expert_share import ExpertShare
from kvern.layers.linear_method import (
    INPUTS,
    OUTPUTS,
    LinearMethod,
    TensorLayout,
    copy_part,
    taken,
)
from kvern.layers.loadable import Loadable
from kvern.layers.parted import PartedMethod
from kvern.spec.model import MoeSpec

_EXPERT_PART = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.([\w.]+)")
_STACKED_PART = re.compile(r"experts\.(gate_up|gate|up|down)_proj(?:_([\w.]+))?")
NAMES = ("gate", "up", "down")
GROUPED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu")
"""The activations of experts that kernels of plain weights know."""


def names_of(spec: MoeSpec) -> tuple[str, ...]:
    """The names of an expert's matrices."""
    return NAMES if spec.gated else NAMES[1:]


class Experts(Loadable):
    """Every expert's gate and up in one matrix `[2 * width, hidden]`, and its down `[hidden, width]`.

    Of experts that are not gated the first is up alone, `[width, hidden]`, whatever its name.

    `expert_counts [experts]` int64, on the device, holds how many tokens each expert has had since the model was built,
    those that pad a batch included; the router keeps it. `waits`: the host may wait for the device to learn which rows
    are whose, as it may not among kernels. Of several ranks each has a `share`, and what it gives is a summand.
    """

    expert_counts: Tensor

    def __init__(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> None:
        super().__init__(build.path)
        self.spec = spec
        self.hidden_size = hidden_size
        self.dtype = build.dtype
        self.activation = (build.ops.gated_activation if spec.gated else build.ops.activation)(spec.activation)
        counts = torch.zeros(spec.experts, dtype=torch.int64, device=build.device)
        self.register_buffer("expert_counts", counts, persistent=False)
        self.waits = build.device.type == "cpu" or not build.kernels
        self.share = ExpertShare(hidden_size, spec, build.ranks, build.device)
        self.slots = len(self.share.held)
        self.biases = ExpertBiases(self.share, spec, build) if spec.bias else None

    @abstractmethod
    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        """`x [T, hidden] -> [T, first_width]`."""

    @abstractmethod
    def down(self, expert: int, x: Tensor) -> Tensor:
        """`x [T, width] -> [T, hidden]`."""

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        """Sum `x [T, hidden]` through the experts in the slots `topk_ids [T, top_k]`, times `weights [T, top_k]`.

        `topk_ids` are those of `ExpertShare.here`, -1: nothing. `add [T, hidden]`, if given, is added to the sum.
        """
        out = (self.one_by_one if self.waits else self._all)(x, weights, topk_ids)
        return out if add is None else out + add

    @property
    def bias_pair(self) -> tuple[Tensor, Tensor] | None:
        """`[slots, 2 * width]` of gate and up and `[slots, hidden]` of down, if there are any."""
        return None if self.biases is None else (self.biases.gate_up, self.biases.down)

    def tensors_of(self, slot: int) -> list[Tensor] | None:
        """The tensors that hold a slot's expert, to be read or overwritten; None: it has no memory of its own."""
        return None

    def _biases_of(self, slot: int) -> list[Tensor]:
        return [] if self.bias_pair is None else [bias[slot] for bias in self.bias_pair]

    @property
    def name(self) -> str:
        """The name of the weights' format, in the keys of measurements."""
        return "unquantized"

    def candidates(self) -> Mapping[int, Mapping[Hashable, Callable[..., Tensor]]]:
        """The ways to compute `forward` that are to be timed, by the most tokens that they are for."""
        return {}

    def choose(self, tokens: int, candidate: Hashable) -> None:
        """Use one of the `candidates` for up to so many tokens."""

    def one_by_one(self, x: Tensor, weights: Tensor, topk_ids: Tensor) -> Tensor:
        """The sum of `forward` by products of PyTorch: each expert with its own rows, whose number the host awaits."""
        out = torch.zeros_like(x)
        weights = weights.to(x.dtype)
        order = topk_ids.flatten().argsort(stable=True)
        start, *counts = torch.bincount(topk_ids.flatten() + 1, minlength=self.slots + 1).tolist()
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
        weights = weights.to(x.dtype)
        for expert in range(self.slots):
            chosen = topk_ids == expert
            share = (weights * chosen).sum(-1, keepdim=True)
            part = self._through(expert, x) * share  # of rows that chose others it may overflow, and 0 * inf is NaN
            out += part.masked_fill_(~chosen.any(-1, keepdim=True), 0)
        return out

    def _through(self, expert: int, x: Tensor) -> Tensor:
        if self.biases is None:
            return self.down(expert, self.activation(self.gate_up(expert, x)))
        activated = self.activation(self.gate_up(expert, x) + self.biases.gate_up[expert])
        return self.down(expert, activated) + self.biases.down[expert]


class ExpertBiases(Loadable):
    """The biases of all experts' products: `gate_up [slots, 2 * width]` and `down [slots, hidden]`.

    Of experts that are cut one rank adds that of down, and others have zeros.
    """

    def __init__(self, share: ExpertShare, spec: MoeSpec, build: BuildOptions) -> None:
        super().__init__(build.path)
        self._share, self._experts = share, spec.experts
        self.gate_up = build.empty(len(share.held), 2 * spec.width)
        self.down = build.empty(len(share.held), share.shape("down")[0])
        if not share.is_first:
            self.down.zero_()

    def parts(self) -> dict[str, tuple[int, ...]]:
        return self._shapes("gate_up", "down")

    def stacked_parts(self) -> dict[str, tuple[int, ...]]:
        return self._shapes(*NAMES)

    def _shapes(self, *names: str) -> dict[str, tuple[int, ...]]:
        return {_stack(name, "bias"): (self._experts, self._share.shape(name)[0]) for name in names}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        match = _STACKED_PART.fullmatch(part)
        assert match is not None
        if match[1] == "down" and not self._share.is_first:
            return
        target = self.down if match[1] == "down" else self.gate_up
        _copy_experts(self._share, match[1], target, TensorLayout(target.dtype, (OUTPUTS,)), tensor, first_row)


class StackedExperts(Experts):
    """Plain weights: `gate_up_proj [slots, first_width, hidden]`, `down_proj [slots, hidden, width]`.

    Kernels group the products by expert on the device, and nothing waits for it, so that a step can be a CUDA graph.
    """

    def __init__(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> None:
        super().__init__(hidden_size, spec, build)
        self.gate_up_proj = build.empty(self.slots, spec.first_width, hidden_size)
        self.down_proj = build.empty(self.slots, hidden_size, spec.width)
        self.deterministic = build.deterministic
        self._ways = None
        if "moe" in build.kernels and spec.activation in GROUPED_ACTIVATIONS:
            from kvern.kernels.moe import fused_experts, hopper_experts
            from kvern.layers.tuned_experts import Ways

            hopper = "hopper_linear" in build.kernels and hopper_experts(build.dtype, hidden_size, spec.width)
            hopper = hopper and not build.deterministic and spec.has_plain_gate
            self._ways = Ways(partial(self._grouped, fused_experts), hopper, build.dtype.itemsize == 2)

    @property
    def is_fused(self) -> bool:
        """Kernels group the products by expert."""
        return self._ways is not None

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        if self._ways is None:
            return super().forward(x, weights, topk_ids, add)
        return self._ways(x, weights, topk_ids, add)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Callable[..., Tensor]]]:
        return {} if self._ways is None or self.deterministic else self._ways.candidates()

    def choose(self, tokens: int, candidate: Hashable) -> None:
        if self._ways is not None:
            self._ways.choose(tokens, candidate)

    def _grouped(
        self,
        multiply: Callable[..., Tensor],
        x: Tensor,
        weights: Tensor,
        topk_ids: Tensor,
        add: Tensor | None = None,
        **way: Any,
    ) -> Tensor:
        return multiply(
            x,
            self.gate_up_proj,
            self.down_proj,
            weights,
            topk_ids,
            self.spec.activation,
            biases=self.bias_pair,
            add=add,
            deterministic=self.deterministic,
            of=self.share.of,
            **way,
        )

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.gate_up_proj[expert])

    def down(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.down_proj[expert])

    def tensors_of(self, slot: int) -> list[Tensor]:
        return [self.gate_up_proj[slot], self.down_proj[slot], *self._biases_of(slot)]

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {
            f"experts.{expert}.{name}_proj.weight": self.share.shape(name)
            for expert in range(self.spec.experts)
            for name in names_of(self.spec)
        }

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        return self._stacks("gate_up", "down") if self.spec.gated else {}

    def stacked_parts(self) -> dict[str, tuple[int, ...]]:
        return self._stacks(*names_of(self.spec))

    def _stacks(self, *names: str) -> dict[str, tuple[int, ...]]:
        return {_stack(name, "weight"): (self.spec.experts, *self.share.shape(name)) for name in names}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if match := _EXPERT_PART.fullmatch(part):
            target = self._matrices(match[2])
            for slot in self.share.slots_of(int(match[1])):
                _copy_expert(self.share, match[2], target[slot], self._layout, tensor, first_row)
        elif match := _STACKED_PART.fullmatch(part):
            target = self._matrices(match[1])
            _copy_experts(self.share, match[1], target, self._layout, tensor, first_row)

    def _matrices(self, name: str) -> Tensor:
        """The tensor that holds the checkpoint's tensor of this name, or a part of it."""
        return self.down_proj if name == "down" else self.gate_up_proj

    @property
    def _layout(self) -> TensorLayout:
        return TensorLayout(self.dtype, (OUTPUTS, INPUTS))


def _copy_experts(
    share: ExpertShare, name: str, target: Tensor, layout: TensorLayout, tensor: Tensor, first: int
) -> None:
    """Copy the experts in `tensor`, the first of which is `first`, that have slots in `target`."""
    for slot, expert in enumerate(share.held):
        if first <= expert < first + len(tensor):
            _copy_expert(share, name, target[slot], layout, tensor[expert - first])


def _copy_expert(
    share: ExpertShare, name: str, target: Tensor, layout: TensorLayout, tensor: Tensor, first_row: int = 0
) -> None:
    for part in share.parts(name):
        copy_part(layout, target, tensor, part, first_row)


class MethodExperts(Experts):
    """Experts whose weights are held by `LinearMethod`s, of any format: how a checkpoint's tensors reach them."""

    @abstractmethod
    def matrix(self, name: str, slot: int) -> tuple[LinearMethod, int]:
        """The method that holds "gate", "up", "gate_up" or "down" of a slot's expert, and its first output there.

        That is the first of the whole expert's in this matrix.
        """

    @abstractmethod
    def methods(self) -> Iterable[LinearMethod]:
        """All that hold weights."""

    @property
    def name(self) -> str:
        """The names of the formats of all weights."""
        stored = (part.name for method in self.methods() for part in method.methods())
        return " and ".join(dict.fromkeys(stored))

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {
            f"experts.{expert}.{name}_proj.{kind}": layout.shape(*self.share.shape(name))
            for expert in range(self.spec.experts)
            for name in names_of(self.spec)
            for kind, layout in self._layouts(name)
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
            for slot in self._slots_of(int(match[1]), match[2], match[3]):
                self._load(match[2], slot, match[3], tensor, first_row)
        elif match := _STACKED_PART.fullmatch(part):
            name, kind = match[1], match[2] or "weight"
            for expert, own in enumerate(tensor, first_row):
                for slot in self._slots_of(expert, name, kind):
                    self._load(name, slot, kind, own)

    def _slots_of(self, expert: int, name: str, kind: str) -> list[int]:
        """The slots whose matrices take this tensor of an expert."""
        return self.share.slots_of(expert)

    def _load(self, name: str, slot: int, kind: str, tensor: Tensor, first_row: int = 0) -> None:
        method, first = self.matrix(name, slot)
        for part in self.share.parts(name, first):
            found = taken(method.part_layouts(part.first)[kind], tensor, part, first_row)
            if found is not None:
                method.load(kind, *found)

    def fill_random(self, generator: torch.Generator) -> None:
        for method in self.methods():
            method.fill_random(generator)

    def finish(self) -> None:
        for method in self.methods():
            method.finish()

    def _layouts(self, name: str) -> list[tuple[str, TensorLayout]]:
        """The layouts of the tensors of one expert's matrix."""
        method, first = self.matrix(name, 0)
        if name == "gate_up" and isinstance(method, PartedMethod):  # nobody stores them as one
            return []
        return list(method.part_layouts(self.share.parts(name, first)[0].first).items())

    def _all_layouts(self) -> Iterator[tuple[str, TensorLayout]]:
        """The layouts of all tensors that a checkpoint may have, by name."""
        names = names_of(self.spec)
        for name in (*names, "gate_up") if self.spec.gated else names:
            for kind, layout in self._layouts(name):
                yield _stack(name, kind), layout
                if name in names:
                    for expert in range(self.spec.experts):
                        yield f"experts.{expert}.{name}_proj.{kind}", layout

    def _stacks(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        layouts = {name: self._layouts(name) for name in names}
        if not all(layouts.values()):
            return {}
        return {
            _stack(name, kind): (self.spec.experts, *layout.shape(*self.share.shape(name)))
            for name, found in layouts.items()
            for kind, layout in found
        }


def _stack(name: str, kind: str) -> str:
    """A checkpoint's name for the tensors of all experts in one."""
    return f"experts.{name}_proj" + ("" if kind == "weight" else f"_{kind}")
