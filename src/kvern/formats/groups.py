"""Weights with 4-bit or 8-bit codes, and a scale for each group of a row's inputs.

Tensors of a checkpoint are converted to this form run by run while they are loaded, on the weight's device, without
other memory for a whole layer. `layouts` and `load` of a format define the conversion.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvern.errors import UnsupportedModel
from kvern.formats.method import MIDDLE, NUMBERS, RUN_NUMBERS, Packed, QuantizedMethod
from kvern.kernels.expert_lanes import LaneWeight, in_lanes
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import (
    INPUTS,
    OUTPUTS,
    Axis,
    LinearMethod,
    LinearShape,
    Part,
    TensorLayout,
    copy_part,
)

EXACT = ("int4", "int8", "e2m1")
"""Codes whose values, minus a zero, are exact in any dtype of activations."""


SMALLEST_SHARED = 32
"""The smallest group that a share of a matrix may cut; kernels for CPUs and GPUs support such groups."""


class Form(NamedTuple):
    """The stored form of a matrix: the code, and the number of inputs that share a scale; -1: a whole row."""

    code: str
    group: int
    scale: torch.dtype = torch.float16
    zero: bool = False
    factor: bool = False
    ordered: bool = False


class GroupedMethod(QuantizedMethod):
    """`(code - zero) * scale`, or a number of the code's times `scale`, times the row's `factor`.

    `codes` uint8 [outputs, inputs / 2], whose low four bits are the even input's, or int8 [outputs, inputs]; `scale`
    and `zero` [outputs, inputs / group]. E8M0 scales are uint8, the exponent plus 127. A share of a larger matrix that
    begins or ends within groups of a checkpoint, `groups`, has smaller ones.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    factor: Tensor | None
    order: Tensor | None
    """[inputs] int32: until all is loaded the group of each input, then `Packed.order`."""

    def __init__(self, shape: LinearShape, form: Form) -> None:
        self.form = form
        self.group = shape.inputs if form.group == -1 else math.gcd(form.group, shape.inputs)
        self.groups = Axis("others", 1) if form.group == -1 else Axis("inputs", form.group)
        self._own_groups = self.groups if form.group == -1 else Axis("inputs", self.group)
        super().__init__(shape)
        for kind in {"zero", "factor", "order"} - self.storage().keys():
            setattr(self, kind, None)
        self.name = f"{form.code} in groups of {self.group}{' in any order' * form.ordered}"
        self._begun: set[str] = set()
        self._ordered_by: int | None = None

    def storage(self) -> Mapping[str, TensorLayout]:
        form, groups = self.form, (OUTPUTS, self._own_groups)
        wide = form.code == "int8"
        layouts = {
            "codes": TensorLayout(torch.int8, (OUTPUTS, INPUTS))
            if wide
            else TensorLayout(torch.uint8, (OUTPUTS, Axis("inputs", 2))),
            "scale": TensorLayout(form.scale, groups),
        }
        if form.zero:
            layouts["zero"] = TensorLayout(torch.int8 if wide else torch.uint8, groups)
        if form.factor:
            layouts["factor"] = TensorLayout(torch.float32, (OUTPUTS,))
        if form.ordered:
            layouts["order"] = TensorLayout(torch.int32, (INPUTS,))
        return layouts

    def cuts(self) -> tuple[int, int]:
        """Shares may cut a group of a checkpoint: each then has its scale, for smaller groups."""
        outputs, inputs = super().cuts()
        if self.form.ordered:
            return outputs, self.shape.inputs
        return outputs, SMALLEST_SHARED if inputs % SMALLEST_SHARED == 0 else inputs

    def put(self, kind: str, tensor: Tensor, part: Part, first: int, along: int = 0) -> None:
        """Copy a run of a part of `codes`, `scale` or `zero`, as they are stored here: see `copy_part`.

        Scales keep the checkpoint's precision. Raises ValueError for a scale that is no number.
        """
        if kind in ("scale", "zero") and self.group < self.form.group:
            copies = self.form.group // self.group
            tensor, first = tensor.repeat_interleave(copies, 1), first * copies if along == 1 else first
        target = getattr(self, kind)
        if tensor.dtype.itemsize == 1 < target.dtype.itemsize:
            tensor = tensor.float()
        if kind == "scale" and not bool(_finite(tensor).all()):
            raise ValueError("a scale is not finite; the file is damaged, download it again")
        if target.dtype.itemsize > 1:
            target = self._in_dtype(kind, tensor.dtype)
        copy_part(self.storage()[kind], target, tensor, part, first, along)

    def put_factor(self, value: Tensor, part: Part, divides: bool = False) -> None:
        """The one number that multiplies, or `divides`, all rows of a part. Raises ValueError unless it is above 0."""
        number = float(value)
        if not 0 < number < float("inf"):
            raise ValueError(f"the scale of the whole weight is {number}; it has to be above 0")
        assert self.factor is not None
        self.factor[part.first : part.first + len(part.outputs)] = 1 / number if divides else number

    def put_group_index(self, groups: Tensor, part: Part, first: int) -> None:
        """A run of the group of each input. Raises ValueError where this matrix cannot be stored so."""
        place = slice(first - part.inputs.start, first - part.inputs.start + len(groups))
        if self.order is None:
            inputs = torch.arange(first, first + len(groups), device=groups.device)
            expected = inputs // self.form.group if self.form.group != -1 else torch.zeros_like(inputs)
            if not torch.equal(groups.long(), expected):
                raise ValueError(
                    "its inputs are not in the order of their groups, though the quantization_config says neither "
                    "desc_act (GPTQ) nor actorder (compressed-tensors): correct it there"
                )
            return
        count = self.shape.inputs // self.group
        wrong = groups[(groups < 0) | (groups >= count)]
        if len(wrong):
            raise ValueError(f"an input is in group {int(wrong[0])} of {count} groups; the file is damaged")
        if self._ordered_by in (None, part.first):
            self._ordered_by = part.first
            self.order[place] = groups
        elif not torch.equal(groups.int(), self.order[place]):
            raise ValueError(
                "its inputs are in another order than those of the parts that share its product; quantize the model "
                "without desc_act"
            )

    def finish(self) -> None:
        is_known = not self.codes.is_meta
        if is_known and self.zero is not None and bool((self.zero == MIDDLE[self.form.code]).all()):
            self.zero = None
        if is_known and self.order is not None:
            self._sort_inputs(self.order)
        super().finish()

    def _sort_inputs(self, groups: Tensor) -> None:
        """Bring the inputs of each group together. Raises ValueError if groups are not equally large."""
        counts = torch.bincount(groups, minlength=self.shape.inputs // self.group)
        if not bool((counts == self.group).all()):
            raise ValueError(f"groups of inputs have {int(counts.min())} to {int(counts.max())}, not {self.group} each")
        order = torch.argsort(groups, stable=True)
        if torch.equal(order, torch.arange(len(order), device=order.device)):
            self.order = None
            return
        for codes in torch.split(self.codes, max(1, RUN_NUMBERS // self.shape.inputs)):
            codes.copy_(codes[:, order] if self._wide else pack_pairs(unpack_pairs(codes)[:, order]))
        self.order = nn.Parameter(order.int(), requires_grad=False)

    def rows(self, index: Tensor | slice) -> Tensor:
        scale = self._scales(index)
        number = scale.dtype
        codes = self.stored_rows(self.codes, index)
        plain = self._plain(codes, number).view(*scale.shape, self.group)
        if self.zero is not None:
            plain = plain - self.stored_rows(self.zero, index).to(number).unsqueeze(-1)
        plain = plain.mul_(scale.unsqueeze(-1)).view(-1, self.shape.inputs).to(self.shape.dtype)
        return plain if self.order is None else torch.empty_like(plain).index_copy_(1, self.order.long(), plain)

    def packed(self) -> Packed:
        return Packed(
            self.form.code, self.codes, self.scale, self.zero, self.group, order=self.order, factor=self.factor
        )

    def take_lanes(self) -> LaneWeight:
        """Reorders the matrix into lanes, which it must fit; the caller alone multiplies by it from then on."""
        weight = in_lanes(self.packed())
        self.scale = nn.Parameter(weight.scales, requires_grad=False)
        return weight

    def fill_random(self, generator: torch.Generator) -> None:
        super().fill_random(generator)
        if self.scale.dtype == torch.uint8:
            self.scale.random_(118, 123, generator=generator)
        if self.zero is not None:
            self.zero.fill_(MIDDLE[self.form.code] - 1)
        if self.order is not None:
            inputs = torch.randperm(self.shape.inputs, generator=generator, device=self.order.device)
            self.order.copy_(inputs // self.group)

    @property
    def _wide(self) -> bool:
        """True if codes have one byte each."""
        return self.codes.dtype == torch.int8

    def _in_dtype(self, kind: str, dtype: torch.dtype) -> Tensor:
        """The parameter in a dtype that holds both loaded and new values."""
        found: Tensor = getattr(self, kind)
        dtype = dtype if dtype.itemsize <= 4 else torch.float32
        wanted = torch.promote_types(found.dtype, dtype) if kind in self._begun else dtype
        self._begun.add(kind)
        if wanted != found.dtype:
            setattr(self, kind, nn.Parameter(found.to(wanted), requires_grad=False))
        made: Tensor = getattr(self, kind)
        return made

    def _scales(self, index: Tensor | slice) -> Tensor:
        """The scales of rows, their factors in them, in the dtype to multiply in: so that only a product is rounded."""
        scale = self.scale
        if scale.dtype == torch.uint8:
            return _exponents(scale.device)[self.stored_rows(scale, index).int()]
        if scale.dtype == torch.float8_e4m3fn:  # which has no index of its own
            scale = self.stored_rows(scale.view(torch.uint8), index).view(torch.float8_e4m3fn).float()
        else:
            whole = self.zero is None or not self.zero.is_floating_point()
            exact = self.form.code in EXACT and whole and scale.dtype == self.shape.dtype
            scale = self.stored_rows(scale, index) if exact else self.stored_rows(scale, index).float()
        return scale if self.factor is None else scale * self.stored_rows(self.factor, index).view(-1, 1)

    def _plain(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of `codes [N, ...]`, to be written to: `[N, inputs]`."""
        if self._wide:
            return codes.to(dtype)
        middle = MIDDLE.get(self.form.code, 0) if self.zero is None else 0
        table = _pairs(self.form.code, middle, dtype, codes.device)
        return table.index_select(0, codes.flatten().int()).view(dtype)  # a fifth of the time of an index


def _finite(scale: Tensor) -> Tensor:
    """True for scales that are numbers; in one byte all bits set, except e4m3's sign, mean NaN."""
    if scale.dtype.itemsize > 1:
        return scale.isfinite()
    bits = 127 if scale.dtype == torch.float8_e4m3fn else 255
    return (scale.view(torch.uint8) & bits) != bits


@lru_cache(maxsize=64)
def _pairs(code: str, middle: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: the two numbers of each byte, as one integer of twice their width."""
    numbers = torch.tensor(NUMBERS[code], dtype=torch.float32, device=device) - middle
    byte = torch.arange(256, device=device)
    pairs = torch.stack([numbers[byte & 15], numbers[byte >> 4]], -1).to(dtype)
    return pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32).flatten()


@lru_cache(maxsize=8)
def _exponents(device: torch.device) -> Tensor:
    """[256] float32: the numbers of E8M0 (OCP Microscaling Formats 1.0, 5.4.1), of which the last is none."""
    return torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], device=device)


def unpack_pairs(codes: Tensor) -> Tensor:
    """uint8 [..., N]: two codes in a byte, the low four bits first -> [..., 2 * N], a code in each."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def pack_pairs(codes: Tensor) -> Tensor:
    """Packs uint8 [..., 2 * N] below 16 into [..., N], the inverse of `unpack_pairs`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def words_to_bytes(words: Tensor) -> Tensor:
    """int32 [..., N] -> uint8 [..., 4 * N], the lowest byte of each first."""
    return words.to(torch.int32).flatten().contiguous().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])


def signed(codes: Tensor) -> Tensor:
    """uint8 codes, of which 128 means zero -> int8 codes, of which 0 does."""
    return (codes ^ 128).view(torch.int8)


class GroupedFormat(LinearFormat):
    """Makes a `GroupedMethod` of matrices that can be cut into groups of `group` inputs and words of `per_word`.

    `name` is that of the format in messages. `per_word_of_outputs`: codes are packed along outputs, too.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[LinearShape], GroupedMethod],
        group: int,
        *,
        per_word: int = 2,
        per_word_of_outputs: int = 1,
        joins: bool = True,
    ) -> None:
        self.name = name
        self._make = make
        self.joins = joins
        self._inputs, self._outputs = [per_word] + [group] * (group != -1), [per_word_of_outputs]

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        for what, size, pieces in (("inputs", shape.inputs, self._inputs), ("outputs", shape.outputs, self._outputs)):
            for piece in pieces:
                if size % piece and build.ranks.size == 1:
                    raise UnsupportedModel(
                        f"{build.path or 'the model'}: a weight of {size} {what} cannot be cut into groups of {piece}, "
                        f"as {self.name} is; quantize it with a group size that divides {size}, or leave it plain"
                    )
        return self._make(shape)


def check_group(name: str, group: Any) -> int:
    """A group size of a configuration: a multiple of 8 above 0, or -1. Raises UnsupportedModel."""
    if isinstance(group, bool) or not isinstance(group, int) or (group != -1 and (group < 8 or group % 8)):
        raise UnsupportedModel(
            f"{name} has the group size {group!r:.40}; it may be -1 (a whole row) or a multiple of 8"
        )
    return group
