"""Norms over the last dimension."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.device import marks
from kvern.layers.build_options import BuildOptions
from kvern.layers.halves import Update, joined
from kvern.layers.linear_method import LinearMethod
from kvern.layers.loadable import Loadable, Vector
from kvern.spec.model import NormSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes


class NormWeights(Loadable):
    """The weights of a norm, which are ones in a model of random weights."""

    def fill_random(self, generator: torch.Generator) -> None:
        """Ones: rows keep their spread from layer to layer."""
        for name, shape in self.parts().items():
            self.load(name, torch.ones(shape))


class Norm(NormWeights):
    """A norm of `width` entries whose weights the checkpoint calls `name`.

    With `late_sums` it is given a rank's summand of an update, and adds up those of all ranks; for few rows that is
    done within the norm's kernel.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, spec: NormSpec, width: int, name: str, build: BuildOptions, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`, if there is one, is that of the weights, and PyTorch computes the norm."""
        super().__init__(build.path)
        self.spec = spec
        self.name = name
        self.shape = (width,)
        self.epsilon = spec.epsilon
        self.gain = 1.0
        self._ops = build.ops
        self._coded: Callable[..., RowCodes] | None = None
        self._compute: Callable[..., tuple[Tensor, Tensor]] = Norm._by_torch
        is_rms = spec.kind == "rms"
        if dtype is None:
            dtype = torch.float32 if is_rms and spec.offset else None
            if is_rms and spec.weight and build.ops.norm is not None:
                self._compute, self._coded = Norm._by_kernel, build.ops.coded_norm
            elif build.ops.any_norm is not None:
                self._compute, dtype = Norm._by_any_norm, torch.float32
            elif is_rms and spec.weight and is_on_cpu(build):
                self._compute, dtype = Norm._by_length, torch.float32
                self.gain = math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * spec.epsilon))
        self.weight = build.empty(width, dtype=dtype) if spec.weight else None
        self.bias = build.empty(width, dtype=dtype) if spec.bias else None
        self._ranks = build.ranks if build.late_sums and self._coded is not None else None

    def _by_torch(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of both, which may be written to `hidden`, and its norm; so do the others.

        Weights of 1 + w need more digits than bfloat16 has, so a norm with an offset multiplies in float32, as Gemma's.
        """
        if update is not None:
            hidden = hidden + update
        if self.spec.kind != "rms":
            return hidden, F.layer_norm(hidden, self.shape, self.weight, self.bias, self.epsilon)
        if self.spec.offset:
            return hidden, F.rms_norm(hidden.float(), self.shape, self.weight, self.epsilon).to(hidden.dtype)
        return hidden, F.rms_norm(hidden, self.shape, self.weight, self.epsilon)

    def _by_any_norm(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        any_norm = cast("Callable[..., Tensor]", self._ops.any_norm)
        return hidden, any_norm(hidden, update, self.weight, self.bias, self.epsilon, self.spec.kind)

    def _by_kernel(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        norm = cast("Callable[..., Tensor]", self._ops.norm)
        return hidden, norm(hidden, update, self.weight, self.epsilon)

    def _by_length(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """A root-mean-square norm on a CPU; its float32 weights hold the factor sqrt(width)."""
        if update is not None:
            hidden = hidden + update
        return hidden, divide_by_length(hidden, self._floor).mul_(self.kernel_weight).to(hidden.dtype)

    @property
    def kernel_weight(self) -> Tensor:
        """The weight, as kernels take it, which compute norms with weights and no others."""
        assert self.weight is not None
        return self.weight

    @property
    def is_fused(self) -> bool:
        """The norm is computed by a kernel that can also make codes of it."""
        return self._coded is not None

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(self, x, None)[1]

    def after(self, hidden: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """Add `update` to the residual: the new residual and its norm, both `[T, width]`. The old one may be gone."""
        if self._ranks is not None:
            hidden, update = joined(hidden, update)
            peers = self._ranks.peers
            if update is not None and peers is not None and peers.takes(update):
                outer = marks.enter(marks.COLLECTIVES)
                normal = peers.sum_norm(update, hidden, self.kernel_weight, self.epsilon)
                marks.begin(outer)
                return hidden, normal
            update = None if update is None else self._ranks.sum(update)
        return self._compute(self, hidden, update)

    def before(
        self, method: LinearMethod | None, hidden: Tensor, update: Tensor | None
    ) -> "tuple[Tensor, Tensor | RowCodes]":
        """Do the same as `after`; if `method` multiplies codes and nothing else reads the norm, return codes of it."""
        coding = None if method is None or self._coded is None else method.coding(hidden.shape[0])
        if coding is None or self._coded is None:
            return self.after(hidden, update)
        if self._ranks is not None and update is not None:
            peers = self._ranks.peers
            if peers is not None and peers.takes(update):
                outer = marks.enter(marks.COLLECTIVES)
                codes = peers.sum_codes(update, hidden, self.kernel_weight, self.epsilon, coding)
                marks.begin(outer)
                return hidden, codes
            update = self._ranks.sum(update)
        return hidden, self._coded(hidden, update, self.weight, self.epsilon, coding)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.{kind}": self.shape for kind, _ in self.named_parameters()}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        kind = part.rpartition(".")[2]
        target = self.get_parameter(kind).narrow(0, first_row, tensor.shape[0])
        tensor = tensor.to(target)
        target.copy_((tensor + self.spec.offset) * self.gain if kind == "weight" else tensor)


class Gain(Vector):
    """A learned factor of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).to(x.dtype)

    def after(self, hidden: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """Returns `hidden` with the update added, and that sum times the weights."""
        hidden, added = joined(hidden, update)
        whole = hidden if added is None else hidden + added
        return whole, self.forward(whole)


def is_on_cpu(build: BuildOptions) -> bool:
    """True if a build is for a CPU."""
    return build.device.type == "cpu"


def divide_by_length(x: Tensor, floor: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + floor^2)` along the last dimension, in float32.

    With `floor = sqrt(width * epsilon)` this is a root-mean-square norm over sqrt(width), in half as many operations as
    `F.rms_norm` takes on a CPU.
    """
    length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    return torch.div(x, length.hypot_(floor))
