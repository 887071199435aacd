"""What is said of a kernel in one place: which models launch it, on what, what it returns, and what it must move."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import triton

from kvern.adapters.peft import linear_layers
from kvern.attention.eight_bit import LARGEST_CODE, codes_of
from kvern.kernels.launch import processors
from kvern.kernels.linear import NOTHING, Around
from kvern.layers.build import Build
from kvern.layers.linear_method import LinearMethod
from kvern.models.decoder import Decoder
from kvern.ranks.ranks import ALONE, Ranks
from kvern.spec.model import ModelSpec

Result = torch.Tensor | Sequence[torch.Tensor]


class PackedKind(NamedTuple):
    """A quantized matrix as `Packed` says it, without its numbers. Dtypes are names; "" for what there is not.

    `part` is what a checkpoint calls the first part of the layer, as "q_proj". `activations` become codes of the same
    kind with scales of "rows", of "groups" of 128, or "static" ones; "": not at all.
    """

    part: str
    outputs: int
    inputs: int
    code: str
    group: int = 0
    outputs_per_scale: int = 1
    scale: str = ""
    zero: str = ""
    factor: bool = False
    order: bool = False
    biased: bool = False
    activations: str = ""


class Joined(NamedTuple):
    """What a product of one row does besides: a norm before it, an activation or the residual's addition after it."""

    norm: bool = False
    activation: str | None = None
    residual: bool = False


ALONE_PRODUCT = Joined()


@dataclass
class Inputs:
    """Makes the tensors that kernels are launched on: random numbers, zeros, or memory that nobody reads.

    dtype           that of the model
    cache_dtype     that of a cache in 8 bits; None: the model's
    batch_requests  the most requests of a step, as `batch_tokens` is of tokens
    adapter_rank    the highest rank of `adapter_places` adapters; 0: there are none
    packed          the matrices that the model stores quantized
    drafts          whether steps verify drafts
    has_head        whether a draft head is beside the model
    ranks           this rank, and the number of ranks; `dp_attention` has those that share experts alone
    """

    device: torch.device
    dtype: torch.dtype
    fill_with: Literal["random", "zeros", "empty"] = "random"
    _: KW_ONLY
    block_size: int = 16
    batch_requests: int = 256
    batch_tokens: int = 256
    adapter_rank: int = 0
    adapter_places: int = 2
    cache_dtype: torch.dtype | None = None
    packed: Sequence[PackedKind] = ()
    drafts: bool = True
    has_head: bool = False
    ranks: tuple[int, int] = (0, 1)
    dp_attention: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(0)
        self.processors = processors(self.device)

    def without_device(self) -> "Inputs":
        """The same forms, on memory of the host that nobody reads."""
        return replace(self, device=torch.device("cpu"), fill_with="empty")

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        return self.cache_dtype or self.dtype

    @property
    def hopper(self) -> bool:
        """What is launched is compiled for a GPU of compute capability 9.0."""
        try:
            target = triton.runtime.driver.active.get_current_target()
        except RuntimeError:  # there is no driver
            return False
        return bool(target.backend == "cuda" and target.arch == 90)

    def numbers(self, *shape: int, dtype: torch.dtype | None = None, deviation: float = 1.0) -> torch.Tensor:
        """A tensor of the model's dtype, or another."""
        dtype = dtype or self.dtype
        if self.fill_with == "random":
            return torch.randn(shape, generator=self._generator, dtype=dtype, device=self.device) * deviation
        make = torch.empty if self.fill_with == "empty" else torch.zeros
        return make(shape, dtype=dtype, device=self.device)

    def cache(self, dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and values `[2, ..., kv_heads, head_dim]` of a dtype, and the scales of one of 8 bits."""
        if dtype not in LARGEST_CODE:
            return self.numbers(*shape), None
        scales = (self.numbers(2, shape[-2], dtype=torch.float32).abs() + 1) * 4 / LARGEST_CODE[dtype]
        if self.fill_with != "random":
            make = torch.empty if self.fill_with == "empty" else torch.zeros
            return make(shape, dtype=dtype, device=self.device), scales
        numbers = self.numbers(*shape, dtype=torch.float32).flatten(1, -3)
        codes = [codes_of(*kind, dtype) for kind in zip(numbers, scales, strict=True)]
        return torch.stack(codes).view(shape), scales

    def bytes(self, *shape: int) -> torch.Tensor:
        """Any bytes, uint8."""
        found = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return found.random_(generator=self._generator) if self.fill_with == "random" else found.zero_()

    def fill(self, method: LinearMethod) -> None:
        """Random weights, if numbers are random."""
        if self.fill_with == "random":
            method.fill_random(self._generator)

    def integers(self, values: Iterable[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """These, on the device."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def permutation(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """The numbers below `count`, in a mixed order."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        return order.to(self.device, dtype)

    def around(self, spec: ModelSpec, joined: Joined, width: int, outputs: int) -> Around:
        """What a product of a row of `width` numbers is launched with, of weights with so many outputs."""
        if joined == ALONE_PRODUCT:
            return NOTHING
        gain = self.numbers(width, dtype=torch.float32 if spec.norm.offset else None) if joined.norm else None
        return Around(gain, 1e-6, joined.activation, self.numbers(1, outputs) if joined.residual else None)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros, on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)


class LinearKind(NamedTuple):
    """A linear layer's inputs, the outputs of each of its parts, and whether it has a bias."""

    inputs: int
    outputs: tuple[int, ...]
    biased: bool


def linear_shapes(spec: ModelSpec, dtype: torch.dtype, ranks: Ranks = ALONE) -> list[LinearKind]:
    """Of the linear layers of the model's blocks; of several `ranks` the first alone adds what all would add."""
    layers = tuple(replace(layer, rope=None) for layer in dict.fromkeys(spec.layers))
    outline = Decoder(replace(spec, layers=layers), Build(dtype, torch.device("meta"), 1, ranks=ranks))
    kinds = (
        LinearKind(layer.inputs, tuple(layer.outputs.values()), layer.added is not None)
        for _, layer in linear_layers(outline)
    )
    return list(dict.fromkeys(kinds))


def scored(spec: ModelSpec, inputs: Inputs) -> int:
    """Of how many tokens a rank computes the scores: its part of the vocabulary, and padding."""
    count, _ = Ranks(*inputs.ranks).padded_share(spec.vocab_size)
    return count


def multiplied(spec: ModelSpec, inputs: Inputs) -> list[tuple[int, int, bool]]:
    """Inputs, outputs, and whether there is a bias, of all that a model multiplies by, and a draft head beside it.

    Layers that a head has besides make a state of one, of an embedding and one, or of three.
    """
    kinds = linear_shapes(spec, inputs.dtype, Ranks(*inputs.ranks))
    layers = [(layer.inputs, sum(layer.outputs), layer.biased) for layer in kinds]
    layers.append((spec.hidden_size, scored(spec, inputs), spec.biases.head))
    if inputs.has_head:
        widths = (count * spec.hidden_size for count in (1, 2, 3))
        layers += [(width, spec.hidden_size, biased) for width in widths for biased in (False, True)]
    return list(dict.fromkeys(layers))


@dataclass(frozen=True)
class Call:
    """A kernel with its inputs. `reference` says in float64 what `launch` is to return, and is called before it.

    `sizes` are shown; `bytes` and `operations` are what the launch moves and computes at least.
    """

    sizes: str
    launch: Callable[[], Result]
    reference: Callable[[], Result]
    bytes: float = 0
    operations: float = 0


def never(spec: ModelSpec, inputs: Inputs) -> Iterable[tuple[Any, ...]]:
    """The sizes of a kernel that is not timed."""
    return ()


@dataclass(frozen=True)
class Kernel:
    """A kernel and the calls that matter of it.

    `group` is what is left to PyTorch if the kernel does not work. `make(spec, inputs, *arguments)` is a call;
    `launched(spec, inputs)` gives the arguments of every form that a model launches, on small inputs, `timed` those of
    the sizes whose speed counts.
    """

    name: str
    group: str
    make: Callable[..., Call]
    launched: Callable[[ModelSpec, Inputs], Iterable[tuple[Any, ...]]]
    timed: Callable[[ModelSpec, Inputs], Iterable[tuple[Any, ...]]] = never
